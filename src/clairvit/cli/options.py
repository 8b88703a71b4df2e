"""Options that several commands share, and dataclasses that group them: `ModelOptions`, `RunOptions`, ….

A command takes a group as one parameter; `expand_groups` turns it into one command-line option per field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from clairvit.cli.arguments import (
    data_specs,
    read_dense_targets,
    read_display,
    read_neuron,
    read_preprocess,
    read_readouts,
    read_words,
    split_labels,
    split_names,
)
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.plan import ModelConfig
    from clairvit.models.model import Model

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE",
        help="Files, folders or globs ('pets/*.jpg'); 'demo' is a built-in photo of a cat.",
        show_default=False,
    ),
]
OptionalImages = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IMAGE|DATA",
        help="Files, folders or globs; or one data set, e.g. pets:PATH, with the masks and classes it has.",
        show_default=False,
    ),
]


def method_list(help_text: str, default: str) -> Any:
    """Return the option --method, which is repeatable and takes lists separated by commas."""
    return typer.Option("--method", metavar="A,B,…", help=help_text, show_default=default)


def metric_list(help_text: str, default: str) -> Any:
    """Return the option --metric, which is repeatable and takes lists separated by commas."""
    return typer.Option("--metric", metavar="A,B,…", help=help_text, show_default=default)


METHODS_HELP = "Methods, separated by commas or repeated; 'all' are those that fit the model and are not slow."
METRICS_HELP = "Metrics, separated by commas or repeated: any of 'clairvit metrics'."
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="pets (built in), timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME:PRETRAINED, file:PATH.safetensors, "
        "or MODULE:ATTRIBUTE of your own code.",
        rich_help_panel="Model",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE:NAME",
        help="The architecture of file:… weights, e.g. timm:vit_base_patch16_224.",
        rich_help_panel="Model",
    ),
]
NoPretrained = Annotated[bool, typer.Option("--no-pretrained", help="Random weights.", rich_help_panel="Model")]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|A,B,…",
        help="Class names in order, or prompts for CLIP: a JSON list in a file, or the names themselves.",
        rich_help_panel="Model",
    ),
]
Activation = Annotated[
    str | None,
    typer.Option(
        metavar="softmax|sigmoid|raw",
        help="What scores mean: one class of several, each class for itself, or no probabilities (regression, cosine).",
        show_default="what the model states",
        rich_help_panel="Model",
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="Subtracted from pixels in 0..1, e.g. 0.485,0.456,0.406.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="Pixels are divided by it afterwards, e.g. 0.229,0.224,0.225.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Resize = Annotated[
    str | None,
    typer.Option(
        metavar="N|ROWS,COLUMNS",
        help="Short side in pixels before the crop, or a box that the image covers.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(
        metavar="N|ROWS,COLUMNS",
        help="Size of the centre crop, which is the model's image size, where it leaves a choice.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Interpolation = Annotated[
    str | None,
    typer.Option(
        help="Of the resize: nearest, lanczos, bilinear, bicubic, box or hamming.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Display = Annotated[
    str | None,
    typer.Option(
        metavar="N|R,G,B",
        help="Channels that pictures show of a model with other than three: numbers from 0, one of them in grey.",
        show_default="the first three",
        rich_help_panel="Preprocessing",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1, mps.", rich_help_panel="Model")]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        metavar="CLASS,…",
        help="Class names (or unique beginnings) or numbers, side by side; default: the predicted class.",
        rich_help_panel="Target",
    ),
]
OneTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="CLASS",
        help="A class name (or its unique beginning) or number, or 'label': the true class; default: the prediction.",
        rich_help_panel="Target",
    ),
]
Contrast = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="CLASS CLASS", help="Why the first class rather than the second.", rich_help_panel="Target"),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        metavar="PROMPT",
        help="A prompt that CLIP or SigLIP compares with the image, word for word; may be repeated.",
        show_default=False,
        rich_help_panel="Target",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="PROMPT",
        help="A neutral prompt, 'a photo': the mean similarity to all of them is subtracted from that of --text.",
        show_default=False,
        rich_help_panel="Target",
    ),
]
SimilarTo = Annotated[
    str | None,
    typer.Option(
        "--similar-to",
        metavar="IMAGE",
        help="Another image: what makes the two alike, by the cosine of their embeddings.",
        show_default=False,
        rich_help_panel="Target",
    ),
]
Region = Annotated[
    list[str] | None,
    typer.Option(
        "--region",
        metavar="[CLASS@]L,T,R,B",
        help="The mean score of a segmenter or depth model in a box, in pixels of the image that the model sees.",
        rich_help_panel="Target",
    ),
]
Point = Annotated[
    list[str] | None,
    typer.Option(
        "--point", metavar="[CLASS@]X,Y", help="The same at one pixel; SAM's prompt.", rich_help_panel="Target"
    ),
]
Query = Annotated[
    list[str] | None,
    typer.Option(
        "--query",
        metavar="[CLASS@]INDEX|CLASS[:SIDE]",
        help="A detector's query: its number, or the best one of a class; ':left' for a side of its box.",
        rich_help_panel="Target",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="A question to a vision-language model; its next word is explained, or those of --word.",
        rich_help_panel="Target",
    ),
]
Word = Annotated[
    list[str] | None,
    typer.Option(metavar="WORD,…", help="Words that could come next after --prompt.", rich_help_panel="Target"),
]
Generate = Annotated[
    bool,
    typer.Option("--generate", help="Explain each word of the answer to --prompt.", rich_help_panel="Target"),
]
Neuron = Annotated[
    list[str] | None,
    typer.Option(
        "--neuron",
        metavar="LAYER,CHANNEL[@ROW,COL]",
        help="A channel of a block's output, over all patches or at one: why is it active? Counted from 0.",
        rich_help_panel="Target",
    ),
]
Score = Annotated[
    str | None,
    typer.Option(
        help="logit, prob or logprob.",
        show_default="the method's own: logit, or prob where patches are removed",
        rich_help_panel="Target",
    ),
]
# Where a command has to know whether the option was typed, it takes MAPS or MASK_KIND with None as the default.
MAPS = typer.Option(
    metavar="raw|abs|relu|min-max|over-largest",
    help="Normalisation of each map before it is scored.",
    show_default="raw",
)
Maps = Annotated[str, MAPS]
Masks = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|mask-rcnn",
        help="A folder with a mask for each image, 'cat.png' for 'cat.jpg', or mask-rcnn to find objects.",
        rich_help_panel="Annotations",
    ),
]
MaskFolder = Annotated[
    str | None,
    typer.Option(
        "--masks",
        metavar="DIR",
        help="With folder:PATH: a folder with a mask for each image, 'cat.png' for 'cat.jpg'.",
        rich_help_panel="Annotations",
    ),
]
MASK_KIND = typer.Option(
    metavar="nonzero|trimap|voc",
    help="Which pixels are the object: not zero; 1 of a trimap (Oxford-IIIT Pet); neither 0 nor 255 (Pascal VOC).",
    show_default="nonzero",
    rich_help_panel="Annotations",
)
MaskKind = Annotated[str, MASK_KIND]
Weights = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Weights of Mask R-CNN, else from the hub.", rich_help_panel="Annotations"),
]
Truth = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|folders",
        help="True classes: a CSV with the columns image, class (and other), or the folders' names.",
        rich_help_panel="Annotations",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help="Split of a data set: test, val, …", show_default="its first one", rich_help_panel="Data"),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of images, sampled with the seed from all classes.", rich_help_panel="Data"
    ),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Fetch the data set into PATH if it is not there: pets, flowers, caltech101, voc.",
        rich_help_panel="Data",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many variants of the image a sampling method draws (lime, kernelshap, rise, …).",
        show_default="the method's own",
        rich_help_panel="Perturbation",
    ),
]
Removal = Annotated[
    str | None,
    typer.Option(
        help="How patches are removed: token, mean, image-mean, black, minimum, blur, gaussian-blur, noise or road.",
        show_default="the method's own",
        rich_help_panel="Perturbation",
    ),
]
Autocast = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16",
        help="Run the perturbed images in half precision: faster, less exact.",
        rich_help_panel="Run",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", rich_help_panel="Run")]
Out = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="A folder (PNG, JSON and NPZ for each image) or one file: .png .jpg .pdf .svg .json .npz",
        rich_help_panel="Result",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document for machines, nothing else.", rich_help_panel="Result")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel="Result")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Images in one pass of the model, perturbed ones too.",
        show_default="8 images, perturbed ones as many as fit",
        rich_help_panel="Run",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:PATH",
        help="A data set: pets:PATH, folder:PATH, wds:SHARDS, parquet:PATH, hfds:NAME:SPLIT, scenes, …; a folder alone "
        "is folder:PATH.",
        show_default=False,
        rich_help_panel="Data",
    ),
]


@dataclass(frozen=True)
class OptionGroup:
    """Base class of frozen dataclasses whose fields are command-line options."""


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """How a model is loaded: everything but its name."""

    arch: Arch = None
    no_pretrained: NoPretrained = False
    labels: Labels = None
    activation: Activation = None
    device: Device = None
    mean: Mean = None
    std: Std = None
    resize: Resize = None
    crop: Crop = None
    interpolation: Interpolation = None

    def preprocess(self) -> dict[str, Any]:
        """Return the preprocessing as arguments of `cv.load`; raise BadInput before a model is loaded."""
        return read_preprocess(self.mean, self.std, self.resize, self.crop, self.interpolation)

    def label_names(self) -> str | list[str] | None:
        """Return the labels themselves, or the path of their file."""
        return None if self.labels is None else split_labels(self.labels)

    def load(self, name: str) -> Model:
        """Load the model of that name."""
        import clairvit as cv

        return cv.load(
            name,
            pretrained=not self.no_pretrained,
            arch=self.arch,
            labels=self.label_names(),
            device=self.device,
            activation=self.activation,
            **self.preprocess(),
        )

    def config(self, name: str, arch: str | None = None) -> ModelConfig:
        """Return the model of that name as a study stores it."""
        from clairvit.bench.plan import ModelConfig

        settings = {"crop" if key == "size" else key: value for key, value in self.preprocess().items()}
        names = self.label_names()
        labels = tuple(names) if isinstance(names, list) else names
        return ModelConfig(name, arch, labels, not self.no_pretrained, self.activation, **settings)

    def typed(self) -> list[str]:
        """Return the options that belong to the model itself as they were typed: ['--arch', 'timm:…']."""
        names = ("arch", "labels", "activation", "mean", "std", "resize", "crop", "interpolation")
        values = {f"--{name}": getattr(self, name) for name in names}
        return [part for name, value in values.items() if value is not None for part in (name, value)]


@dataclass(frozen=True)
class PictureModelOptions(ModelOptions):
    """How a model is loaded whose images are drawn."""

    display: Display = None

    def preprocess(self) -> dict[str, Any]:
        """Return the preprocessing and the channels that are shown as arguments of `cv.load`."""
        return {**super().preprocess(), **read_display(self.display)}


@dataclass(frozen=True)
class TargetOptions(OptionGroup):
    """Which output of the model is explained."""

    target: Target = None
    contrast: Contrast = None
    text: Texts = None
    against: Against = None
    similar_to: SimilarTo = None
    region: Region = None
    point: Point = None
    query: Query = None
    neuron: Neuron = None
    prompt: Prompt = None
    word: Word = None
    generate: Generate = False
    score: Score = None

    def readouts(self) -> list[Any]:
        """Return the targets that are no classes; raise BadInput before a model is loaded."""
        return [
            *read_readouts(self.text, self.against, self.similar_to),
            *read_dense_targets(self.region or (), self.point or (), self.query or ()),
            *(read_neuron(text) for text in self.neuron or ()),
            *read_words(self.prompt, self.word, self.generate),
        ]


@dataclass(frozen=True)
class ReadoutOptions(OptionGroup):
    """What every image is scored by, if that is no class."""

    text: Texts = None
    against: Against = None
    similar_to: SimilarTo = None
    region: Region = None
    point: Point = None
    query: Query = None
    neuron: Neuron = None
    prompt: Prompt = None
    word: Word = None

    def readouts(self) -> list[Any]:
        """Return the targets that are no classes; raise BadInput before a model is loaded."""
        return TargetOptions(**vars(self)).readouts()

    def title(self, target: str | None) -> str | None:
        """Return what was typed as the target, for a record."""
        if self.similar_to:
            return f"similar to {self.similar_to}"
        places = [*(self.region or ()), *(self.point or ()), *(self.query or ())]
        neurons = [f"neuron {text}" for text in self.neuron or ()]
        words = [] if self.prompt is None else [*(self.word or ()), f"the next word after {self.prompt!r}"]
        typed = [*(self.text or ()), *places, *neurons, *words]
        against = f" against {', '.join(self.against)}" if self.against else ""
        return f"{typed[0]}{against}" if typed else target


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """Options of methods that perturb the image, handed to those methods that have them."""

    samples: Samples = None
    removal: Removal = None

    def typed(self) -> dict[str, Any]:
        """Return the options that were typed, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class RunOptions(OptionGroup):
    """How the passes are run."""

    seed: Seed = 0
    autocast: Autocast = None
    batch_size: BatchSize = None

    def check(self) -> None:
        """Raise BadInput before a model is loaded."""
        from clairvit.perturbation.batching import check_execution_options

        check_execution_options(self.batch_size, self.autocast)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `cv.explain`, `cv.compare`, `cv.evaluate` and `cv.choose`."""
        return dict(vars(self))


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """What is printed."""

    as_json: AsJson = False
    quiet: Quiet = False

    @property
    def hidden(self) -> bool:
        """Return whether nothing is printed for people."""
        return self.as_json or self.quiet


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Which data set, and how much of it."""

    data: Data = None
    split: Split = None
    limit: Limit = None
    download: Download = False

    def specs(self) -> list[str]:
        """Return the data sets as 'NAME:PATH' each."""
        return data_specs(self.data or [])

    def single_spec(self) -> str | None:
        """Return the one data set, None if there is none; raise BadInput for several."""
        specs = self.specs()
        if len(specs) > 1:
            raise BadInput(f"--data names {len(specs)} data sets ({', '.join(specs)}); expected one.")
        return specs[0] if specs else None


def model_names(texts: list[str] | None) -> list[str]:
    """Return the values of a repeatable --model, 'pets' if there are none."""
    return split_names(texts or ["pets"], "--model")


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one option per field in place of each parameter that is an `OptionGroup`.

    A parameter of the command itself replaces a field of the same name; its value goes into the group as well.
    """
    parameters = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, OptionGroup)}
    direct = [name for name in parameters if name not in groups]
    expanded: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        if name not in groups:
            expanded[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            if field.name not in direct:
                expanded[field.name] = inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field_hints[field.name],
                )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        arguments = {name: values[name] for name in direct}
        for name, group in groups.items():
            arguments[name] = group(**{field.name: values[field.name] for field in fields(group)})
        command(**arguments)

    run.__signature__ = inspect.Signature(list(expanded.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in expanded.items()}
    return run
