"""One family of errors. Every message says what was seen, what was expected and what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClairError(Exception):
    """Anything ClairViT refuses or cannot do; the command line prints it as one sentence and exits with status 2."""


class BadInput(ClairError):
    """An image, tensor, target or option that cannot be used as given."""


class UnknownName(BadInput):
    """A method, model or class name that does not exist; the message offers the nearest ones."""


class NotApplicable(ClairError):
    """A sound method that does not fit this model (rollout on a windowed model, `+rollout` on a token map)."""


class ModelUnavailable(ClairError):
    """A model that cannot be loaded: no hub, no file, weights that do not fit, a missing extra."""


class CaptureError(ClairError):
    """The trace did not see what it needs: no attention call, gradient checkpointing, a shape nobody expected."""


class ClairWarning(UserWarning):
    """Something the user should know although a result is given (an all-zero map, a fallback that was taken)."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """' Did you mean 'rollout'?' for the nearest names, '' when nothing is near."""
    originals = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), originals, n=3, cutoff=0.5)
    quoted = " or ".join(f"'{originals[n]}'" for n in near)
    return f" Did you mean {quoted}?" if near else ""


def install(extra: str) -> str:
    """What to type for an optional part, wherever ClairViT came from."""
    return f'pip install "clairvit[{extra}]", or in a clone: pip install ".[{extra}]"'
