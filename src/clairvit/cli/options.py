"""Options that several commands share, so that they mean and say the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE",
        help="Files, folders or globs ('pets/*.jpg'); 'demo' is a built-in photo of a cat.",
        show_default=False,
    ),
]
ImagesOrData = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE|DATA",
        help="Files, folders or globs; or one data set, e.g. pets:PATH, with the masks and classes it has.",
        show_default=False,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--method",
        "--methods",
        metavar="A,B,…",
        help="Methods separated by commas; 'all' are those that fit the model and are not slow.",
        show_default="eleven well-known ones",
    ),
]
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
        help="What is subtracted from pixels in 0..1, e.g. 0.485,0.456,0.406.",
        show_default="the model's own",
        rich_help_panel="Preprocessing",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="By what they are divided then, e.g. 0.229,0.224,0.225.",
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
Device = Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1, mps.", rich_help_panel="Model")]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        metavar="CLASS,…",
        help="Class names (or unique beginnings) or numbers, side by side; default: the predicted class.",
        rich_help_panel="What is explained",
    ),
]
OneTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="CLASS",
        help="A class name (or its unique beginning) or number, or 'label': the true class; default: the prediction.",
        rich_help_panel="What is explained",
    ),
]
Contrast = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="CLASS CLASS", help="Why the first class rather than the second.", rich_help_panel="What is explained"
    ),
]
Score = Annotated[
    str | None,
    typer.Option(
        help="logit, prob or logprob.",
        show_default="the method's own: logit, or prob where patches are taken away",
        rich_help_panel="What is explained",
    ),
]
# Where a command has to know whether the option was typed, it takes MAPS or MASK_KIND with None as the default.
MAPS = typer.Option(
    metavar="raw|abs|relu|min-max|over-largest",
    help="What is done to each map before it is scored.",
    show_default="raw",
    rich_help_panel="What is explained",
)
Maps = Annotated[str, MAPS]
Masks = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|mask-rcnn",
        help="A folder with a mask for each image, 'cat.png' for 'cat.jpg', or mask-rcnn to find objects.",
        rich_help_panel="What is known",
    ),
]
MaskFolder = Annotated[
    str | None,
    typer.Option(
        "--masks",
        metavar="DIR",
        help="With folder:PATH: a folder with a mask for each image, 'cat.png' for 'cat.jpg'.",
        rich_help_panel="What is known",
    ),
]
MASK_KIND = typer.Option(
    metavar="nonzero|trimap|voc",
    help="What the object is: not zero; 1 of a trimap (Oxford-IIIT Pet); neither 0 nor 255 (Pascal VOC).",
    show_default="nonzero",
    rich_help_panel="What is known",
)
MaskKind = Annotated[str, MASK_KIND]
Weights = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Mask R-CNN's weights, else from the hub.", rich_help_panel="What is known"),
]
Truth = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|folders",
        help="True classes: a CSV with the columns image, class (and other), or the folders' names.",
        rich_help_panel="What is known",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help="The part of a data set: test, val, …", show_default="its first", rich_help_panel="Data"),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="At most so many images, drawn by the seed from all classes.", rich_help_panel="Data"
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
        help="How patches are taken away: token, mean, black, minimum, blur, gaussian-blur, noise or road.",
        show_default="the method's own",
        rich_help_panel="Perturbation",
    ),
]
Autocast = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16",
        help="Run the perturbed images rougher and faster.",
        rich_help_panel="Perturbation",
    ),
]
Seed = Annotated[int, typer.Option(help="For methods that draw lots.", rich_help_panel="What is explained")]
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
        rich_help_panel="Result",
    ),
]
