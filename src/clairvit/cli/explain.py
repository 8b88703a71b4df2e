"""`clairvit explain`: one method, any number of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.arguments import read_seconds, single_method
from clairvit.cli.command import Command
from clairvit.cli.console import print_line
from clairvit.cli.declare import option
from clairvit.cli.finish import (
    print_certificates,
    print_checks,
    print_files,
    print_notes,
    print_predictions,
    print_refinements,
    print_statistics,
)
from clairvit.cli.image_job import ImageJob, SaveResult, WrittenResult
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.recipe import Recipe
    from clairvit.methods.spec import MethodSpec
    from clairvit.metrics.certificate import Certificate
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

EXAMPLES = """[bold]Examples[/bold]

clairvit explain demo

clairvit explain photos/ --method rollout --out maps/

clairvit explain cat.jpg --target 'Egyptian Mau,Bengal' --out cat.pdf

clairvit explain cat.jpg --contrast Bengal Sphynx --method genatt+plus --layers

clairvit explain cat.jpg --method rollout --layers --heads

clairvit explain cat.jpg --method lime --samples 2000 --removal blur

clairvit explain photos/ --keep-maps --out maps/

clairvit explain cat.jpg --recipe recipe.json

clairvit explain cat.jpg --check

clairvit explain cat.jpg --passes 256

clairvit explain cat.jpg --budget 2s

clairvit explain cat.jpg --certificate certificate.json

clairvit explain street.jpg --model open_clip:ViT-B-32:openai --text 'a red car' --text 'a dog'

clairvit explain street.jpg --model open_clip:ViT-B-32:openai --text 'a red car' --against 'a photo'

clairvit explain cat.jpg --similar-to other-cat.jpg

clairvit explain street.jpg --model hf:nvidia/segformer-b0-finetuned-ade-512-512 --region sky@0,0,512,200

clairvit explain cat.jpg --model torchvision:resnet50 --method gradcam --features
"""


def explain(
    images: list[str] = options.IMAGES,
    *,
    method: list[str] | None = options.method_list(
        "One of 'clairvit methods', e.g. genatt, 'rollout(fusion=max)+skipplus'.",
        "attnlrp+plus where it fits the model, or the recipe's",
    ),
    recipe: str | None = option(
        None,
        "The file of 'clairvit choose'; its method is the default, and 'focusvit(m=auto)' its start layer.",
        "FILE",
    ),
    model: str = options.model_name(),
    model_options: options.PictureModelOptions,
    targets: options.TargetOptions,
    run_options: options.RunOptions,
    sampling: options.SamplingOptions,
    passes: int | None = option(
        None,
        "Refine the map by so many passes with random patches kept, e.g. 256; each patch gets a standard error.",
        "N",
        min=0,
    ),
    budget: str | None = option(
        None, "Refine it by as many passes as fit in this time per map, e.g. 2s, 500ms, 1m.", "TIME"
    ),
    layers: bool = option(False, "Draw the map of each layer, too."),
    features: bool = option(False, "Draw feature maps, too: the strongest channels of a CNN's stages or blocks."),
    heads: bool = option(False, "Draw the map of each head of each layer, too."),
    certificate: str | None = option(
        None,
        "The file of 'clairvit certify': outline the patches that alone keep the answer, and test them on each photo; "
        "its method is the default.",
        "FILE",
    ),
    check: bool = option(False, "Say how far to trust each map and its answer, by hiding parts of the photo."),
    keep_maps: bool = option(
        False,
        "Write the maps of all images into few NPZ files in half precision, and nothing else.",
        panel=options.RESULT,
    ),
    out: str = options.OUT,
    output: options.OutputOptions,
) -> None:
    from clairvit.methods.recipe import read_recipe
    from clairvit.methods.recommended import default_method
    from clairvit.methods.spec import resolve_method

    if keep_maps and (layers or heads or features):
        raise BadInput("--keep-maps writes one map per image; expected it without --layers, --heads and --features.")
    typed = single_method(method, "explain")
    chosen = None if recipe is None else read_recipe(recipe)
    text = (typed or (default_method() if sampling.typed() else None)) if chosen is None else chosen.method_for(typed)
    spec = None if text is None else resolve_method(text, **sampling.typed())  # None: the default that fits
    certified = None
    if certificate is not None:
        from clairvit.metrics.certify import read_certificate

        certified = read_certificate(certificate, None if spec is None else spec.text)
        spec = spec or resolve_method(certified.method)
    run_options.check()
    if passes is not None and budget is not None:
        raise BadInput("--passes and --budget were given; expected one of them.")
    seconds = None if budget is None else read_seconds(budget, "--budget")
    by_layer: dict[str, Any] = {"layers": layers, "by_head": heads, "score": targets.score, "passes": passes}
    save = _save_with_features if features else _save
    job = ImageJob(
        images,
        model,
        model_options,
        targets,
        run_options,
        output,
        explain=_explain_batch(
            spec,
            chosen,
            {**by_layer, **run_options.arguments()},
            seconds=seconds,
            check=check,
            certified=certified,
        ),
        save=_with_other_directions(save, targets.similar_to),
        out=out,
        suffix=None,
        title=default_method() if spec is None else spec.text,
        keep_maps=keep_maps,
    )
    results, failures = job.run()

    def show() -> None:
        print_predictions(results)
        print_statistics(results)
        print_refinements(results)
        print_checks(results)
        print_certificates(results)
        print_notes(results)
        if layers and results and results[0].first["layers"] is None:
            method_text = results[0].first["method"]
            print_line(f"Note: {method_text} has no maps of single layers, so there is no strip of layers.")
        print_files(results)

    command = Command("explain", "explained", output, failures)
    command.finish(len(results), lambda: {"results": [_entry(result) for result in results]}, show)


explain.__doc__ = f"Show where a model looked, by one method.\n\n{EXAMPLES}"


def _explain_batch(
    spec: MethodSpec | None,
    recipe: Recipe | None,
    arguments: Mapping[str, Any],
    *,
    seconds: float | None,
    check: bool,
    certified: Certificate | None,
) -> Callable[[Model, Batch, Any], dict[str, Explanation]]:
    """Return the function that explains one batch; it checks once that the recipe belongs to the model.

    How many passes fit in `seconds` is measured on the first map; all others get as many.
    """
    import clairvit as cv

    unchecked = [] if recipe is None else [recipe]
    refining: dict[str, Any] = {} if seconds is None else {"seconds": seconds}

    def explain_batch(model: Model, batch: Batch, target: Any) -> dict[str, Explanation]:
        while unchecked:
            unchecked.pop().check(model)
        explanation = cv.explain(model, batch, spec, targets=target, **{**arguments, **refining})
        if refining and explanation.refinement is not None:
            refining.clear()
            refining["passes"] = explanation.refinement.passes
        if check:
            passes = {name: arguments[name] for name in ("batch_size", "autocast")}
            explanation = explanation.with_check(**passes)
        if certified is not None:
            explanation = explanation.with_certificate(certified, test=True)
        return {explanation.method: explanation}

    return explain_batch


def _entry(result: WrittenResult) -> dict[str, Any]:
    return {"image": result.image, "files": [str(file) for file in result.files], **result.first}


def _save(_: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """Write the file itself and, if there are layers or heads, 'cat-layers.png' and 'cat-heads.png'."""
    from clairvit.plotting.save import PICTURES

    (explanation,) = explanations.values()
    files = [explanation.save(path)]
    if explanation.layers is not None and path.suffix.lower() in PICTURES:
        files.append(explanation.save(path.with_stem(f"{path.stem}-layers"), layers=True))
    if explanation.heads is not None and path.suffix.lower() in PICTURES:
        files.append(explanation.save(path.with_stem(f"{path.stem}-heads"), heads=True))
    return files


def _with_other_directions(save: SaveResult, similar_to: str | None) -> SaveResult:
    """Return a function that also draws both images with their maps, 'cat-similar.png', for maps by --similar-to."""
    if similar_to is None:
        return save

    def save_both(model: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
        from clairvit.methods.match import with_other_direction
        from clairvit.models.image_files import read_image
        from clairvit.plotting.save import PICTURES

        files, name = save(model, explanations, path), Path(similar_to).name
        if path.suffix.lower() in PICTURES:
            (explanation,) = explanations.values()
            rows = [row for row, title in enumerate(explanation.targets) if title == f"similar to {name}"]
            for number, row in enumerate(rows, 1):
                suffix = "similar" if len(rows) == 1 else f"similar-{number}"
                both = with_other_direction(model, explanation[row], read_image(similar_to), name)
                files.append(both.save(path.with_stem(f"{path.stem}-{suffix}")))
        return files

    return save_both


def _save_with_features(model: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """Write the same and the feature maps, 'cat-features.png', numbered if one file has several images."""
    from clairvit.methods.channel_features import channel_features
    from clairvit.plotting.channel_features import channel_features_figure
    from clairvit.plotting.save import PICTURES, write_figure
    from clairvit.plotting.tiles import same_image

    files = _save(model, explanations, path)
    if path.suffix.lower() in PICTURES:
        (explanation,) = explanations.values()
        first = [rows[0] for rows in same_image(explanation)]  # an image with several targets has one set of features
        feature_maps = channel_features(
            model, explanation.pixels[first], names=[explanation.names[row] for row in first]
        )
        for number, image_features in enumerate(feature_maps, 1):
            suffix = "features" if len(feature_maps) == 1 else f"features-{number}"
            files.append(
                write_figure(channel_features_figure([image_features]), path.with_stem(f"{path.stem}-{suffix}"))
            )
    return files
