"""One family of errors. Every message says what was seen, what was expected and what to type next."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

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


class ClairError(Exception):
    """Base class of the errors of ClairViT; the command line prints one as a sentence and exits with status 2.

    Args:
        message: What was seen, what was expected, what to do next, in terms of Python.
        parameters: The parameters that the message advises to pass, with a value or a placeholder for each. The
            command line adds its own options of these names to the message (`clairvit/cli/hints.py`).

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.parse_method("rolout")
        ... except cv.ClairError as error:
        ...     print(str(error)[:50])
        There is no method 'rolout'. Did you mean 'rollout
    """

    def __init__(self, message: str = "", *, parameters: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.parameters = dict(parameters or {})


class BadInput(ClairError, ValueError):
    """Report an image, tensor, target or option that cannot be used as given.

    Args:
        message: What was seen, what was expected, what to do next.
        parameters: As in `ClairError`.

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
        message: What was seen, what was expected, what to do next.
        parameters: As in `ClairError`.

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
        message: What was seen, what was expected, what to do next.
        parameters: As in `ClairError`.

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
        message: What was seen, what was expected, what to do next.
        alternative: The kind of method that fits instead; the message ends with "Use a gradient method.", and
            `cv.explain` and `cv.compare` add names of such methods.
        methods: The methods to use instead, in place of a kind. Those that do not fit the model either are left out.
        parameters: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> try:
        ...     cv.parse_method("ixg+rollout")
        ... except cv.NotApplicable as error:
        ...     print(str(error)[:53])
        '+rollout' goes from token to token through N×N matri
    """

    def __init__(
        self,
        message: str = "",
        *,
        alternative: Alternative | None = None,
        methods: Sequence[str] = (),
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        use = alternative or either(methods)
        super().__init__(f"{message} Use {use}." if use else message, parameters=parameters)
        self.reason = message  # without the advice
        self.alternative = alternative
        self.methods = tuple(methods)


class ModelUnavailable(ClairError):
    """Report a model that cannot be loaded: no hub, no file, weights that do not fit, a missing extra.

    Args:
        message: What was seen, what was expected, what to do next.
        parameters: As in `ClairError`.

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
        message: What was seen, what was expected, what to do next.
        parameters: As in `ClairError`.

    Example:
        >>> import clairvit as cv
        >>> issubclass(cv.CaptureError, cv.ClairError)
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
