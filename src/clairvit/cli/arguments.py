"""Parse what was typed: lists of methods, metrics, data sets, classes and numbers.

An option that takes a list may be repeated, and each value may be a list separated by commas.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.errors import BadInput
from clairvit.methods.parsing import split_at_commas

if TYPE_CHECKING:
    from clairvit.methods.spec import MethodSpec
    from clairvit.metrics.registry import MetricSpec
    from clairvit.models.model import Model

ALL = "all"
SLOW = "it is slow"  # the beginning of the reason for which "all" leaves a method out


def split_methods(*texts: str) -> list[str]:
    """Return the methods in 'rollout(fusion=max,alpha=0.5),genatt', each once; parentheses protect commas."""
    methods: list[str] = []
    for text in texts:
        depths = [0, *itertools.accumulate((letter == "(") - (letter == ")") for letter in text)]
        if min(depths) < 0 or depths[-1] > 0:
            problem = (
                "closes a parenthesis that was never opened" if min(depths) < 0 else "opens one and never closes it"
            )
            raise BadInput(f"'{text}' {problem}; write e.g. 'rollout(fusion=max),genatt'.")
        methods += [part.strip() for part in split_at_commas(text) if part.strip()]
    if not methods:
        raise BadInput("No method was given; write e.g. --method rollout,attnlrp+plus or --method all.")
    return list(dict.fromkeys(methods))


def single_method(texts: Sequence[str] | None, command: str) -> str | None:
    """Return the one method that was typed, None if there is none; raise BadInput for several."""
    if not texts:
        return None
    methods = split_methods(*texts)
    if len(methods) > 1:
        raise BadInput(
            f"{command} takes one method, and {len(methods)} were given: {', '.join(methods)}. Expected one; "
            "`clairvit compare` draws several side by side."
        )
    return methods[0]


def resolve_methods(*texts: str) -> list[MethodSpec]:
    """Return the methods that were typed, each once, with 'all' expanded."""
    from clairvit.methods.explain import expand_all

    if not any(text.strip(" ,") for text in texts):
        raise BadInput("No method was given; write e.g. --method attnlrp+plus,rollout.")
    return expand_all(split_methods(*texts))


def left_out(typed: Sequence[str]) -> dict[str, str]:
    """Return the slow methods that 'all' leaves out, each with the reason; none where 'all' was not typed."""
    from clairvit.methods.registry import list_methods

    slow = [entry.name for entry in list_methods() if entry.slow and entry.name not in typed] if ALL in typed else []
    return {name: f"{SLOW}; --method {ALL},{name} adds it." for name in slow}


def resolve_metrics(*texts: str) -> list[MetricSpec]:
    """Return the metrics that were typed, each once."""
    from clairvit.metrics.registry import resolve_metric

    if not any(text.strip(" ,") for text in texts):
        raise BadInput("No metric was given; write e.g. --metric deletion,insertion.")
    return list({spec.text: spec for spec in map(resolve_metric, split_methods(*texts))}.values())


def with_method_options(methods: Sequence[str], **options: Any) -> list[MethodSpec]:
    """Return each method, 'all' expanded, with those of the options that it has; those typed with a method win."""
    from clairvit.methods.explain import ordered, without_all
    from clairvit.methods.parsing import parse_spec
    from clairvit.methods.spec import resolve_method

    typed = {name: value for name, value in options.items() if value is not None}
    used: set[str] = set()
    specs = []
    for text in without_all(methods):
        spec = resolve_method(text)
        accepted = {name: value for name, value in typed.items() if name in spec.method.options}
        used |= set(accepted)
        if accepted:
            parsed = parse_spec(str(text))  # the canonical text does not say that a default was typed
            spec = resolve_method(parsed, **{name: accepted[name] for name in accepted.keys() - parsed.options.keys()})
        specs.append(spec)
    for name in typed:
        if name not in used:
            raise BadInput(
                f"--{name} {typed[name]} was given, and none of the methods takes {name}; expected one that draws "
                "variants of the image among --method, such as lime or kernelshap."
            )
    return ordered(specs, by_families=ALL in methods)


def split_names(texts: Iterable[str], option: str) -> list[str]:
    """Return the names in the values of an option, separated by commas outside parentheses.

    Raises BadInput if a value has none.
    """
    names: list[str] = []
    for text in texts:
        parts = [part.strip() for part in split_at_commas(text) if part.strip()]
        if not parts:
            raise BadInput(f"{option} '{text}' names nothing; expected one or more, separated by commas.")
        names += parts
    return list(dict.fromkeys(names))


MODEL_SETTINGS = ("arch", "labels", "activation", "mean", "std", "resize", "crop", "interpolation", "fit")
_SETTING = rf"(?:{'|'.join(MODEL_SETTINGS)})="


def read_model(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of 'file:w.safetensors(arch=timm:vit_tiny_patch16_224,mean=0.5,0.5,0.5)'."""
    match = re.fullmatch(rf"(?P<name>.+?)\((?P<settings>{_SETTING}.*)\)", text, re.DOTALL)
    if match is None:
        return text, {}
    parts = re.split(rf",\s*(?={_SETTING})", match["settings"])
    settings = dict(part.split("=", 1) for part in parts)
    if len(settings) < len(parts):
        raise BadInput(f"--model '{text}' gives an option twice; expected each once.")
    return match["name"], settings


def data_specs(texts: Iterable[str]) -> list[str]:
    """Return the values of --data as 'NAME:PATH' each; a folder without a name is 'folder:PATH'."""
    return [
        f"folder:{spec}" if ":" not in spec and Path(spec).is_dir() else spec for spec in split_names(texts, "--data")
    ]


def split_targets(texts: Iterable[str], labels: Collection[str]) -> list[str]:
    """Return class names or numbers separated by commas; a class with a comma in its name may be written in full."""
    folded_labels = {label.casefold() for label in labels}
    targets: list[str] = []
    for text in texts:
        pieces = [text] if text.strip().casefold() in folded_labels else text.split(",")
        names = [piece.strip() for piece in pieces]
        if not any(names):
            raise BadInput(f"--target '{text}' names no class; write e.g. --target 'Bengal,Sphynx' or --target 3,17.")
        if not all(names):
            raise BadInput(f"--target '{text}' names nothing at one of its commas; write e.g. --target 3,17.")
        targets += names
    return targets


def read_readouts(
    text: Sequence[str] | None,
    against: Sequence[str] | None,
    similar_to: str | None,
    text_features: str | None = None,
    *,
    neutral: bool = True,
) -> list[Any]:
    """Return the targets of --text (with --against, --no-neutral, --text-features) and --similar-to, in that order."""
    import clairvit as cv
    from clairvit.models.image_files import read_image
    from clairvit.targets.text import NEUTRAL

    for option, is_given in (("--against", against), ("--text-features", text_features), ("--no-neutral", not neutral)):
        if is_given and not text:
            raise BadInput(f"{option} was given without a prompt to compare with; add --text 'a red car'.")
    if against and not neutral:
        raise BadInput("--against and --no-neutral were given; expected one of them: what is subtracted, or nothing.")
    others = tuple(against) if against else NEUTRAL if neutral else None
    if text_features is not None:
        targets: list[Any] = list(cv.targets.text_features(text_features, list(text or ()), against=others))
    else:
        targets = [cv.Text(prompt, against=others) for prompt in text or ()]
    if similar_to is not None:
        targets.append(cv.Similar(read_image(similar_to), Path(similar_to).name))
    return targets


def read_targets(target: Sequence[str] | None, contrast: tuple[str, str] | None, model: Model) -> list[Any]:
    """Return the targets of --target and --contrast, in that order; an empty list is the predicted class."""
    import clairvit as cv

    targets: list[Any] = list(split_targets(target or [], model.labels))
    if contrast is not None:
        targets.append(cv.Contrast(*contrast))
    return targets


def read_dense_targets(regions: Iterable[str], points: Iterable[str], queries: Iterable[str]) -> list[Any]:
    """Return the targets of --region, --point and --query, in that order."""
    import clairvit as cv

    boxes = [_class_and_place(text, "--region", ("left", "top", "right", "bottom")) for text in regions]
    pixels = [_class_and_place(text, "--point", ("x", "y")) for text in points]
    return [
        *(cv.Region(class_, box=box) for class_, box in boxes),
        *(cv.Region(class_, point=point) for class_, point in pixels),
        *(_read_query(text) for text in queries),
    ]


def _class_and_place(text: str, option: str, names: Sequence[str]) -> tuple[str | None, Any]:
    """Return the class (None: the predicted one) and the numbers of '[CLASS@]0,0,50,80'."""
    class_, _, place = text.rpartition("@")
    try:
        numbers = tuple(float(part) for part in place.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != len(names):
        listed = ",".join(names).upper()
        raise BadInput(f"{option} {text} was given; expected {listed} in pixels, or CLASS@{listed}.")
    return class_.strip() or None, numbers


def _read_query(text: str) -> Any:
    """Return the target of 'INDEX', 'CLASS' or 'CLASS@INDEX', each with ':SIDE' for a side of its box."""
    import clairvit as cv
    from clairvit.targets.query import SIDES

    query, _, side = text.rpartition(":")
    is_side = side in SIDES or query.rpartition("@")[2].strip().isdecimal()  # "3:lefft" is a side with a mistake
    query, box = (query.strip(), side) if query and is_side else (text.strip(), None)
    class_, _, index = query.rpartition("@")
    if not query or (class_ and not index.strip().isdecimal()):
        raise BadInput(f"--query {text} was given; expected the number of a query, a class, or CLASS@NUMBER.")
    if index.strip().isdecimal():
        return cv.Query(int(index), class_.strip() or None, box=box)
    return cv.Query(class_=query, box=box)


def read_neuron(text: str) -> Any:
    """Return the target of 'LAYER,CHANNEL', or 'LAYER,CHANNEL@ROW,COL' for one patch."""
    import clairvit as cv

    neuron, at, place = text.partition("@")
    try:
        layer, channel = (int(part) for part in neuron.split(","))
        patch = tuple(int(part) for part in place.split(",")) if at else None
    except ValueError as error:
        raise BadInput(
            f"--neuron {text} was given; expected LAYER,CHANNEL such as 3,17, or with a patch LAYER,CHANNEL@ROW,COL."
        ) from error
    return cv.Neuron(layer, channel, patch=patch)


@dataclass(frozen=True)
class GeneratedAnswer:
    """The answer of a vision-language model, whose words are known when the image is."""

    prompt: str


def read_words(prompt: str | None, words: Sequence[str] | None, generate: bool) -> list[Any]:
    """Return the targets of --prompt, --word and --generate; an empty list without --prompt."""
    import clairvit as cv

    if prompt is None:
        typed = "--generate" if generate else "--word"
        if generate or words:
            raise BadInput(f"{typed} was given without a question; add --prompt 'What is this?'.")
        return []
    if generate:
        if words:
            raise BadInput("--word and --generate were given; expected one of them.")
        return [GeneratedAnswer(prompt)]
    return (
        [cv.NextToken(word, prompt=prompt) for word in split_names(words, "--word")]
        if words
        else [cv.NextToken(prompt=prompt)]
    )


def targets_of_image(targets: Sequence[Any], model: Model, image: Any) -> list[Any]:
    """Return the targets with a generated answer replaced by one target per token that the model writes."""
    import clairvit as cv

    lists = [
        cv.generate(model, image, target.prompt) if isinstance(target, GeneratedAnswer) else [target]
        for target in targets
    ]
    return [target for listed in lists for target in listed]


def read_single_target(target: str | None, model: Model, readouts: Sequence[Any] = ()) -> Any:
    """Return the class by which every image is scored, 'label' for the true one, None for the predicted one.

    `readouts` are the targets of other options (--text, --similar-to, --region, …): one of them, or a class.
    """
    if len(readouts) + (target is not None) > 1:
        raise BadInput(
            f"{len(readouts) + (target is not None)} targets were given by --target, --text and the like; expected "
            "one, by which every image is scored."
        )
    if readouts:
        return readouts[0]
    if target is None or target == "label":
        return target
    targets = read_targets([target], None, model)
    if len(targets) > 1:
        raise BadInput(f"--target {target} names {len(targets)} classes; expected one, by which every image is scored.")
    return targets[0]


def split_numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Return '0.5,0.4,0.3' as numbers of the kind that the option takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        expected = (
            "R,G,B such as 0.485,0.456,0.406" if kind is float else "a number of pixels such as 256, or ROWS,COLUMNS"
        )
        raise BadInput(f"{option} {text} was given; expected {expected}.") from error


def read_seconds(text: str, option: str) -> float:
    """Return a time such as 2s, 500ms, 1.5m or 2 (seconds) in seconds; raise BadInput for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|)\s*", text)
    seconds = 0.0 if match is None else float(match[1]) * {"ms": 0.001, "m": 60.0}.get(match[2], 1.0)
    if not 0 < seconds < math.inf:
        raise BadInput(f"{option} '{text}' was given; expected a time such as 2s, 500ms or 1m.")
    return seconds


def read_preprocess(
    mean: str | None,
    std: str | None,
    resize: str | None,
    crop: str | None,
    interpolation: str | None,
    fit: str | None = None,
) -> dict[str, Any]:
    """Return the options of preprocessing as arguments of `cv.load`, checked before a model is loaded."""
    from clairvit.models.preprocess import parse_size, preprocess_options

    texts = {"interpolation": interpolation, "fit": fit}
    arguments: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    options: tuple[tuple[str, str, str | None, type[int] | type[float]], ...] = (
        ("mean", "--mean", mean, float),
        ("std", "--std", std, float),
        ("resize", "--resize", resize, int),
        ("size", "--crop", crop, int),
    )
    for name, option, text, kind in options:
        if text is not None:
            numbers = split_numbers(text, option, kind)
            arguments[name] = numbers[0] if len(numbers) == 1 else numbers
    preprocess_options(**{name: value for name, value in arguments.items() if name != "size"})
    parse_size(arguments.get("size"))
    return arguments


def read_display(text: str | None) -> dict[str, Any]:
    """Return the channels of --display as an argument of `cv.load`: '3,2,1', or '7' for one in grey."""
    if text is None:
        return {}
    try:
        channels = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--display {text} was given; expected channels such as 3,2,1, or 7 for one.") from error
    from clairvit.models.preprocess import preprocess_options

    preprocess_options(display=channels)
    return {"display": channels}


def split_labels(text: str) -> str | list[str]:
    """Return the labels in 'a cat,a dog'; a text without a comma, or with the name of a file, is a path."""
    if "," not in text or Path(text).exists():
        return text
    return [label.strip() for label in text.split(",") if label.strip()]
