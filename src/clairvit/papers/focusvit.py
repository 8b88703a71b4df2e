"""FocusViT (Ali, Raza, Gan, Haris, AISTATS 2026): six methods, four Quantus metrics, five data sets, one area."""

from __future__ import annotations

from clairvit.papers.focusvit_numbers import (
    AREA,
    ATTENTION,
    FAITHFUL,
    GRADCAM,
    LIME,
    LRP,
    NAMES,
    OURS,
    RANDOM,
    SENSITIVE,
    SHAP,
    SPARSE,
    TABLE_3,
    TABLES,
    TEXT,
    check,
)
from clairvit.papers.paper import Claim, Measure, MethodEntry, Paper

_CORRELATION = "faithfulness-correlation(preset=quantus)"
_SENSITIVITY = "max-sensitivity(preset=quantus,redraw=true)"
_CASCADE = "mprt(preset=quantus)"


def _effort(lime: int, shap: int, runs: int, copies: int, layers: int) -> dict[str, str]:
    return {
        "lime(preset=lime)": f"lime(preset=lime,samples={lime})",
        "kernelshap": f"kernelshap(samples={shap})",
        _CORRELATION: f"faithfulness-correlation(preset=quantus,runs={runs})",
        _SENSITIVITY: f"max-sensitivity(preset=quantus,redraw=true,samples={copies})",
        _CASCADE: f"mprt(preset=quantus,layers={layers})",
    }


PRESET = Paper(
    name="focusvit",
    title="FocusViT: six methods by four metrics and the area under the radar",
    paper="Ali, Raza, Gan and Haris: FocusViT. AISTATS 2026",
    models="ViT-B/16 pretrained on ImageNet and fine-tuned on each data set",
    data="Flowers-102, Stanford Dogs, MIT Indoor-67, Caltech-101, Oxford-IIIT Pet",
    images="not stated",
    protocol="Quantus, arguments not stated: its defaults are taken; sparseness is good when low (Table 1)",
    entrants=(
        MethodEntry(LIME, "lime(preset=lime)"),
        MethodEntry(SHAP, "kernelshap"),
        MethodEntry(LRP, "transatt"),
        MethodEntry(GRADCAM, "gradcam"),
        MethodEntry(ATTENTION, "rollout"),
        MethodEntry(OURS, "focusvit"),
    ),
    measures=(
        Measure(FAITHFUL, _CORRELATION),
        Measure(SENSITIVE, _SENSITIVITY),
        Measure(SPARSE, "sparseness(preset=quantus,direction=lower)"),
        Measure(RANDOM, _CASCADE),
    ),
    tables=TABLES,
    gaps=(
        (
            "Neither the number of images nor error bars are printed. At 100 runs one image's faithfulness "
            "correlation varies by about 0.1 by luck, so that the 0.0350 of FocusViT and the 0.0323 of LRP on Flower "
            "can be told apart from about 2700 images on."
        ),
        (
            "Max-sensitivity is a maximum over noisy copies and grows with their number: with fewer than Quantus' 200 "
            "it is lower than the paper's. LIME and SHAP draw their samples anew for each copy, as in Quantus."
        ),
        "Model randomisation resets modules as Quantus does, and counts the unchanged model's 1 in the mean.",
        (
            "Which LIME and SHAP were used is not stated: LIME here with superpixels and the mean colour, as its "
            "authors' code; SHAP is KernelSHAP on patches. LRP is taken for Chefer's transformer attribution, which "
            "the paper cites; Attention for attention rollout."
        ),
        (
            "FocusViT's equations take the gradient of the loss, its list of contributions that of the class logit: "
            "the logit is taken. Its start layer m* is chosen on a validation set by a score that is not specified; "
            "here it is the middle layer, unless --method 'FocusViT=focusvit(m=8)' or the like names another."
        ),
        (
            "Only the Flower row of the printed areas follows from the printed metrics, and only with a lost sign put "
            "back (--check): the areas of the other rows are compared for what they are."
        ),
    ),
    check=check,
    claims=(
        Claim("FocusViT is the most faithful", TEXT, tuple((OURS, name) for name in NAMES[:-1]), (FAITHFUL,)),
        Claim(
            "LIME and SHAP are the most sensitive to noise",
            TEXT,
            tuple((name, other) for name in NAMES[2:] for other in (LIME, SHAP)),
            (SENSITIVE,),
        ),
        Claim("FocusViT has the lowest sparseness", TEXT, tuple((OURS, name) for name in NAMES[:-1]), (SPARSE,)),
        Claim(
            "SHAP depends most on the model's parameters",
            TEXT,
            tuple((SHAP, name) for name in NAMES if name != SHAP),
            (RANDOM,),
        ),
        Claim("FocusViT covers the largest area", TABLE_3, tuple((OURS, name) for name in NAMES[:-1]), (AREA,)),
    ),
    area=AREA,
    tables_of={"flowers": "Flower", "dogs": "Dog", "indoor67": "MiT", "caltech101": "Caltech", "pets": "Pet"},
    efforts={"quick": _effort(30, 40, 20, 2, 3), "usual": _effort(200, 300, 100, 5, 6)},
)
