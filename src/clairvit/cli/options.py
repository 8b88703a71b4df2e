"""Options that several commands share, and groups of them: `ModelOptions`, `RunOptions`, …."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from clairvit.cli.arguments import (
    data_specs,
    read_dense_targets,
    read_display,
    read_model,
    read_neuron,
    read_preprocess,
    read_readouts,
    read_words,
    split_labels,
    split_names,
)
from clairvit.cli.declare import argument, group, option
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.plan import ModelConfig
    from clairvit.models.model import Model

TARGET, RESULT, RUN, PIXELS = "Target", "Result", "Run", "Preprocessing"  # headings of the help
SCORE_HELP = "logit, prob or logprob."
OWN, METHODS_OWN = "the model's own", "the method's own"  # defaults

IMAGES = argument(..., "Files, folders or globs ('pets/*.jpg'); 'demo' is a built-in photo of a cat.", "IMAGE")
ANNOTATED_IMAGES = argument(
    None, "Files, folders or globs; or one data set, e.g. pets:PATH, with the masks and classes it has.", "IMAGE|DATA"
)
METHODS_HELP = "Methods, separated by commas or repeated; 'all' are those that fit the model and are not slow."
METRICS_HELP = "Metrics, separated by commas or repeated: any of 'clairvit metrics'."
MODEL_HELP = (
    "pets (built in), timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME:PRETRAINED, file:PATH.safetensors, or "
    "MODULE:ATTRIBUTE of your own code."
)
MAPS_HELP, MAPS_METAVAR = "Normalisation of each map before it is scored.", "raw|abs|relu|min-max|over-largest"
SEED = option(0, "Seed of everything random.", panel=RUN)
AUTOCAST = option(
    None, "Run the perturbed images in half precision: faster, less exact.", "bfloat16|float16", panel=RUN
)
BATCH_SIZE = option(
    None,
    "Images in one pass of the model, perturbed ones too.",
    shown="8 images, 32 on a GPU; perturbed ones as many as fit",
    panel=RUN,
    min=1,
)
REMOVAL_HELP = "How patches are removed: token, mean, image-mean, black, minimum, blur, gaussian-blur, noise or road."
AS_JSON = option(False, "Print one JSON document for machines, nothing else.", None, "--json", panel=RESULT)
# Where a command has to know whether these were typed, its default is None.
MAPS = option("raw", MAPS_HELP, MAPS_METAVAR, shown="raw")
MAPS_TYPED = option(None, MAPS_HELP, MAPS_METAVAR, shown="raw")


def mask_kind(default: str | None) -> Any:
    """Return the option --mask-kind."""
    text = "Which pixels are the object: not zero; 1 of a trimap (Oxford-IIIT Pet); neither 0 nor 255 (Pascal VOC)."
    return option(default, text, "nonzero|trimap|voc", shown="nonzero", panel="Annotations")


def method_list(help_text: str, default: str) -> Any:
    """Return the option --method, which is repeatable and takes lists separated by commas."""
    return option(None, help_text, "A,B,…", shown=default)


def metric_list(help_text: str, default: str) -> Any:
    """Return the option --metric, which is repeatable and takes lists separated by commas."""
    return option(None, help_text, "A,B,…", shown=default)


def model_name(default: str = "pets", help_text: str = MODEL_HELP) -> Any:
    """Return the option --model."""
    return option(default, help_text, None, "--model", "-m", panel="Model")


def model_list(help_text: str, shown: str = "pets") -> Any:
    """Return the option --model of commands that take several."""
    return option(None, help_text, "A,B,…", "--model", "-m", shown=shown, panel="Model")


def single_target(help_text: str, metavar: str | None = "CLASS", shown: str | None = None) -> Any:
    """Return the option --target of commands that explain one."""
    return option(None, help_text, metavar, "--target", "-t", shown=shown, panel=TARGET)


def out(default: str | None, help_text: str, metavar: str = "PATH") -> Any:
    """Return the option --out."""
    return option(default, help_text, metavar, "--out", "-o", panel=RESULT)


OUT = out("out/", "A folder (PNG, JSON and NPZ for each image) or one file: .png .jpg .pdf .svg .json .npz")


ARCH = option(None, "The architecture of file:… weights, e.g. timm:vit_base_patch16_224.", "SOURCE:NAME", panel="Model")
NO_PRETRAINED = option(False, "Random weights.", panel="Model")
LABELS = option(
    None,
    "Class names in order, or prompts for CLIP: a JSON list in a file, or the names themselves.",
    "FILE|A,B,…",
    panel="Model",
)
DEVICE = option(None, "cpu (default), cuda, cuda:1, mps.", panel="Model")
MEAN = option(None, "Subtracted from pixels in 0..1, e.g. 0.485,0.456,0.406.", "R,G,B", shown=OWN, panel=PIXELS)
STD = option(None, "Pixels are divided by it afterwards, e.g. 0.229,0.224,0.225.", "R,G,B", shown=OWN, panel=PIXELS)
MASKS = option(
    None,
    "A folder with a mask for each image, 'cat.png' for 'cat.jpg', or mask-rcnn to find objects.",
    "DIR|mask-rcnn",
    panel="Annotations",
)
TRUTH = option(
    None,
    "True classes: a CSV with the columns image, class (and other), or the folders' names.",
    "FILE|folders",
    panel="Annotations",
)
WEIGHTS = option(None, "Weights of Mask R-CNN, else from the hub.", "FILE", panel="Annotations")
DOWNLOAD = option(
    False, "Fetch the data set into PATH if it is not there: pets, flowers, caltech101, voc.", panel="Data"
)


@group()
class ModelOptions:
    """How a model is loaded: everything but its name."""

    arch: str | None = ARCH
    no_pretrained: bool = NO_PRETRAINED
    labels: str | None = LABELS
    activation: str | None = option(
        None,
        "What scores mean: one class of several, each class for itself, or no probabilities (regression, cosine).",
        "softmax|sigmoid|raw",
        shown="what the model states",
        panel="Model",
    )
    device: str | None = DEVICE
    mean: str | None = MEAN
    std: str | None = STD
    resize: str | None = option(
        None,
        "Short side in pixels before the crop, or a box that the image covers.",
        "N|ROWS,COLUMNS",
        shown=OWN,
        panel=PIXELS,
    )
    crop: str | None = option(
        None,
        "Size of the centre crop, which is the model's image size, where it leaves a choice.",
        "N|ROWS,COLUMNS",
        shown=OWN,
        panel=PIXELS,
    )
    interpolation: str | None = option(
        None, "Of the resize: nearest, lanczos, bilinear, bicubic, box or hamming.", shown=OWN, panel=PIXELS
    )
    fit: str | None = option(
        None,
        "How a picture of another shape gets to the model's: its edges are cut off, or the whole is distorted.",
        "crop|squash",
        shown=OWN,
        panel=PIXELS,
    )

    def preprocess(self) -> dict[str, Any]:
        """Return the preprocessing as arguments of `cv.load`; raise BadInput before a model is loaded."""
        return read_preprocess(self.mean, self.std, self.resize, self.crop, self.interpolation, self.fit)

    def label_names(self) -> str | list[str] | None:
        """Return the labels themselves, or the path of their file."""
        return None if self.labels is None else split_labels(self.labels)

    def load(self, name: str, **stated: Any) -> Model:
        """Load the model of that name; what else is `stated` of it replaces what was typed."""
        import clairvit as cv

        return cv.load(
            name,
            pretrained=not self.no_pretrained,
            arch=self.arch,
            labels=self.label_names(),
            device=self.device,
            activation=self.activation,
            **{**self.preprocess(), **{key: value for key, value in stated.items() if value is not None}},
        )

    def load_each(self, texts: Sequence[str]) -> list[Model]:
        """Load several models, each by its name with options of its own: 'file:w.safetensors(arch=timm:…,mean=0.5)'.

        Raises:
            BadInput: An option that belongs to one model was typed for all of them.
        """
        typed = self.typed()
        if len(texts) > 1 and typed:
            raise BadInput(
                f"{typed[0]} {typed[1]} was given with {len(texts)} models; expected it in parentheses behind the "
                f"model that it belongs to: --model '{texts[0]}({typed[0].removeprefix('--')}={typed[1]})'."
            )
        named = [read_model(text) for text in texts]
        return [self.with_settings(settings).load(name) for name, settings in named]

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return the options with those that were typed in parentheses behind a model."""
        return replace(self, **settings)

    def config(self, name: str, arch: str | None = None) -> ModelConfig:
        """Return the model of that name as a study stores it."""
        from clairvit.bench.config import ModelConfig

        settings = {"crop" if key == "size" else key: value for key, value in self.preprocess().items()}
        names = self.label_names()
        labels = tuple(names) if isinstance(names, list) else names
        return ModelConfig(name, arch, labels, not self.no_pretrained, self.activation, **settings)

    def typed(self) -> list[str]:
        """Return the options that belong to the model itself as they were typed: ['--arch', 'timm:…']."""
        names = ("arch", "labels", "activation", "mean", "std", "resize", "crop", "interpolation", "fit")
        values = {f"--{name}": getattr(self, name) for name in names}
        return [part for name, value in values.items() if value is not None for part in (name, value)]


@group(PIXELS)
class PictureModelOptions(ModelOptions):
    """How a model is loaded whose images are drawn."""

    display: str | None = option(
        None,
        "Channels that pictures show of a model with other than three: numbers from 0, one of them in grey.",
        "N|R,G,B",
        shown="the first three",
    )

    def preprocess(self) -> dict[str, Any]:
        """Return the preprocessing and the channels that are shown as arguments of `cv.load`."""
        return {**super().preprocess(), **read_display(self.display)}


@group(TARGET)
class ReadoutOptions:
    """What every image is scored by, if that is no class."""

    text: list[str] | None = option(
        None, "A prompt that CLIP or SigLIP compares with the image, word for word; may be repeated.", "PROMPT"
    )
    against: list[str] | None = option(
        None,
        "A prompt, 'a photo': the mean similarity to all of them is subtracted from that of --text.",
        "PROMPT",
        shown="20 neutral prompts",
    )
    no_neutral: bool = option(False, "Explain the similarity to --text alone: nothing is subtracted.")
    text_features: str | None = option(
        None,
        "Embeddings of texts by name (.safetensors, .npz), for a model without a text tower: --text names some.",
        "FILE",
    )
    similar_to: str | None = option(
        None, "Another image: what makes the two alike, by the cosine of their embeddings.", "IMAGE"
    )
    region: list[str] | None = option(
        None,
        "The mean score of a segmenter or depth model in a box, in pixels of the image that the model sees.",
        "[CLASS@]L,T,R,B",
    )
    point: list[str] | None = option(None, "The same at one pixel; SAM's prompt.", "[CLASS@]X,Y")
    query: list[str] | None = option(
        None,
        "A detector's query: its number, or the best one of a class; ':left' for a side of its box.",
        "[CLASS@]INDEX|CLASS[:SIDE]",
    )
    neuron: list[str] | None = option(
        None,
        "A channel of a block's output, over all patches or at one: why is it active? Counted from 0.",
        "LAYER,CHANNEL[@ROW,COL]",
    )
    prompt: str | None = option(
        None, "A question to a vision-language model; its next word is explained, or those of --word.", "TEXT"
    )
    word: list[str] | None = option(None, "Words that could come next after --prompt.", "WORD,…")

    def readouts(self, generate: bool = False) -> list[Any]:
        """Return the targets that are no classes; raise BadInput before a model is loaded."""
        return [
            *read_readouts(self.text, self.against, self.similar_to, self.text_features, neutral=not self.no_neutral),
            *read_dense_targets(self.region or (), self.point or (), self.query or ()),
            *(read_neuron(text) for text in self.neuron or ()),
            *read_words(self.prompt, self.word, generate),
        ]

    def title(self, target: str | None) -> str | None:
        """Return what was typed as the target, for a record."""
        if self.similar_to:
            return f"similar to {self.similar_to}"
        places = [*(self.region or ()), *(self.point or ()), *(self.query or ())]
        neurons = [f"neuron {text}" for text in self.neuron or ()]
        words = [] if self.prompt is None else [*(self.word or ()), f"the next word after {self.prompt!r}"]
        typed = [*(self.text or ()), *places, *neurons, *words]
        against = f" against {', '.join(self.against)}" if self.against else " alone" if self.no_neutral else ""
        return f"{typed[0]}{against}" if typed else target


@group(TARGET)
class TargetOptions:
    """Which output of the model is explained."""

    target: list[str] | None = option(
        None,
        "Class names (or unique beginnings) or numbers, side by side; default: the predicted class.",
        "CLASS,…",
        "--target",
        "-t",
    )
    contrast: tuple[str, str] | None = option(None, "Why the first class rather than the second.", "CLASS CLASS")
    others: ReadoutOptions
    generate: bool = option(False, "Explain each word of the answer to --prompt.")
    score: str | None = option(None, SCORE_HELP, shown="the method's own: logit, or prob where patches are removed")

    def readouts(self) -> list[Any]:
        """Return the targets that are no classes; raise BadInput before a model is loaded."""
        return self.others.readouts(self.generate)

    @property
    def similar_to(self) -> str | None:
        """Return the image of --similar-to."""
        return self.others.similar_to


@group("Perturbation")
class SamplingOptions:
    """Options of methods that perturb the image, handed to those methods that have them."""

    samples: int | None = option(
        None,
        "How many variants of the image a sampling method draws (lime, kernelshap, rise, …).",
        shown=METHODS_OWN,
        min=1,
    )
    removal: str | None = option(
        None,
        REMOVAL_HELP,
        shown=METHODS_OWN,
    )

    def typed(self) -> dict[str, Any]:
        """Return the options that were typed, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@group(RUN)
class RunOptions:
    """How the passes are run."""

    seed: int = SEED
    autocast: str | None = AUTOCAST
    batch_size: int | None = BATCH_SIZE

    def check(self) -> None:
        """Raise BadInput before a model is loaded."""
        from clairvit.perturbation.batching import check_execution_options

        check_execution_options(self.batch_size, self.autocast)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `cv.explain`, `cv.compare`, `cv.evaluate` and `cv.choose`."""
        return dict(vars(self))


@group(RESULT)
class OutputOptions:
    """What is printed."""

    as_json: bool = AS_JSON
    quiet: bool = option(False, "Print errors only.", None, "--quiet", "-q")

    @property
    def hidden(self) -> bool:
        """Return whether nothing is printed for people."""
        return self.as_json or self.quiet


@group("Data")
class DataOptions:
    """Which data set, and how much of it."""

    data: list[str] | None = option(
        None,
        "A data set: pets:PATH, folder:PATH, wds:SHARDS, parquet:PATH, hfds:NAME:SPLIT, scenes, …; a folder alone is "
        "folder:PATH.",
        "NAME:PATH",
    )
    split: str | None = option(None, "Split of a data set: test, val, …", shown="its first one")
    limit: int | None = option(None, "Number of images, sampled with the seed from all classes.", "N", min=1)
    download: bool = DOWNLOAD

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
