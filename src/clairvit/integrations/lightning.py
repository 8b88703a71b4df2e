"""Lightning: a callback that explains a few fixed images after epochs of training and logs the pictures."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from clairvit.errors import BadInput, ClairError, ClairWarning, user_stacklevel
from clairvit.integrations.loggers import log_maps, takes_pictures
from clairvit.methods.explain import explain
from clairvit.methods.explanation import Explanation
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
    """Explain fixed images after every n-th epoch of training and log the pictures.

    In an epoch that validates, it explains after each validation, else at the end of the epoch. Training is not
    disturbed: parameters, gradients, training mode and random generators are as they were. When training starts, the
    images are explained once: an error that is known then, such as a wrong size, is raised before the first step. Later
    nothing stops the run: a map that fails and loggers that take no pictures (CSV, say) are a ClairWarning, once.

    Args:
        images: Images as `cv.explain` takes them, the same every time.
        method: A method string or spec; None is the default method for the model.
        target: As in `cv.explain`; None is what the model predicts at the time.
        model: A function of the LightningModule to the module or `cv.Model` to explain; by default its attribute
            `model` or `net` if it has one, else itself.
        every_n_epochs: Explain after every n-th epoch, with a validation loop or without.
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
        self._loggers: list[Any] = []
        self._last_epoch = -1  # in which the images were explained
        self._warned: set[str] = set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Explain once, so that what cannot work is raised before training; name loggers that take no pictures."""
        self._last_epoch = -1
        if not trainer.is_global_zero:
            return
        self._loggers = self._picture_loggers(trainer)
        if self._loggers:
            self._explain(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Explain and log after a validation, but not after the sanity check before training."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Explain and log at the end of an epoch without a validation."""
        if trainer.current_epoch != self._last_epoch:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        """Explain and log on the first process, if the epoch is an n-th one; whatever fails is a warning."""
        if not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        self._last_epoch = trainer.current_epoch
        try:
            loggers = self._loggers or self._picture_loggers(trainer)  # `trainer.validate` starts no fit
            if not loggers:
                return
            explanation = self._explain(pl_module)
            for logger in loggers:
                log_maps(logger, explanation, step=trainer.global_step, tag=self.tag)
        except Exception as error:  # a picture must not end a training run, whatever a model or logger raises
            problem = f"{type(error).__name__}: {error}"
            self._warn(problem, f"Epoch {trainer.current_epoch} has no picture of explanations: {problem}")

    def _explain(self, pl_module: Any) -> Explanation:
        inner = self.model(pl_module)
        model = inner if isinstance(inner, Model) else wrap(inner)
        return explain(model, self.images, self.method, self.target, **self.options)

    def _picture_loggers(self, trainer: Any) -> list[Any]:
        """Return the loggers that take pictures; warn if there are others only."""
        loggers = [logger for logger in trainer.loggers if takes_pictures(logger)]
        if not loggers:
            kinds = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "it has none"
            self._warn(
                "loggers",
                f"No logger of the trainer takes pictures ({kinds}), so no explanations are logged; add one that does, "
                "such as TensorBoardLogger or WandbLogger.",
            )
        return loggers

    def _warn(self, problem: str, message: str) -> None:
        """Warn once of each problem."""
        if problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(message, ClairWarning, stacklevel=user_stacklevel())


def _inner_module(module: Any) -> nn.Module:
    """Return the network of a LightningModule: its attribute `model` or `net`, else itself."""
    for name in ("model", "net"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return inner
    network: nn.Module = module
    return network
