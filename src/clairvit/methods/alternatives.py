"""Alternatives: the names of methods to try where one does not fit the model, added to errors of lower packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clairvit.errors import Alternative, NotApplicable

_ATTENTION = ("rollout", "raw-attention")
_PERTURBATION = ("lime", "kernelshap", "rise", "leave-one-out", "occlusion")
# One or a few well-known methods of each kind.
ALTERNATIVES: dict[Alternative, tuple[str, ...]] = {
    "a gradient method": ("ixg", "saliency", "gradcam"),
    "a method of pixel gradients": ("saliency",),
    "a method that reads attention alone": _ATTENTION,
    "a method that reads attention and its gradient": ("genatt", "legrad"),
    "a perturbation method": _PERTURBATION,
    "an attention or perturbation method": (*_ATTENTION, *_PERTURBATION),
}


def with_named_methods(error: NotApplicable) -> NotApplicable:
    """Return the error with methods of its alternative: "Use a gradient method: ixg, saliency or gradcam."."""
    if error.alternative is None:
        return error
    *names, last = ALTERNATIVES[error.alternative]
    listed = f"{', '.join(names)} or {last}" if names else last
    return NotApplicable(f"{str(error).removesuffix('.')}: {listed}.", parameters=error.parameters)


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Add a sentence, such as "Use level=patch.", to a NotApplicable inside the block that names no alternative."""
    try:
        yield
    except NotApplicable as error:
        if error.alternative is not None:
            raise
        raise NotApplicable(f"{error} {text}", parameters=error.parameters) from error
