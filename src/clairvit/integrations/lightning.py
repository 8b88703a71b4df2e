"""Lightning: a callback that explains a few fixed images after validation and logs the pictures."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from clairvit.errors import BadInput, ClairError
from clairvit.integrations.loggers import log_maps
from clairvit.methods.explain import explain
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.model import Model
from clairvit.models.wrap import wrap

if TYPE_CHECKING:
    Callback = object
else:
    for _name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            Callback = importlib.import_module(_name).Callback
            break
        except ModuleNotFoundError as _error:
            if _error.name not in ("lightning", "pytorch_lightning", "lightning.pytorch"):
                raise
    else:
        raise ClairError("clairvit.integrations.lightning needs Lightning; type: pip install lightning")


class ExplainCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Explain fixed images after every n-th validation and log the pictures.

    Training is not disturbed: parameters, gradients, training mode and random generators are as they were.

    Args:
        images: Images as `cv.explain` takes them, the same every time.
        method: A method string or spec; None is the default method for the model.
        target: As in `cv.explain`; None is what the model predicts at the time.
        model: A function of the LightningModule to the module or `cv.Model` to explain; by default its attribute
            `model` or `net` if it has one, else itself.
        every_n_epochs: Explain after every n-th epoch.
        tag: The name of the series of pictures.
        **options: Further arguments of `cv.explain`.
    """

    def __init__(
        self,
        images: Any,
        method: str | MethodSpec | None = None,
        *,
        target: Any = None,
        model: Callable[[Any], nn.Module | Model] | None = None,
        every_n_epochs: int = 1,
        tag: str = "explanations",
        **options: Any,
    ) -> None:
        if every_n_epochs < 1:
            raise BadInput(f"every_n_epochs={every_n_epochs}; expected 1 or more.")
        self.images = images
        self.method = None if method is None else resolve_method(method)
        self.target = target
        self.model = model or _inner_module
        self.every_n_epochs = every_n_epochs
        self.tag = tag
        self.options = options

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Explain and log, on the first process only; not in the sanity check before training."""
        if trainer.sanity_checking or not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        inner = self.model(pl_module)
        model = inner if isinstance(inner, Model) else wrap(inner)
        explanation = explain(model, self.images, self.method, self.target, **self.options)
        for logger in trainer.loggers:
            log_maps(logger, explanation, step=trainer.global_step, tag=self.tag)


def _inner_module(module: Any) -> nn.Module:
    """Return the network of a LightningModule: its attribute `model` or `net`, else itself."""
    for name in ("model", "net"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return inner
    network: nn.Module = module
    return network
