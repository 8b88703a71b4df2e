"""One family of errors. Every message says what was seen, what was expected and what to type next."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "BadInput",
    "CaptureError",
    "ClairError",
    "ClairWarning",
    "ModelUnavailable",
    "NotApplicable",
    "UnknownName",
    "WrongType",
]

# Kinds of methods that may fit where another does not. Packages below `methods` name a kind; `methods/alternatives.py`
# knows the methods of each.
Alternative = Literal[
    "a gradient method",
    "a method of pixel gradients",
    "a method that reads attention alone",
    "a method that reads attention and its gradient",
    "a perturbation method",
    "an attention or perturbation method",
]
SIMILAR = 0.7  # difflib's ratio; at 0.67 'chefer' is still like 'center'


class Placeholder(str):
    """A word that stands for a value in an example: LEFT, not 'LEFT'."""

    def __repr__(self) -> str:
        return str(self)


class Advice:
    """Something to pass or to call, as data: `str` writes it in Python, `clairvit/cli/hints.py` as an option."""

    def __repr__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Argument(Advice):
    """Advise to pass a parameter: `arch='timm:NAME'`, on the command line `--arch timm:NAME`.

    Args:
        name: The parameter.
        value: An example; without one only the parameter is named. In it `...` stands for more of the same.
        of: The verb that takes it, where several have a parameter of that name.
    """

    def __init__(self, name: str, value: Any = None, of: str | None = None) -> None:
        self.name, self.value, self.of = name, value, of

    def __str__(self) -> str:
        return f"{self.name}={'' if self.value is None else _in_python(self.value)}"


class Call(Advice):
    """Advise to make something of `cv`: `cv.Region(CLASS, box=(LEFT, TOP, RIGHT, BOTTOM))`.

    Args:
        name: Of the class.
        positional: Examples of its first arguments.
        named: Examples of others.
    """

    def __init__(self, name: str, *positional: Any, **named: Any) -> None:
        self.name, self.positional, self.named = name, positional, named

    def __str__(self) -> str:
        values = [
            *map(_in_python, self.positional),
            *(str(Argument(name, value)) for name, value in self.named.items()),
        ]
        return f"cv.{self.name}({', '.join(values)})"


class Verb(Advice):
    """Advise to call a verb: `cv.choose(model, images, tune_start=['genatt']).save('recipe.json')`.

    Args:
        name: Of the verb, which is a command too.
        file: Where its result is saved, if it is.
        named: Arguments besides the model and the images.
    """

    def __init__(self, name: str, *, file: str | None = None, **named: Any) -> None:
        self.name, self.file, self.named = name, file, named

    def __str__(self) -> str:
        call = Call(self.name, Placeholder("model"), Placeholder("images"), **self.named)
        return f"{call}.save({self.file!r})" if self.file else str(call)


def _in_python(value: Any) -> str:
    if value is ...:
        return "…"
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return f"{opening}{', '.join(map(_in_python, value))}{closing}"
    return repr(value)


class Message(str):
    """A text with advice in it, which is written in Python; whoever prints it elsewhere may word the advice anew.

    Args:
        parts: Texts, messages and advice, in their order.
        also: Advice that is not part of the text, for readers who do not write Python.
    """

    parts: tuple[str | Advice, ...]
    also: tuple[Advice, ...]

    def __new__(cls, *parts: str | Advice, also: Sequence[Advice] = ()) -> Message:
        message = super().__new__(cls, "".join(map(str, parts)))
        nested = [part if isinstance(part, Message) else None for part in parts]
        flat = [inner.parts if inner is not None else (part,) for part, inner in zip(parts, nested, strict=True)]
        message.parts = tuple(part for group in flat for part in group)
        message.also = (*(advice for inner in nested if inner is not None for advice in inner.also), *also)
        return message


class ClairError(Exception):
    """Base class of the errors of ClairViT; the command line prints one as a sentence and exits with status 2.

    Args:
        parts: What was seen, what was expected, what to do next, in terms of Python: texts, with the advice in them
            as data, `"add ", Argument("arch", "timm:NAME")`.
        advice: Advice that the text does not contain word by word.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.parse_method("rolout")
        ... except cv.ClairError as error:
        ...     print(str(error)[:50])
        There is no method 'rolout'. Did you mean 'rollout
    """

    def __init__(self, *parts: str | Advice, advice: Sequence[Advice] = ()) -> None:
        super().__init__(Message(*parts, also=advice))

    @property
    def message(self) -> Message:
        """Return the text with its advice as data."""
        message: Message = self.args[0]
        return message

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Return what the message advises to pass or to call, in its order."""
        return (*(part for part in self.message.parts if isinstance(part, Advice)), *self.message.also)


class BadInput(ClairError, ValueError):
    """Report an image, tensor, target or option that cannot be used as given.

    Args:
        parts: What was seen, what was expected, what to do next.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.explain("pets", "demo", "legrad", target=99)
        ... except ValueError as error:
        ...     print(error)
        There is no class 99: the model has 37; give an index from 0 to 36.
    """


class WrongType(BadInput, TypeError):
    """Report an object of a type that cannot be used: a number as a model, a set as labels.

    Args:
        parts: What was seen, what was expected, what to do next.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.explain(42, "demo")
        ... except TypeError as error:
        ...     print(type(error).__name__)
        WrongType
    """


class UnknownName(ClairError, LookupError):
    """Report a method, metric, model or class name that does not exist; the message offers the nearest ones.

    Args:
        parts: What was seen, what was expected, what to do next.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.explain("pets", "demo", target="Bengali")
        ... except LookupError as error:
        ...     print(str(error)[:69])
        There is no class 'Bengali' among the model's 37. Did you mean 'Benga
    """


class NotApplicable(ClairError):
    """Report a sound method that does not fit this model (rollout on a windowed model, `+rollout` on a token map).

    Args:
        parts: What was seen, what was expected, what to do next.
        alternative: The kind of method that fits instead; the message ends with "Use a gradient method.", and
            `cv.explain` and `cv.compare` add names of such methods.
        methods: The methods to use instead, in place of a kind. Those that do not fit the model either are left out.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.parse_method("ixg+rollout")
        ... except cv.errors.NotApplicable as error:
        ...     print(str(error)[:53])
        '+rollout' goes from token to token through N×N matri
    """

    def __init__(
        self,
        *parts: str | Advice,
        alternative: Alternative | None = None,
        methods: Sequence[str] = (),
        advice: Sequence[Advice] = (),
    ) -> None:
        use = alternative or either(methods)
        super().__init__(*parts, *([f" Use {use}."] if use else []), advice=advice)
        self.reason = Message(*parts)  # without the alternative
        self.alternative = alternative
        self.methods = tuple(methods)


class ModelUnavailable(ClairError):
    """Report a model that cannot be loaded: no hub, no file, weights that do not fit, a missing extra.

    Args:
        parts: What was seen, what was expected, what to do next.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.load("file:no-such-file.safetensors", arch="timm:vit_tiny_patch16_224")
        ... except cv.ClairError as error:
        ...     print(type(error).__name__)
        ModelUnavailable
    """


class CaptureError(ClairError):
    """Report a trace that lacks what it needs: no attention call, gradient checkpointing, an unexpected shape.

    Args:
        parts: What was seen, what was expected, what to do next.
        advice: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> issubclass(cv.errors.CaptureError, cv.ClairError)
        True
    """


class ClairWarning(UserWarning):
    """Warn of something that the user should know although there is a result (an all-zero map, a fallback).

    Example:
        >>> import warnings
        >>> import clairvit as cv
        >>> warnings.simplefilter("error", cv.ClairWarning)  # warnings become errors, as in the tests of ClairViT
    """


def did_you_mean(name: str, choices: Iterable[str], aliases: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return " Did you mean 'rollout'?" for the nearest names, "" when none is near.

    Near are, in this order: the choices that `aliases` gives for the name (lower case, without spaces, dashes and
    underscores), the choices that are spelled alike, and those that contain it.
    """
    originals = {choice.lower(): choice for choice in choices}
    typed = str(name).lower().strip()
    known_as = (aliases or {}).get(re.sub(r"[\s_-]", "", typed), ())
    parts = [choice for choice in originals if len(typed) >= 3 and typed in choice]
    begins = sorted(parts, key=lambda choice: (not choice.startswith(typed), len(choice)))
    swapped = [choice for choice in originals if len(typed) >= 3 and sorted(choice) == sorted(typed)]
    alike = difflib.get_close_matches(typed, originals, n=3, cutoff=SIMILAR)
    near = list(dict.fromkeys([*known_as, *(originals[choice] for choice in (*swapped, *alike, *begins))]))[:3]
    quoted = " or ".join(f"'{choice}'" for choice in near)
    return f" Did you mean {quoted}?" if near else ""


def either(names: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def install(extra: str) -> str:
    """Return the command that installs an optional part, from an index or from a clone."""
    return f'pip install "clairvit[{extra}]", or in a clone: pip install ".[{extra}]"'


DISTRIBUTIONS = {"skimage": "scikit-image"}  # top-level module -> package, where the names differ


@contextlib.contextmanager
def importing(
    purpose: str, *, extra: str = "", packages: str = "", error: type[ClairError] | None = None
) -> Iterator[None]:
    """Raise an error that says what to install if an import inside the block fails.

    Args:
        purpose: What needs the package, as the subject of a sentence: "A study".
        extra: The extra of ClairViT that has it.
        packages: What to install instead, where no extra has it.
        error: The class of the error.

    Example:
        >>> with importing("A study", extra="study"):
        ...     import duckdb
    """
    try:
        yield
    except ImportError as cause:
        module = (cause.name or "").partition(".")[0]
        if module == "clairvit":
            raise
        package = f" {DISTRIBUTIONS.get(module, module)}" if module else ""
        raise (error or ClairError)(
            f"{purpose} needs the package{package}, which cannot be imported ({cause}); type: "
            f"{install(extra) if extra else f'pip install {packages}'}"
        ) from cause


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a caller's `warnings.warn` names the line outside ClairViT that led to it."""
    package = str(Path(__file__).parent)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(package) and file != contextlib.__file__:  # decorators of context managers lie between
            break
        frame, level = frame.f_back, level + 1
    return level
