"""Coporan (West University of Timisoara): CAM against LRP on VOC 2012, by masks and by deletion."""

from __future__ import annotations

from clairvit.papers.paper import Claim, Finding, Measure, MethodEntry, Paper, Table

CAM, LRP = "CAM", "LRP"
JACCARD, F1, ACCURACY, DELETION, POINTING = (
    *("Jaccard Index", "F1 Score", "Pixel Accuracy", "Deletion AUC", "Pointing Game Accuracy"),
)
SURE = 0.85  # the predicted class has to be more probable than this
IMAGES = 1449  # of VOC 2012's validation set
_TABLE_3, _TABLE_4 = "Table 3, section 6.4", "Table 4, section 6.4"
TABLE = Table(
    "VOC 2012",
    f"{_TABLE_3} (predicted with more than 85 %) and {_TABLE_4}",
    (CAM, LRP),
    {
        JACCARD: (4.35, 14.28),
        F1: (7.49, 22.96),
        ACCURACY: (66.49, 70.35),
        DELETION: (24.7, 12.4),
        POINTING: (44.24, 71.98),
    },
)


def check() -> list[Finding]:
    """Bounds that a mean of F1 and a mean of Jaccard must keep, and counts behind percentages."""
    found = []
    for name in (CAM, LRP):
        jaccard, f1, accuracy, pointing = (TABLE.of(one, name) / 100 for one in (JACCARD, F1, ACCURACY, POINTING))
        most = 2 * jaccard / (1 + jaccard)  # F1 = 2J / (1 + J) of one image is concave in J
        found.append(
            Finding(
                f"The mean F1 of {name} can belong to its mean Jaccard index (between J and 2J / (1 + J))",
                _TABLE_3,
                jaccard <= f1 <= most,
                f"{100 * jaccard:.2f} ≤ {100 * f1:.2f} ≤ {100 * most:.2f}",
            )
        )
        found.append(
            Finding(
                f"The Jaccard index of {name} is the foreground's alone, not the mean of two classes",
                _TABLE_3,
                jaccard < accuracy / 2,
                f"the mean of two would be at least half of the pixel accuracy, {50 * accuracy:.2f}; "
                f"it is {100 * jaccard:.2f}",
            )
        )
        hits = round(pointing * IMAGES)
        found.append(
            Finding(
                f"The pointing game of {name} is a count among all {IMAGES} images, not the confident ones",
                _TABLE_4,
                round(100 * hits / IMAGES, 2) == round(100 * pointing, 2),
                f"{hits} of {IMAGES} are {100 * hits / IMAGES:.2f} %",
            )
        )
    better = [TABLE.of(one, LRP) > TABLE.of(one, CAM) for one in (JACCARD, F1, ACCURACY, POINTING)]
    found.append(
        Finding(
            "LRP is better than CAM by all five measures",
            "section 6.4",
            all(better) and TABLE.of(DELETION, LRP) < TABLE.of(DELETION, CAM),
            "higher by four, lower by deletion",
        )
    )
    return found


PRESET = Paper(
    name="coporan",
    title="Coporan: CAM and LRP by masks and by deletion",
    paper="Coporan: Visualization Techniques for Improving Explainability in Visual Transformers. Timisoara",
    models="Chefer's ViT-B/16 (timm weights)",
    data="Pascal VOC 2012, validation set",
    images="1449; those predicted with more than 85 % for all but the pointing game",
    protocol="maps enlarged bilinearly, scaled to 0…1 and cut at 0.5; all objects are the mask, and void with them; "
    "deletion in 100 steps of 501 black pixels",
    entrants=(
        MethodEntry(CAM, "attcam"),
        MethodEntry(LRP, "transatt"),
        MethodEntry("LRP (Chefer's evaluation)", "transatt(preset=evaluation)", extra=True),
        MethodEntry("AG-CAM", "ag-cam", extra=True),
    ),
    measures=(
        Measure(JACCARD, "iou(preset=coporan)", 100, above=SURE),
        Measure(F1, "f1(preset=coporan)", 100, above=SURE),
        Measure(ACCURACY, "pixel-accuracy(preset=coporan)", 100, above=SURE),
        Measure(DELETION, "deletion(preset=coporan)", 100, above=SURE),
        Measure(POINTING, "pointing-game(preset=coporan)", 100),
    ),
    tables=(TABLE,),
    gaps=(
        (
            "The report's notebook feeds its model pixels in 0…1 although it was trained on pixels normalised by 0.5 "
            "and 0.5; here every model gets the preprocessing that it was trained with."
        ),
        (
            "Its CAM is Chefer's gradient-weighted attention of the last layer, not AG-CAM, which the text describes; "
            "its LRP is Chefer's transformer attribution."
        ),
        "A constant CAM becomes 0/0 in the notebook and is scored silently; here it is an empty mask, and counted.",
        "The report cuts numbers off after the second decimal; here they are rounded.",
    ),
    check=check,
    claims=(
        Claim("LRP is better than CAM", "section 6.4", ((LRP, CAM),), (JACCARD, F1, ACCURACY, DELETION, POINTING)),
    ),
    void="object",
    tables_of={"voc": TABLE.data},
    efforts={"quick": {"deletion(preset=coporan)": "deletion(preset=coporan,steps=9)"}},
)
