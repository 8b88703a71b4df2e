"""CAAP: a patch's activations of one image, inserted into the forward pass of another over a range of layers."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.alternatives import advice
from clairvit.methods.registry import FORWARD, Caveats, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import background
from clairvit.tracing.trace import Trace

NAME = "caap"
LayerNumber = Annotated[int, Range(ge=0, unit="(a layer) or None", example=4)]


@method(
    NAME,
    family="perturbation",
    paper="Izadi et al., arXiv 2603.13652 (CAAP)",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda patches, **_: Cost(patches + 1), slow=True),
    signed=True,
    caveats=Caveats(
        no_tails="replaces activations in a range of layers of the whole model, which start= and stop= choose"
    ),
)
def causal_activation_patching(
    trace: Trace,
    start: Annotated[
        LayerNumber | None, Doc("the first layer whose input is replaced; None: after a third of the layers")
    ] = None,
    stop: Annotated[
        LayerNumber | None, Doc("the layer before which replacing ends; None: after two thirds of the layers")
    ] = None,
    neutral: Annotated[Literal["mean", "blur", "black"], Doc("the image without information")] = "mean",
    direction: Annotated[
        Literal["insert", "remove"],
        Doc("put the image's activations into the neutral run, or neutral ones into the image's"),
    ] = "insert",
    relative: Annotated[bool, Doc("take the difference to the run without replacement, not the score itself")] = True,
) -> MapResult:
    """f(neutral image, token i with the activations of x) − f(neutral image): what patch i alone brings along.

    Token i has x's activations at the inputs of the layers `start` … `stop` − 1, and everything else is computed from
    the neutral image and what these activations change in it. By default that is the middle third of the layers, where
    a token holds its patch in context. `direction=remove` is f(x) − f(x, token i with the neutral activations).
    `relative=False` gives the score of each run itself, not its difference: the same order for insert, the reverse for
    remove. One forward per patch, and one for the neutral image.
    """
    trace.recording.structure.check_members(trace.recording.model.name, NAME)
    used = layer_range(start, stop, len(trace.layers))
    activations = _activations(trace, used)
    neutral_images = background(neutral, trace.pixels, trace.recording.model.preprocess, 0)
    # Nothing is removed from the image, so any removal that needs no tokens to be dropped will do.
    with (
        advice("Use leave-one-out, which takes patches out."),
        probing(trace, "mean", label=NAME, forwards=trace.layout.patches + 1) as probe,
    ):
        if direction == "insert":
            reference = probe.score_images(1, lambda ks: neutral_images[:, None])  # [B, 1]
            scores = probe.score_patched(neutral_images, activations)  # [B, patches]
            maps = scores - reference if relative else scores
        else:
            other = trace.rerun(neutral_images, None)
            scores = probe.score_patched(trace.pixels, _activations(other, used))
            maps = probe.original[:, None] - scores if relative else scores
        note = f"{NAME}: activations of layers {used.start} to {used.stop - 1} of {len(trace.layers)}"
        return MapResult.from_probe(maps.reshape(-1, *probe.grid), probe, notes=(note,))


def layer_range(start: int | None, stop: int | None, count: int) -> range:
    """Return the layers start … stop − 1; by default the middle third, floor(L / 3) … L − floor(L / 3) − 1.

    Where only one end is given and lies beyond the other's default, the range is the one layer at that end.
    """
    if not count:
        raise NotApplicable(
            f"No attention call was seen in this model, and {NAME} patches its blocks.", methods=("occlusion",)
        )
    first = min(count // 3, count if stop is None else stop - 1) if start is None else start
    last = max(count - count // 3, first + 1) if stop is None else stop
    if not 0 <= first < last <= count:
        raise BadInput(
            f"start={first} and stop={last} were given for a model of {count} layers; expected 0 ≤ start < stop ≤ "
            f"{count}, such as start={count // 3}, stop={count - count // 3}."
        )
    return range(first, last)


def _activations(trace: Trace, layers: range) -> dict[int, Tensor]:
    """Return the block inputs [B, N, d] of these layers, by the order of blocks; raise NotApplicable if they differ."""
    layout = trace.in_order
    activations = {}
    for index in layers:
        layer = trace.layers[index]
        call = layer.attention  # raises for a CNN
        if layer.x.shape[1] != layout.tokens or len(layer.x) != len(trace.pixels):
            raise NotApplicable(
                f"Layer {index} works on {layer.x.shape[1]} tokens, not on the {layout.tokens} of the first layer "
                f"(stages, windows, a class token alone), so that a patch has no token there. Use other layers by "
                "start= and stop=, or leave-one-out."
            )
        activations[call.block] = layer.x
    return activations
