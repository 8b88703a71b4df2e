"""Draw the pictures of neurons, clips and interventions in docs/targets.md, docs/models.md and docs/intervene.md.

python docs/generate_inside_targets.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.scenes import SIZE, draw, plan
from clairvit.plotting.save import write_figure
from clairvit.plotting.style import PlotStyle

FOLDER = Path(__file__).parent / "images"
DPI = 110
SEED, NUMBER, FRAMES = 5, 3, 4  # of the clip
STEP = 12  # pixels by which the object moves from frame to frame
UNITS = 8  # in a pixel


class Clips(nn.Module):
    """A Vision Transformer of clips made of one of images: the patches of all frames are one sequence.

    Weights are those of the images' model: every frame has the same positions, and the class token reads all of them.
    """

    def __init__(self, images: Any) -> None:
        super().__init__()
        self.images = images
        weight, bias = images.patch_embed.proj.weight, images.patch_embed.proj.bias
        self.cut = nn.Conv3d(3, len(weight), (1, *weight.shape[2:]), stride=(1, *weight.shape[2:]))
        self.cut.weight, self.cut.bias = nn.Parameter(weight[:, :, None].detach()), nn.Parameter(bias.detach())

    def forward(self, clips: Tensor) -> Tensor:
        """Return class scores of clips [B, 3, T, H, W]."""
        net = self.images
        patches = self.cut(clips).flatten(2).mT  # [B, T · N, d]
        prefix, places = net.pos_embed[:, : net.num_prefix_tokens], net.pos_embed[:, net.num_prefix_tokens :]
        patches = patches + places.repeat(1, clips.shape[2], 1)
        tokens = torch.cat([(net.cls_token + prefix).expand(len(clips), -1, -1), patches], 1)
        scores: Tensor = net.forward_head(net.norm(net.blocks(net.norm_pre(tokens))))
        return scores


def moving_scene() -> list[Any]:
    """Return the frames of a clip in which one object moves to the right and its marker is blank in the last."""
    planned = plan(SEED, NUMBER)
    (first,) = planned.objects
    assert first.marker is not None
    start = (SIZE * UNITS) // 4 - first.x
    frames = []
    for number in range(FRAMES):
        shift = start + number * STEP * UNITS
        marker = replace(first.marker, x=first.marker.x + shift)
        moved = replace(planned, objects=(replace(first, x=first.x + shift, marker=marker),))
        if number == FRAMES - 1:
            blank = replace(first, x=first.x + shift, marker=replace(marker, class_name=None))
            moved = replace(planned, objects=(), distractors=(*planned.distractors, blank))
        frames.append(draw(moved).picture)
    return frames


def main() -> None:
    """Draw all pictures."""
    neurons = [cv.Neuron(3, 17), cv.Neuron(8, 5, patch=(5, 4)), cv.Neuron(8, 5, where="head", head=2)]
    by_neuron = cv.explain("pets", "demo", "attnlrp", targets=neurons)
    print(by_neuron.save(FOLDER / "targets-neuron.png", dpi=DPI), by_neuron.targets)

    scenes = cv.load("scenes")
    settings = scenes.preprocess
    clips = cv.wrap(
        Clips(scenes.module).eval(),
        name="scenes, of clips",
        labels=scenes.labels,
        frames=FRAMES,
        size=settings.size,
        mean=settings.mean,
        std=settings.std,
    )
    clip = cv.explain(clips, moving_scene(), "attnlrp+plus")
    print(clip.save(FOLDER / "clip.png", dpi=DPI), clip.targets, clip.probabilities)

    sweep = cv.intervene_sweep("pets", "demo", kind="head", target="Bengal")
    print(write_figure(sweep.plot().figure, FOLDER / "intervention-sweep.png", PlotStyle(dpi=DPI)))


if __name__ == "__main__":
    main()
