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
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="pets (built in), timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME:PRETRAINED, file:PATH.safetensors.",
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
