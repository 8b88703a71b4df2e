"""Joita (OTH Amberg-Weiden, 2025): rollout, GMAR and LeGrad by masks."""

from __future__ import annotations

from clairvit.papers.paper import Claim, Finding, Measure, MethodEntry, Paper, Table

ROLLOUT, GMAR_1, GMAR_2, LEGRAD = NAMES = ("Classical Rollout", "GMAR-L1", "GMAR-L2", "LeGrad")
MPA, MIOU, MAP = MEASURES = ("mPA", "mIoU", "mAP")
_SOURCE, _TEXT = "Table 1, section 4.1", "text of section 4.1"
TABLE = Table(
    "14 images of VOC 2012",
    _SOURCE,
    NAMES,
    {
        MPA: (79.12, 79.63, 79.79, 88.88),
        MIOU: (2.24, 5.00, 4.93, 42.96),
        MAP: (37.71, 43.45, 43.48, 85.23),
    },
)


def check() -> list[Finding]:
    """What the text says of the table, and which IoU it can be."""
    found = []
    for name in (ROLLOUT, LEGRAD):
        accuracy, overlap = TABLE.of(MPA, name), TABLE.of(MIOU, name)
        found.append(
            Finding(
                f"The mIoU of {name} is the foreground's alone, not the mean of two classes",
                _SOURCE,
                overlap < accuracy / 2,
                f"the mean of two would be at least half of the accuracy, {accuracy / 2:.2f}; it is {overlap:.2f}",
            )
        )
    rows = {name: [TABLE.of(one, name) for one in MEASURES] for name in NAMES}
    best = all(rows[LEGRAD][k] == max(row[k] for row in rows.values()) for k in range(3))
    worst = all(rows[ROLLOUT][k] == min(row[k] for row in rows.values()) for k in range(3))
    found.append(Finding("LeGrad is the highest by all three", _TEXT, best, _listed(rows[LEGRAD])))
    found.append(Finding("Classical Rollout is the lowest by all three", _TEXT, worst, _listed(rows[ROLLOUT])))
    found.append(
        Finding(
            "GMAR-L2 is slightly more precise than GMAR-L1",
            _TEXT,
            TABLE.of(MAP, GMAR_2) > TABLE.of(MAP, GMAR_1),
            f"mAP {TABLE.of(MAP, GMAR_2):.2f} and {TABLE.of(MAP, GMAR_1):.2f}; by mIoU it is the other way round, "
            f"{TABLE.of(MIOU, GMAR_2):.2f} and {TABLE.of(MIOU, GMAR_1):.2f}",
        )
    )
    return found


def _listed(row: list[float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in zip(MEASURES, row, strict=True))


PRESET = Paper(
    name="joita",
    title="Joita: rollout, GMAR and LeGrad by masks",
    paper="Joita: A Comparative Study of Explainable AI Methods. OTH Amberg-Weiden, 2025",
    models="ViT-B/16, pretrained on ImageNet-1k",
    data="Pascal VOC 2012, chosen by hand",
    images="14",
    protocol="maps scaled to 0…1 and cut at 0.5; overlap of the foreground; one map for each class in an image",
    entrants=(
        MethodEntry(ROLLOUT, "rollout(preset=joita)"),
        MethodEntry(GMAR_1, "gmar-l1(preset=joita)"),
        MethodEntry(GMAR_2, "gmar-l2(preset=joita)"),
        MethodEntry(LEGRAD, "legrad(preset=joita)"),
        MethodEntry("rollout (usual)", "rollout", extra=True),
        MethodEntry("GMAR-L1 (its authors')", "gmar-l1", extra=True),
        MethodEntry("GMAR-L2 (its authors')", "gmar-l2", extra=True),
        MethodEntry("LeGrad (its authors')", "legrad", extra=True),
    ),
    measures=(
        Measure(MPA, "pixel-accuracy", 100),
        Measure(MIOU, "iou", 100),
        Measure(MAP, "ap(upsampling=bilinear)", 100),
    ),
    tables=(TABLE,),
    gaps=(
        (
            "The report makes a map for each class in an image and does not say which ImageNet class a VOC class is; "
            "here there is one map an image, of the predicted class."
        ),
        "Which 14 images were chosen is not stated. With so few, an interval is wide: look at it before the ranks.",
        (
            "Its code multiplies rollout and GMAR in forward order and averages GMAR's weighted heads, and what it "
            "calls LeGrad is gradient times attention, averaged over keys: the four methods are made so, and the "
            "papers' own definitions stand below them."
        ),
        "Whether AP is of the map or of its cut is not stated: here of the map.",
    ),
    check=check,
    claims=(
        Claim("LeGrad is the best by all measures", _TEXT, tuple((LEGRAD, one) for one in NAMES[:-1]), MEASURES),
        Claim("GMAR improves on rollout", _TEXT, ((GMAR_1, ROLLOUT), (GMAR_2, ROLLOUT)), MEASURES),
    ),
    tables_of={"voc": TABLE.data, "voc-class": TABLE.data},
)
