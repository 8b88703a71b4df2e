"""Model: a module with its preprocessing, labels, activation and, if stated, its token layout."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.activation import Activation, activation_for, check_activation, probabilities
from clairvit.models.preprocess import Preprocess
from clairvit.models.readout import BoundInputs, Readout, unwrap_readout
from clairvit.models.scores import extract_scores
from clairvit.models.submodules import (
    COMPILED_ADVICE,
    compiled_in_place,
    compiled_sentence,
    named_submodules,
    submodules,
    tensors_of,
)
from clairvit.models.through_no_grad import ThroughNoGrad

if TYPE_CHECKING:
    from clairvit.models.text_encoder import TextEncoder

_ORDINARY = frozenset({nn.Parameter, Tensor, nn.Buffer})  # classes of tensors without parts elsewhere
MOST_READOUTS = 16  # of one model: a target may hold a mask as large as its image
Pooling = Literal["token", "distilled", "avg", "max", "map", "mixed", "query"]


@dataclass(frozen=True)
class Layout:
    """How the tokens of a ViT lie on the image and which of them the head reads.

    `prefix` tokens come first (CLS, registers, the text before an image), then the grid row by row, then `suffix`
    tokens (detection tokens, a class token at the end, the text after an image). `read` holds the query rows that the
    head reads, with weights that sum to 1; left out, they follow from `pooling`. Under `map` and `query` pooling they
    are rows of the attention pool (its latent queries) or of the decoder (its queries) instead of tokens.

    Args:
        grid: Rows and columns of patches; (frames, rows, columns) for clips, frame by frame.
        prefix: The number of tokens before the patches.
        pooling: What the head reads: "token", "distilled", "avg", "max" (one patch per image), "map", "mixed", or
            "query" (of a decoder).
        read: (row, weight) of the query rows that the head reads; left out, they follow from `pooling`.
        suffix: The number of tokens after the patches.
        time_last: The patches of a clip lie place by place, each with all its frames (TimeSformer), not frame by frame.

    Example:
        >>> import clairvit as cv
        >>> cv.Layout(grid=(14, 14), prefix=1, pooling="token").tokens
        197
        >>> cv.Layout(grid=(2, 2), prefix=3, suffix=2, pooling="token", read=((8, 1.0),)).patch_slice
        slice(3, 7, None)
    """

    grid: tuple[int, ...]  # rows, columns of patches; frames first for clips
    prefix: int  # tokens before the patches
    pooling: Pooling
    read: tuple[tuple[int, float], ...] = ()  # (row, weight)
    suffix: int = 0  # tokens after the patches
    time_last: bool = False  # patches of a clip in the order rows, columns, frames

    def __post_init__(self) -> None:
        sides = tuple(self.grid) if isinstance(self.grid, tuple | list) else ()
        if len(sides) not in (2, 3) or not all(isinstance(side, int) and side > 0 for side in sides):
            raise BadInput(
                f"grid={self.grid!r} was given; expected (rows, columns) of patches, such as (14, 14), or (frames, "
                "rows, columns) for clips."
            )
        if not isinstance(self.prefix, int) or self.prefix < 0:
            raise BadInput(f"prefix={self.prefix!r} was given; expected the number of tokens before the patches.")
        if not isinstance(self.suffix, int) or self.suffix < 0:
            raise BadInput(f"suffix={self.suffix!r} was given; expected the number of tokens after the patches.")
        if self.pooling not in get_args(Pooling):
            raise BadInput(f"pooling={self.pooling!r} was given; expected one of {', '.join(get_args(Pooling))}.")
        object.__setattr__(self, "grid", sides)
        if not self.read:
            object.__setattr__(self, "read", self._default_read())
        last = self.tokens - 1
        if self.pooling not in ("map", "query") and any(not 0 <= row <= last for row, _ in self.read):
            raise BadInput(f"read={self.read!r} names a row outside the {self.tokens} tokens; expected 0…{last}.")

    def _default_read(self) -> tuple[tuple[int, float], ...]:
        """Return the rows that the head reads, by the kind of pooling."""
        patches = self.patch_rows
        leading = [*self.other_rows, *patches]  # a class token comes before the patches, or after them
        if self.pooling == "mixed":
            return ((leading[0], 0.5), *((row, 0.5 / len(patches)) for row in patches))
        rows = {"distilled": leading[:2], "avg": list(patches), "max": list(patches)}.get(self.pooling, leading[:1])
        return tuple((row, 1 / len(rows)) for row in rows)

    @cached_property
    def patches(self) -> int:
        """Return the number of patches."""
        return math.prod(self.grid)

    @cached_property
    def plane(self) -> tuple[int, int]:
        """Return the grid as rows and columns: the frames of a clip lie below each other."""
        *rows, columns = self.grid
        return math.prod(rows), columns

    @cached_property
    def tokens(self) -> int:
        """Return the number of tokens, prefix and suffix included."""
        return self.prefix + self.patches + self.suffix

    @cached_property
    def patch_slice(self) -> slice:
        """Return where the patches lie among the tokens."""
        return slice(self.prefix, self.prefix + self.patches)

    def patches_among(self, tokens: int) -> slice:
        """Return where the patches lie among the tokens of any stage, which may have more than the last."""
        return slice(self.prefix, tokens - self.suffix)

    @cached_property
    def patch_rows(self) -> Sequence[int]:
        """Return the indices of the patches among the tokens, in the order of the grid."""
        if not self.time_last:
            return range(self.prefix, self.prefix + self.patches)
        frames = self.grid[0]
        places = self.patches // frames
        return tuple(self.prefix + place * frames + frame for frame in range(frames) for place in range(places))

    @cached_property
    def other_rows(self) -> tuple[int, ...]:
        """Return the indices of the tokens that are no patches."""
        return (*range(self.prefix), *range(self.prefix + self.patches, self.tokens))

    def pad_patches(self, values: Tensor, value: float = 0) -> Tensor:
        """Return values [..., patches] as [..., tokens], with `value` at the tokens that are no patches."""
        padded = values.new_full((*values.shape[:-1], self.tokens), value)
        padded[..., list(self.patch_rows) if self.time_last else self.patch_slice] = values
        return padded


@dataclass(frozen=True, eq=False)
class Model:
    """A module and what is known about it: what `cv.explain` and all other functions take.

    The module stays the user's own: nothing here changes it. Make a model with `cv.load` or `cv.wrap`.

    Args:
        module: The user's own module; nothing here changes it.
        name: The name in results.
        preprocess: Resize, crop, mean and std.
        labels: Class names in class order.
        layout: Grid, tokens next to the patches and pooling; None: inferred from the first trace.
        classifier: False: the output is an embedding, so there is no predicted class.
        activation: What turns scores into probabilities: softmax, sigmoid, or raw (nothing does).
        activation_reason: What the activation was read from; "" where nothing was looked at.
        activated: The module applies its activation itself.
        assumptions: Notes about preprocessing that nothing states, shown with results.
        wrappers: What `cv.wrap` took off the module: "torch.compile", "DataParallel", …
        returns: What the module returns where that is neither class scores nor an embedding ("class scores for every
            pixel …"), and which target reads it; "" for a classifier or an embedding.
        assumes_classes: Nothing states that the output are class scores; the first forward pass is looked at.
        text_encoder: What embeds prompts for `cv.Text`; None for a model without a text tower.
        through_no_grad: Gradients are kept on where the module's forward switches them off (torch.no_grad,
            torch.inference_mode); its values stay the same.
        base: The model that this one reads another output of; None for a model of its own.

    Example:
        >>> import clairvit as cv
        >>> model = cv.load("pets")
        >>> model.preprocess.size, len(model.labels), model.activation
        ((224, 224), 37, 'softmax')
    """

    module: nn.Module
    name: str
    preprocess: Preprocess = field(default_factory=Preprocess)
    labels: tuple[str, ...] = ()
    layout: Layout | None = None  # None: inferred from the first trace
    classifier: bool = True  # False: the output is an embedding, so there is no predicted class
    activation: Activation = "softmax"  # turns scores into probabilities; "raw": there are none
    activation_reason: str = ""  # what the activation was read from; "" if it was not inferred
    activated: bool = False  # the module applies its activation itself: raw scores that are probabilities already
    assumptions: tuple[str, ...] = ()  # notes about preprocessing that nothing states, shown with results
    wrappers: tuple[str, ...] = ()  # wrappers removed from the module: "torch.compile", "DataParallel", …
    returns: str = ""  # what the module returns where that is no row of scores, and which target reads it
    assumes_classes: bool = field(default=False, repr=False)  # neither labels, a head of a library nor the user say so
    text_encoder: TextEncoder | None = field(default=None, repr=False)  # embeds prompts (CLIP, SigLIP)
    through_no_grad: bool = False  # gradients stay on where the forward switches them off
    base: Model | None = field(default=None, repr=False)  # the model that this one reads another output of
    _readouts: OrderedDict[Hashable, Model] = field(default_factory=OrderedDict, init=False, repr=False)  # of `read`

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if not self.classifier and self.activation == "softmax":  # the default; an embedding has no classes
            object.__setattr__(self, "activation", "raw")

    def __repr__(self) -> str:
        """Return one line; `model.module` prints the layers."""
        rows, columns = self.preprocess.size
        classes = f"{len(self.labels)} classes" if self.labels else "no class names"
        kind = f"{classes}, {self.activation}" if self.classifier else "embedding"
        if self.returns:
            kind = "no class scores"
        return (
            f"Model({self.name!r}, {type(self.module).__name__}, {rows}×{columns}, {kind}, {self.device}, {self.dtype})"
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the images: that of the first convolution, else of the first parameter or buffer."""
        for layer in self.module.modules():
            if isinstance(layer, nn.Conv2d | nn.Conv3d) and isinstance(layer.weight, Tensor):
                return layer.weight.device
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0)).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point parameter or buffer."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0)).dtype

    def activation_of(self, logits: Tensor) -> Activation:
        """Return what logits [..., C] of this model mean; a single column with softmax is raw, as its softmax is 1."""
        return activation_for(self.activation, logits.shape[-1])

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probabilities of logits [..., C], in their shape; None where the model's scores are raw.

        Args:
            logits: What `Model.logits` returns. Half precision is widened to float32.

        Returns:
            softmax(logits) or sigmoid(logits), by `Model.activation`; None for "raw".

        Example:
            >>> import clairvit as cv, torch
            >>> model = cv.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)), activation="sigmoid")
            >>> model.probabilities(torch.tensor([[0.0, 0.0, 0.0]]))
            tensor([[0.5000, 0.5000, 0.5000]])
        """
        return probabilities(logits, self.activation)

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the scores [B, C] of pixels [B, 3, H, W] or clips [B, 3, T, H, W], whatever type is returned."""
        if self.returns:
            raise NotApplicable(self.returns)
        with ThroughNoGrad() if self.through_no_grad and torch.is_grad_enabled() else nullcontext():
            output = self.module(pixels)
        scores = self.scores(output)
        if len(scores) != len(pixels):
            raise BadInput(
                f"{self.name} returned scores of shape {list(scores.shape)} for {len(pixels)} images; expected one row "
                "for each image. Look for squeeze() in its forward, then cv.wrap it again."
            )
        return scores

    def scores(self, output: Any) -> Tensor:
        """Return the scores [B, C] in what the module returned, whatever type that is."""
        return (
            output
            if isinstance(output, Tensor) and output.ndim == 2 and output.is_floating_point()
            else extract_scores(output, unwrap_readout(self.module), len(self.labels))
        )

    def read(
        self,
        key: Hashable,
        function: Callable[..., Tensor],
        *,
        readout: Callable[[nn.Module, Callable[..., Tensor]], nn.Module] = Readout,
        **changes: Any,
    ) -> Model:
        """Return a model of the same module whose scores are read off its raw output.

        Methods, metrics and perturbations need a row of scores per image. A target that is about anything else a
        module returns (a region, a query, the next token) reads such a row here, and everything works on it.

        Args:
            key: Equal keys give the same model, so that what is known about it is found once. The last
                `MOST_READOUTS` are kept.
            function: Of what the module returns for n images: scores [n, C] or [n], differentiable.
            readout: Makes the module that runs this one and reads its output by the function.
            **changes: Fields of the new model: labels, activation (raw unless given), classifier, layout.

        Returns:
            A model with the same parameters; `model.base` is the one that it was read from.

        Example:
            >>> import clairvit as cv
            >>> pets = cv.load("pets")
            >>> sums = pets.read("sum", lambda output: output.sum(1))
            >>> sums.base is pets, sums.activation
            (True, 'raw')
        """
        base = self.base or self
        model = base._readouts.pop(key, None)
        if model is None:
            fields: dict[str, Any] = {
                "labels": (),
                "activation": "raw",
                "activation_reason": "",
                "activated": False,
                "assumes_classes": False,
            } | changes
            model = replace(base, module=readout(base.module, function), returns="", base=base, **fields)
        base._readouts[key] = model  # the last one used comes last
        while len(base._readouts) > MOST_READOUTS:
            base._readouts.popitem(last=False)
        return model

    def with_inputs(self, **inputs: Any) -> Model:
        """Return a model of the same module that is given further inputs next to the image.

        Args:
            **inputs: By the names of the module's forward: tensors with one row, which every image gets, or with a row
                for each of the images that are passed with the model; and anything else as it is.

        Raises:
            BadInput: The module's forward has no such input, or inputs have different numbers of rows.

        Example:
            >>> import clairvit as cv, torch
            >>> class Scaled(torch.nn.Module):
            ...     def forward(self, pixels, factor):
            ...         return factor * pixels.mean((2, 3))
            >>> model = cv.wrap(Scaled(), size=8).with_inputs(factor=torch.tensor([[2.0]]))
            >>> model.logits(torch.ones(1, 3, 8, 8))
            tensor([[2., 2., 2.]])
        """
        base = self.base or self
        return replace(base, module=BoundInputs(base.module, inputs), returns="") if inputs else self

    @cached_property
    def has_input_rows(self) -> bool:
        """Return whether the model has inputs with a row per image, so that it runs image by image."""
        return isinstance(self.module, BoundInputs) and self.module.rows is not None

    def check_input_rows(self, images: int) -> None:
        """Raise BadInput unless inputs with a row per image have as many rows as there are images."""
        if isinstance(self.module, BoundInputs):
            self.module.check_count(images)

    def for_row(self, row: int) -> Model:
        """Return the model with the inputs of one image; the model itself where all images have the same."""
        if not isinstance(self.module, BoundInputs) or self.module.rows is None:
            return self
        return replace(self, module=self.module.for_row(row))


def check_traceable(module: nn.Module, name: str) -> None:
    """Raise BadInput unless the tensors of a module lie on one device and none of its parts was compiled in place."""
    check_placement(module, name)
    names = compiled_in_place(module)
    if names:
        raise BadInput(f"{name}: {compiled_sentence(names)} {COMPILED_ADVICE}")


def check_placement(module: nn.Module, name: str) -> None:
    """Raise BadInput unless all tensors of a module are whole, have values and lie on one device."""
    parts = submodules(module)
    tensors = [
        tensor
        for part in parts
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None
    ]
    are_ordinary = all(type(tensor) in _ORDINARY and not tensor.is_meta for tensor in tensors)
    may_be_partial = any(
        "_hf_hook" in part.__dict__ or "FSDP" in type(part).__name__ or "FullySharded" in type(part).__name__
        for part in parts
    )
    if are_ordinary and not may_be_partial and len({tensor.device for tensor in tensors}) < 2:
        return
    places = named_submodules(module)
    _check_whole(parts, name)
    _check_materialised(places, name)
    devices = {tensor.device: f"{prefix}{key}" for prefix, part in places for key, tensor in tensors_of(part)}
    if len(devices) > 1:
        listed = ", ".join(f"'{key}' on {device}" for device, key in devices.items())
        raise BadInput(
            f"The tensors of {name} lie on {len(devices)} devices ({listed}), and a trace combines layers on one; load "
            "the model on a single device, for instance device_map={'': 0}, or move it there: module.to(device)."
        )


def _check_whole(parts: Sequence[nn.Module], name: str) -> None:
    """Raise BadInput for a module sharded by FSDP: a process holds a part of each parameter only."""
    classes = {base.__name__ for kind in set(map(type, parts)) for base in kind.__mro__}
    sharded = {"FullyShardedDataParallel", "FSDPModule"} & classes
    if sharded or any(type(tensor).__name__ == "DTensor" for part in parts for tensor in part._parameters.values()):
        raise BadInput(
            f"{name} is sharded ({', '.join(sorted(sharded)) or 'DTensor'}), so that no process has its whole "
            "parameters; gather a full state_dict, load it into a plain module, and pass that."
        )


def _check_materialised(places: Sequence[tuple[str, nn.Module]], name: str) -> None:
    """Raise BadInput for a module with tensors on the meta device, which have a shape and no values."""
    if any(getattr(part.__dict__.get("_hf_hook"), "offload", False) for _, part in places):
        raise BadInput(
            f"{name} is offloaded by accelerate: its weights are loaded while a layer runs and dropped afterwards, and "
            "a trace reads them later; load the model whole, for instance with device_map={'': 0} or 'cpu'."
        )
    for prefix, part in places:
        for key, tensor in tensors_of(part):
            if tensor.is_meta:
                raise BadInput(
                    f"{name} is on the meta device ('{prefix}{key}' has a shape and no numbers); give it weights "
                    "first: module.to_empty(device='cpu'), then module.load_state_dict(weights)."
                )
