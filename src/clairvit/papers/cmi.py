"""CMI report (Das and Huddar, Chennai Mathematical Institute, 2025): how much attention lies on the foreground."""

from __future__ import annotations

import math
import statistics

from clairvit.papers.paper import Claim, Finding, Measure, MethodEntry, Paper, Table

ROLLOUT, GRADIENT = "Attention Rollout", "Gradient Attention Rollout"
FAF, BAF = "FAF", "BAF"
IMAGES = (
    *("airliner", "monastery", "spaniel", "telescope", "gondola", "shuttle"),
    *("flute", "bulbul", "sweatshirt", "piggy bank", "gown"),
)
# image by image: FAF and BAF (Table 2, section 6.3, p. 8)
FAFS = {
    ROLLOUT: (0.109, 0.012, 0.481, 0.294, 0.543, 0.241, 0.922, 0.193, 0.448, 0.467, 0.497),
    GRADIENT: (0.143, 0.003, 0.703, 0.448, 0.497, 0.261, 0.927, 0.290, 0.672, 0.573, 0.738),
}
BAFS = {
    ROLLOUT: (0.891, 0.988, 0.519, 0.706, 0.457, 0.759, 0.078, 0.807, 0.552, 0.533, 0.503),
    GRADIENT: (0.857, 0.997, 0.297, 0.552, 0.503, 0.739, 0.073, 0.710, 0.328, 0.427, 0.262),
}
MEANS = {ROLLOUT: 0.382, GRADIENT: 0.478}  # section 6.3, p. 8, and section 8, p. 13
_SOURCE = "Table 2, section 6.3, p. 8"
_TEXT = "section 6.3, p. 8"


def check() -> list[Finding]:
    """Sums to 1, means over the eleven images, and who is higher."""
    found = []
    for name in (ROLLOUT, GRADIENT):
        off = [abs(faf + baf - 1) for faf, baf in zip(FAFS[name], BAFS[name], strict=True)]
        right = sum(gap < 5e-4 for gap in off)  # three decimals
        found.append(
            Finding(
                f"FAF + BAF = 1 for every image of {name}",
                _SOURCE,
                right == len(IMAGES),
                f"{right} of {len(IMAGES)} images",
            )
        )
    for name, printed in MEANS.items():
        mean = statistics.fmean(FAFS[name])
        found.append(
            Finding(
                f"The mean FAF of {name} is {printed}",
                _TEXT,
                round(mean, 3) == printed,
                f"mean over {len(IMAGES)} images: {mean:.5f}",
            )
        )
    gaps = [after - before for before, after in zip(FAFS[ROLLOUT], FAFS[GRADIENT], strict=True)]
    lower = [image for image, gap in zip(IMAGES, gaps, strict=True) if gap < 0]
    spread = statistics.stdev(gaps)
    t = statistics.fmean(gaps) / (spread / math.sqrt(len(gaps)))
    found.append(
        Finding(
            "Gradient Attention Rollout has the higher mean FAF",
            _TEXT,
            statistics.fmean(gaps) > 0,
            f"by {statistics.fmean(gaps):.4f} (standard deviation {spread:.4f}, t = {t:.2f} of {len(gaps)} pairs); "
            f"higher on {len(gaps) - len(lower)} of {len(gaps)}, lower on {' and '.join(lower)}",
        )
    )
    return found


PRESET = Paper(
    name="cmi",
    title="CMI report: attention on the foreground",
    paper="Das and Huddar: Explainability in Vision Transformers. Chennai Mathematical Institute, 2025",
    models="DeiT-Tiny/16, pretrained on ImageNet",
    data="own pictures and ImageNet images, foreground by Mask R-CNN",
    images="11",
    protocol="share of the map on the patches of the foreground (FAF) and beside it (BAF)",
    entrants=(
        MethodEntry(ROLLOUT, "rollout(preset=cmi)"),
        MethodEntry(GRADIENT, "grad-rollout(preset=cmi)"),
        MethodEntry("rollout (usual)", "rollout", extra=True),
        MethodEntry("gradient rollout (usual)", "grad-rollout", extra=True),
        MethodEntry("rollout (vit-explain)", "rollout(preset=jacobgil)", extra=True),
        MethodEntry("gradient rollout (vit-explain)", "grad-rollout(preset=jacobgil)", extra=True),
        MethodEntry("Attention Rollout, max (Figure 3)", "rollout(preset=cmi,fusion=max)", extra=True),
        MethodEntry("Attention Rollout, min (Figure 3)", "rollout(preset=cmi,fusion=min)", extra=True),
    ),
    measures=(Measure(FAF, "faf"), Measure(BAF, "baf"), Measure("FAF / area", "faf(lift=true)")),
    tables=(
        Table(
            "11 images",
            f"{_SOURCE}; means over images",
            (ROLLOUT, GRADIENT),
            {
                FAF: (statistics.fmean(FAFS[ROLLOUT]), statistics.fmean(FAFS[GRADIENT])),
                BAF: (statistics.fmean(BAFS[ROLLOUT]), statistics.fmean(BAFS[GRADIENT])),
            },
        ),
    ),
    gaps=(
        (
            "A uniform map has the foreground's area as its FAF, so FAF says as much about the pictures as about the "
            "method: compare methods on the same images, and look at FAF over that area."
        ),
        (
            "The report does not say from which score on an object counts, nor how masks become patches: here objects "
            "scored 0.5 or more, all together, and patches of which half or more is foreground."
        ),
        (
            "COCO, on which Mask R-CNN was trained, knows no monastery, flute or gown: what was found there may be "
            "somebody in front of it."
        ),
        (
            "The report's equations leave out the residual (alpha = 1), multiply the layers in forward order and put "
            "no identity into the gradient's product, which then all but vanishes; the maps of the two methods are "
            "made so. Below them stand the usual definitions, and vit-explain's, on which its notebook may be built."
        ),
    ),
    check=check,
    claims=(Claim("Gradient rollout lies more on the object than rollout", _TEXT, ((GRADIENT, ROLLOUT),), (FAF, BAF)),),
)
