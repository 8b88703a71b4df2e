"""Layer: one block of a trace, or one stage of a CNN."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clairvit.errors import CaptureError, NotApplicable
from clairvit.tracing.attention_call import DECODER_KINDS, AttentionCall


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: its input and attention, and their gradients. A, G and S are derived on each access.

    A CNN's layers are its stages: x is the stage's feature map, [B, h·w, C], and there is no attention.
    """

    index: int
    count: int  # layers in the model
    call: AttentionCall | None  # None: a stage of a CNN
    grid: tuple[int, ...] | None  # of this block's tokens
    name: str  # of the stage of a CNN
    tokens: Tensor | None  # [B, N, d]
    tokens_gradient: Tensor | None
    out_gradient: Tensor | None  # [B, H, N, dh]

    def __repr__(self) -> str:
        """Return one line: place, tokens and attention."""
        tokens = "not seen" if self.tokens is None else tuple(self.tokens.shape)
        attends = (
            "no attention" if self.call is None else f"{self.call.kind} attention {self.call.queries}×{self.call.keys}"
        )
        return f"Layer({self.index} of {self.count}, x {tokens}, {attends})"

    @property
    def attention(self) -> AttentionCall:
        """The block's attention; raise NotApplicable for a CNN."""
        if self.call is None:
            raise NotApplicable(
                f"This model has no attention that can be read (a CNN, say): its layer {self.index} is the feature map "
                f"of '{self.name}', and attention between image tokens was asked for.",
                alternative="a gradient method",
            )
        return self.call

    @property
    def x(self) -> Tensor:
        """The block's input, [B, N, d]."""
        if self.call is not None and self.call.kind in DECODER_KINDS:
            raise NotApplicable(
                "This model reads the image by the queries of a decoder, whose layers' inputs are not recorded; "
                "expected a method that reads attention and its gradient alone.",
                alternative="a gradient method",
            )
        if self.tokens is None:
            raise NotApplicable(
                f"Layer {self.index} is not a module of its own, so its input was not seen; expected each block to be "
                "an nn.Module: put the block's code into one.",
                alternative="a method that reads attention alone",
            )
        return self.tokens

    @property
    def dx(self) -> Tensor:
        """dy/dx, [B, N, d]."""
        _ = self.x  # raises where there are no tokens
        return gradient_at(self.tokens_gradient, f"x of layer {self.index}")

    @property
    def q(self) -> Tensor:
        """Queries, [B, H, N, dh]."""
        return _required(self.attention.q, "q")

    @property
    def k(self) -> Tensor:
        """Keys, [B, H, N, dh]."""
        return _required(self.attention.k, "k")

    @property
    def v(self) -> Tensor:
        """Values, [B, H, N, dh]."""
        return self.attention.v.detach()

    @property
    def dO(self) -> Tensor:
        """dy/dO of the heads' outputs, [B, H, N, dh]."""
        return gradient_at(self.out_gradient, f"O of layer {self.index}")

    @property
    def A(self) -> Tensor:
        """Attention, [B, H, N, N]; row = query."""
        return self.between_tokens().A()

    @property
    def S(self) -> Tensor:
        """Scaled scores before the softmax, [B, H, N, N]."""
        return self.between_tokens().S()

    @property
    def G(self) -> Tensor:
        """dy/dA, [B, H, N, N]."""
        return self.between_tokens().G(self.dO)

    @property
    def _token_count(self) -> int | None:
        """Return the number of tokens of the block's input; None where it was not seen."""
        return None if self.tokens is None else int(self.tokens.shape[1])

    def between_tokens(self) -> AttentionCall:
        """Return the attention, if it is one between all image tokens or of a decoder; else raise NotApplicable."""
        call = self.attention
        if call.kind not in ("tokens", *DECODER_KINDS):
            between = {
                "window": "inside windows or stages",
                "reduced": "from all tokens to fewer, spatially reduced keys",
                "channel": "between channels",
            }.get(call.kind, "from a pool")
            if call.kind == "window" and self.grid is None and self._token_count == call.keys:
                raise NotApplicable(
                    f"Layer {self.index} attends between {call.keys} tokens, others than those of the first layers "
                    "(queries or text were added), and attention methods need the same tokens in all layers.",
                    alternative="a gradient method",
                )
            if self.grid is not None and len(self.grid) == 3 and call.kind == "window":
                between = "within one frame, or among the frames of one place"
            raise NotApplicable(
                f"This model attends {between} ({call.queries}×{call.keys} in layer {self.index}), not between all "
                "image tokens, which attention methods need.",
                alternative="a gradient method",
            )
        return call


def gradient_at(gradient: Tensor | None, of: str) -> Tensor:
    """Return the gradient; raise CaptureError if the backward left none."""
    if gradient is None:
        raise CaptureError(f"The backward of this trace left no gradient at the {of}. Make one that does: cv.trace(…).")
    return gradient


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise NotApplicable(
            f"The model computes its attention step by step and '{name}' was not seen. Use layer.A, layer.v."
        )
    return tensor.detach()
