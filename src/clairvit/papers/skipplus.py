"""SkipPLUS (Mehri, Fayyaz, Baghshah, Pilehvar, CVPR Workshops 2024): every method plain, summed, and summed from the
middle on.
"""

from __future__ import annotations

import math

from clairvit.papers.paper import Claim, Finding, Measure, MethodEntry, Paper

FORWARD = ("DecompX", "GlobEnc", "ALTI", "AttIN", "RawAttn")
# the paper's name -> ours, plain; where our name means the sum already, its first layer is the plain method
BASES = {
    "DecompX": "decompx",
    "GlobEnc": "globenc",
    "ALTI": "alti",
    "AttIN": "attin",
    "RawAttn": "raw-attention",
    "GenAtt": "genatt",
    "TransAtt": "transatt",
    "VanillaGrad": "vanilla",
    "VanillaGrad:Norm2": "vanilla-l2",
    "IxG": "ixg",
    "AttIxG": "attcat+layer:0",
    "FullGrad": "fullgrad(each=false)",  # summed, it has later biases several times; FullGrad+ has each once
    "GradCAM": "gradcam",
    "GradCAM++": "gradcam-pp",
    "XGradCAM": "xgradcam",
    "XGradCAM+": "xgradcam-plus",
    "HiResCAM": "hirescam",
    "GradCAMElementWise": "gradcam-elementwise",
    "AttCAM": "attcam",
}
DELETION_ACCURACY, DELETION_AOPC, INSERTION_ACCURACY, INSERTION_AOPC, AP = MEASURES = (
    *("Deletion Accuracy", "Deletion AOPC", "Insertion Accuracy", "Insertion AOPC", "AP"),
)
FAITHFUL = MEASURES[:-1]
BEST = "DecompX∘SkipPLUS"
_SKIP, _PLUS = "∘SkipPLUS", "∘PLUS"


def _three(name: str, method: str) -> tuple[MethodEntry, ...]:
    base = method.partition("+layer:")[0]
    return (
        MethodEntry(name, method),
        MethodEntry(name + _PLUS, f"{base}+plus"),
        MethodEntry(name + _SKIP, f"{base}+skipplus"),
    )


ENTRANTS = (
    *(one for name, method in BASES.items() for one in _three(name, method)),
    MethodEntry("FullGrad+∘PLUS", "fullgrad-plus"),
    MethodEntry("FullGrad+∘SkipPLUS", "fullgrad-plus+skipplus"),
    MethodEntry("Rollout", "rollout"),
)


def check() -> list[Finding]:
    """The paper prints no number that follows from others: its results are drawn. What can be counted is."""
    found = [
        Finding(
            f"SkipPLUS starts {name} ({layers} layers) at layer {start}: m = ceil(L/2), equation 4",
            "section 3.2, p. 3",
            math.ceil(layers / 2) == start,
            f"ceil({layers}/2) = {math.ceil(layers / 2)}",
        )
        for name, layers, start in (("EVA Large", 24, 12), ("ViT Base", 12, 6))
    ]
    same = DELETION_ACCURACY, INSERTION_AOPC
    found.append(
        Finding(
            "With 100 − x for deletion accuracy and insertion AOPC, higher is better by every measure",
            "sections 4.1 and A.1, p. 3 and 14",
            all(one.better == "higher" and one.turned == (one.name in same) for one in PRESET.measures),
            ", ".join(f"{one.name}: {one.better}" for one in PRESET.measures),
        )
    )
    return found


PRESET = Paper(
    name="skipplus",
    title="SkipPLUS: methods plain, summed over all layers and summed from the middle on",
    paper="Mehri, Fayyaz, Baghshah and Pilehvar: SkipPLUS. CVPR Workshops 2024",
    models="EVA-L/14, ViT-B/8, and a ViT-B/16 trained on MURA",
    data="ImageNet-1k validation, MURA, ImageNet-S",
    images="5000 of ImageNet, 2000 of MURA, 5000 of ImageNet-S",
    protocol="tokens are dropped, 10 % at a time up to 90 %; the target is the true class; AP of the map enlarged "
    "patch by patch",
    entrants=ENTRANTS,
    measures=(
        Measure(DELETION_ACCURACY, "deletion(preset=skipplus,auc=width)", 100, turned=True),
        Measure(DELETION_AOPC, "deletion(preset=skipplus-aopc,auc=width)", 100),
        Measure(INSERTION_ACCURACY, "insertion(preset=skipplus,auc=width)", 100),
        Measure(INSERTION_AOPC, "insertion(preset=skipplus-aopc,auc=width)", 100, turned=True),
        Measure(AP, "ap(preset=skipplus)", 100, optional=True),
    ),
    tables=(),
    gaps=(
        (
            "The paper draws its results (Figures 3, 4 and 7 to 12, p. 6 to 18) and prints no table, so there are no "
            "numbers to stand beside ours: what its text says of who is better is tested instead."
        ),
        (
            "Which area was drawn is not stated. Its code integrates deletion from 0 to 90 % and insertion from 10 to "
            "100 % and divides by nothing, so that a constant 100 gives 90; here it is divided by the width."
        ),
        (
            "The target is the true class by section 4.3 and the predicted class by the formula of appendix A.1; the "
            "true class is taken unless --target says otherwise."
        ),
        (
            "The gradients of attention weights (Figure 8) are not among our methods; GradCAM and its kin are made of "
            "the last block's input, because patches have no gradient after the last attention of a model that reads "
            "CLS."
        ),
        (
            "Some rows are equal because they are the same maths: HiResCAM and IxG once summed, and in a pre-norm "
            "model GlobEnc and AttIN once summed."
        ),
        (
            "Its AttCAT pairs the attention of a block with the block's output, ours with its input, as AttCAT's "
            "authors do; its code kept scores with three digits."
        ),
    ),
    check=check,
    claims=(
        Claim(
            "SkipPLUS helps the forward methods by all measures",
            "Figure 3, p. 6",
            tuple((name + _SKIP, name) for name in FORWARD[:3]),
            MEASURES,
        ),
        Claim(
            "PLUS helps the forward methods by all measures",
            "Figure 3, p. 6",
            tuple((name + _PLUS, name) for name in FORWARD[:3]),
            MEASURES,
        ),
        Claim(
            "DecompX∘SkipPLUS is better than all others (but for insertion on EVA Large)",
            "section 5.2, p. 5",
            tuple((BEST, one.name) for one in ENTRANTS if one.name != BEST),
            MEASURES,
        ),
        Claim(
            "DecompX∘SkipPLUS is better than GenAtt, the best until then",
            "section 5.1, p. 4",
            ((BEST, "GenAtt"),),
            MEASURES,
        ),
        Claim(
            "Random maps do not fare well by deletion (SkipPLUS's are better)",
            "section 5.2, p. 5",
            tuple((one + _SKIP, "random") for one in BASES),
            (DELETION_ACCURACY, DELETION_AOPC),
        ),
    ),
    remark="section 5.2, p. 5: deletion goes with AP, and against insertion",
    target="label",
    sweep=("decompx", "globenc", "ixg"),
    sweep_measures=(DELETION_AOPC, INSERTION_ACCURACY, AP),
)
