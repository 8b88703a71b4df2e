"""One family of errors. Every message says what was seen, what was expected and what to type next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

SIMILAR = 0.7  # difflib's ratio; at 0.67 'chefer' is still like 'center'


class ClairError(Exception):
    """Anything ClairViT refuses or cannot do; the command line prints it as one sentence and exits with status 2.

    Args:
        message: What was seen, what was expected, what to do next, in terms of Python.
        parameters: The parameters that the message advises to pass, with a value or a placeholder for each. The
            command line adds its own options of these names to the message (`clairvit/cli/hints.py`).
    """

    def __init__(self, message: str = "", *, parameters: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.parameters = dict(parameters or {})


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


def install(extra: str) -> str:
    """What to type for an optional part, wherever ClairViT came from."""
    return f'pip install "clairvit[{extra}]", or in a clone: pip install ".[{extra}]"'
