"""Alternatives: the names of methods to try where one does not fit the model, added to errors of lower packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clairvit.errors import Alternative, NotApplicable, either

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


# Where none of them fits the model; the first asks for a gradient, the others for answers alone.
LAST_RESORT = ("saliency", "leave-one-out", "occlusion")


def with_named_methods(error: NotApplicable, fits: Callable[[str], bool] = lambda _: True) -> NotApplicable:
    """Return the error with methods of its alternative that fit: "Use a gradient method: ixg, saliency or gradcam."."""
    names = error.methods if error.alternative is None else ALTERNATIVES[error.alternative]
    if not names:
        return error
    fitting = [name for name in names if fits(name)]
    kind = f"{error.alternative}: " if error.alternative and fitting else ""
    fitting = fitting or [name for name in LAST_RESORT if fits(name)]
    use = f" Use {kind}{either(fitting)}." if fitting else ""
    return NotApplicable(error.reason, use, advice=error.message.also)


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Add a sentence, such as "Use level=patch.", to a NotApplicable inside the block that names no alternative."""
    try:
        yield
    except NotApplicable as error:
        if error.alternative is not None or error.methods:
            raise
        raise NotApplicable(error.message, f" {text}") from error
