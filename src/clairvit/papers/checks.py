"""Checks of papers: recompute statements and numbers from the tables that a paper prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from clairvit.metrics.radar import area_under_radar, radar
from clairvit.papers.paper import Finding, Paper, Table

SHAP, FOCUSVIT = "SHAP", "FocusViT"
FAITHFULNESS, SENSITIVITY, SPARSENESS, RANDOMISATION = AXES = (
    *("Faithfulness Correlation", "Max-Sensitivity", "Sparseness", "Model Randomisation"),
)
BETTER: list[Literal["higher", "lower"]] = ["higher", "lower", "lower", "lower"]  # Table 1, sparseness included
AREA = "AUR"


# FocusViT


def radar_areas(table: Table, lost_sign: bool = False) -> tuple[float, ...]:
    """Return the areas that follow from FocusViT's four metrics; `lost_sign` makes SHAP's faithfulness negative."""
    values = torch.tensor([table.values[axis] for axis in AXES], dtype=torch.float64).T.clone()
    if lost_sign:
        values[table.methods.index(SHAP), 0] *= -1
    return tuple(area_under_radar(radar(values, BETTER)).tolist())


def largest_area(table: Table, method: str) -> float:
    """Return a bound of the area for any scaling of the axes that puts the worst method at 0 and the best at 1.

    Two axes that are not 0 have 1/2 between them at most, three 1, four 2, whatever their order. With and without the
    sign that was lost: the larger.
    """
    return max({0: 2.0, 1: 1.0, 2: 0.5}.get(_worst_axes(table, method, sign), 0.0) for sign in (1, -1))


def _worst_axes(table: Table, method: str, sign: int) -> int:
    """Return the number of axes on which no method is worse, with SHAP's faithfulness times `sign`."""
    count = 0
    for axis, better in zip(AXES, BETTER, strict=True):
        values = dict(zip(table.methods, table.values[axis], strict=True))
        if axis == FAITHFULNESS:
            values[SHAP] *= sign
        count += values[method] == (min if better == "higher" else max)(values.values())
    return count


def check_focusvit(paper: Paper) -> list[Finding]:
    """Compute Table 3 from Table 2, and what the text says of both."""
    return [
        *_flower_areas(paper),
        *_other_areas(paper),
        *_impossible_areas(paper),
        *_largest_areas(paper),
        *_focusvit_ranks(paper),
        *_focusvit_numbers(paper),
        *_focusvit_meanings(paper),
    ]


def _flower_areas(paper: Paper) -> list[Finding]:
    flower, source, tolerance = paper.tables[0], paper.sources["table_3"], paper.printed["tolerance"]
    printed, computed, unsigned = flower.values[AREA], radar_areas(flower, lost_sign=True), radar_areas(flower)
    findings = [
        Finding(
            f"AUR of {name} on Flower follows from Table 2 (SHAP's faithfulness being −0.0009: a sign lost in print)",
            source,
            abs(area - recomputed) < tolerance,
            f"printed {area:.4f}, computed {recomputed:.4f}",
        )
        for name, area, recomputed in zip(flower.methods, printed, computed, strict=True)
    ]
    largest = max(
        abs(area - recomputed)
        for name, area, recomputed in zip(flower.methods, printed, unsigned, strict=True)
        if name != SHAP
    )
    findings.append(
        Finding(
            "The same with SHAP's faithfulness as it is printed, 0.0009",
            source,
            largest < tolerance,
            f"the five other methods are off by up to {largest:.4f}",
        )
    )
    return findings


def _other_areas(paper: Paper) -> list[Finding]:
    findings = []
    for table in paper.tables[1:]:
        rows = list(zip(table.methods, table.values[AREA], radar_areas(table), strict=True))
        numbers = ", ".join(f"{name} {area:.4f} / {recomputed:.4f}" for name, area, recomputed in rows)
        holds = all(abs(area - recomputed) < paper.printed["tolerance"] for _, area, recomputed in rows)
        statement = f"AUR on {table.data} follows from Table 2"
        findings.append(Finding(statement, paper.sources["table_3"], holds, f"printed / computed: {numbers}"))
    return findings


def _impossible_areas(paper: Paper) -> list[Finding]:
    """Return the printed areas that no scaling and no order of the axes can give."""
    findings, tolerance = [], paper.printed["tolerance"]
    for table in paper.tables:
        for name, printed in zip(table.methods, table.values[AREA], strict=True):
            most = largest_area(table, name)
            if printed > most + tolerance:
                worst = {1.0: "one axis", 0.5: "two axes"}.get(most, "three axes")
                bound = f"{most:.1f} at most"
            elif printed < tolerance and most >= 1:
                worst = "no axis" if most > 1 else "one axis only"
                bound = "more than 0"
            else:
                continue
            statement = f"AUR of {name} on {table.data} can be had from Table 2 by any scaling and order of the axes"
            numbers = f"printed {printed:.4f}; worst on {worst}, so {bound}"
            findings.append(Finding(statement, paper.sources["table_3"], False, numbers))
    return findings


def _largest_areas(paper: Paper) -> list[Finding]:
    findings = []
    printed = {table.data: table.values[AREA] for table in paper.tables}
    computed = {table.data: radar_areas(table) for table in paper.tables}
    for origin, areas in (("as printed", printed), ("computed from Table 2", computed)):
        holds = all(values.index(max(values)) == len(values) - 1 for values in areas.values())
        numbers = ", ".join(f"{data} {values[-1]:.4f}" for data, values in areas.items())
        statement = f"FocusViT has the largest AUR on all five data sets ({origin})"
        findings.append(Finding(statement, paper.sources["table_3"], holds, numbers))
    return findings


def _focusvit_ranks(paper: Paper) -> list[Finding]:
    """Check who is said to be the best on every data set."""
    findings = []
    for statement, measure, method, best in (
        ("FocusViT's faithfulness is the highest on all five data sets", FAITHFULNESS, FOCUSVIT, max),
        ("FocusViT's sparseness is the lowest on all five data sets", SPARSENESS, FOCUSVIT, min),
        ("SHAP has the lowest model randomisation on all five data sets", RANDOMISATION, SHAP, min),
    ):
        holds = all(table.value(measure, method) == best(table.values[measure]) for table in paper.tables)
        numbers = ", ".join(f"{table.data} {table.value(measure, method):.4f}" for table in paper.tables)
        findings.append(Finding(statement, paper.sources["text"], holds, numbers))
    return findings


def _focusvit_numbers(paper: Paper) -> list[Finding]:
    """Check numbers and places that the text names."""
    tables, text, printed = {table.data: table for table in paper.tables}, paper.sources["text"], paper.printed
    *rivals, score = tables["Dog"].values[FAITHFULNESS]
    lead = score - max(rivals)
    sensitivities = tables["Caltech"].values[SENSITIVITY][2:]
    methods = ("Grad-CAM", "LRP", "Attention")
    randomised = [table.value(RANDOMISATION, name) for table in paper.tables for name in methods]
    above = sum(value > printed["randomisation"] for value in randomised)
    places = {
        data: 1 + sum(area > table.value(AREA, SHAP) for area in table.values[AREA]) for data, table in tables.items()
    }
    return [
        Finding(
            f"On Dog FocusViT is more faithful than other methods 'by {printed['dog_lead']}'",
            text,
            math.isclose(lead, printed["dog_lead"], abs_tol=printed["tolerance"]),
            f"{score} is its score; the next one is {max(rivals):.4f}, so it leads by {lead:.4f}",
        ),
        Finding(
            f"On Caltech all but LIME and SHAP have a max-sensitivity of {printed['max_sensitivity']:.2f}",
            text,
            all(round(value, 2) == printed["max_sensitivity"] for value in sensitivities),
            f"{', '.join(f'{value:.4f}' for value in sensitivities)}: so if cut off, not if rounded",
        ),
        Finding(
            f"Model randomisation of Grad-CAM, LRP and Attention 'frequently' exceeds {printed['randomisation']}",
            text,
            above > len(randomised) / 2,
            f"{above} of {len(randomised)} values do",
        ),
        Finding(
            "SHAP's AUR is low on all data sets",
            text,
            all(place >= 5 for place in places.values()),
            "its place among six: " + ", ".join(f"{data} {place}" for data, place in places.items()),
        ),
    ]


def _focusvit_meanings(paper: Paper) -> list[Finding]:
    """Check what the text reads into max-sensitivity, a relative change, and into model randomisation, a similarity."""
    text, near = paper.sources["text"], paper.printed["near_one"]
    methods = [name for name in paper.tables[0].methods if name not in ("LIME", SHAP)]
    changes = [table.value(SENSITIVITY, name) for table in paper.tables for name in methods]
    own = [table.value(SENSITIVITY, FOCUSVIT) for table in paper.tables]
    shap = [table.value(RANDOMISATION, SHAP) for table in paper.tables]
    rows = [dict(zip(table.methods, table.values[RANDOMISATION], strict=True)) for table in paper.tables]
    stable = [
        f"{table.data} {max(row, key=lambda name: row[name])}" for table, row in zip(paper.tables, rows, strict=True)
    ]
    return [
        Finding(
            "FocusViT's sensitivity is low: small noise changes its map by less than the map itself (below 1)",
            text,
            max(own) < 1,
            f"{', '.join(f'{value:.4f}' for value in own)}; of {', '.join(methods)} "
            f"{sum(abs(value - 1) < near for value in changes)} of {len(changes)} values are within {near} of 1, which "
            "|a − a′| / |a| gives where a′ is far smaller than a: a hypothesis is that the two maps, or their pixels, "
            "are on different scales",
        ),
        Finding(
            "SHAP is the most stable under model randomisation: its maps change least",
            text,
            all(row[SHAP] == max(row.values()) for row in rows),
            f"the number is the similarity of the maps before and after, so SHAP's {min(shap):.4f} to {max(shap):.4f} "
            f"are maps that change most, which the test asks for; they change least by {', '.join(stable)}",
        ),
    ]


# CMI


def check_cmi(paper: Paper) -> list[Finding]:
    """Check FAF + BAF = 1, the means over the eleven images, and which method is higher."""
    (table,) = paper.tables
    faf, baf, n = table.per_image["FAF"], table.per_image["BAF"], len(table.images)
    findings = []
    for name in table.methods:
        exact = sum(abs(on + off - 1) < 5e-4 for on, off in zip(faf[name], baf[name], strict=True))  # three decimals
        statement = f"FAF + BAF = 1 for every image of {name}"
        findings.append(Finding(statement, paper.sources["table_2"], exact == n, f"{exact} of {n} images"))
    for name, printed in paper.printed["mean_faf"].items():
        mean = statistics.fmean(faf[name])
        statement, numbers = f"The mean FAF of {name} is {printed}", f"mean over {n} images: {mean:.5f}"
        findings.append(Finding(statement, paper.sources["text"], round(mean, 3) == printed, numbers))
    rollout, gradient = (faf[name] for name in table.methods)
    gaps = [after - before for before, after in zip(rollout, gradient, strict=True)]
    lower = [image for image, gap in zip(table.images, gaps, strict=True) if gap < 0]
    mean, deviation = statistics.fmean(gaps), statistics.stdev(gaps)
    t = mean / (deviation / math.sqrt(n))
    findings.append(
        Finding(
            "Gradient Attention Rollout has the higher mean FAF",
            paper.sources["text"],
            mean > 0,
            f"by {mean:.4f} (standard deviation {deviation:.4f}, t = {t:.2f} of {n} pairs); "
            f"higher on {n - len(lower)} of {n}, lower on {' and '.join(lower)}",
        )
    )
    return findings


# Coporan


def check_coporan(paper: Paper) -> list[Finding]:
    """Check bounds that a mean of F1 and a mean of Jaccard indices must keep, and counts behind percentages."""
    (table,) = paper.tables
    sources, images = paper.sources, paper.printed["images"]
    findings = []
    for name in table.methods:
        measures = ("Jaccard Index", "F1 Score", "Pixel Accuracy", "Pointing Game Accuracy")
        jaccard, f1, accuracy, pointing = (table.value(measure, name) / 100 for measure in measures)
        most = 2 * jaccard / (1 + jaccard)  # F1 = 2J / (1 + J) of one image is concave in J
        hits = round(pointing * images)
        findings += [
            Finding(
                f"The mean F1 of {name} can belong to its mean Jaccard index (between J and 2J / (1 + J))",
                sources["table_3"],
                jaccard <= f1 <= most,
                f"{100 * jaccard:.2f} ≤ {100 * f1:.2f} ≤ {100 * most:.2f}",
            ),
            Finding(
                f"The Jaccard index of {name} is the foreground's alone, not the mean of two classes",
                sources["table_3"],
                jaccard < accuracy / 2,
                f"the mean of two would be at least half of the pixel accuracy, {50 * accuracy:.2f}; "
                f"it is {100 * jaccard:.2f}",
            ),
            Finding(
                f"The pointing game of {name} is a count among all {images} images, not the confident ones",
                sources["table_4"],
                round(100 * hits / images, 2) == round(100 * pointing, 2),
                f"{hits} of {images} are {100 * hits / images:.2f} %",
            ),
        ]
    cam, lrp = table.methods
    better = [
        table.value(measure, lrp) < table.value(measure, cam)
        if measure == "Deletion AUC"
        else table.value(measure, lrp) > table.value(measure, cam)
        for measure in table.values
    ]
    statement = "LRP is better than CAM by all five measures"
    findings.append(Finding(statement, sources["text"], all(better), "higher by four, lower by deletion"))
    return findings


# Joita


def check_joita(paper: Paper) -> list[Finding]:
    """Check what the text says of the table, and which IoU it can be."""
    (table,) = paper.tables
    source, text = paper.sources["table_1"], paper.sources["text"]
    rollout, gmar_1, gmar_2, legrad = table.methods  # LeGrad is printed once; the name says that the code made it

    def listed(method: str) -> str:
        return ", ".join(f"{measure} {table.value(measure, method):.2f}" for measure in table.values)

    findings = []
    for name in (rollout, legrad):
        accuracy, overlap = table.value("mPA", name), table.value("mIoU", name)
        findings.append(
            Finding(
                f"The mIoU of {name.partition(' (')[0]} is the foreground's alone, not the mean of two classes",
                source,
                overlap < accuracy / 2,
                f"the mean of two would be at least half of the accuracy, {accuracy / 2:.2f}; it is {overlap:.2f}",
            )
        )
    best = all(table.value(measure, legrad) == max(row) for measure, row in table.values.items())
    worst = all(table.value(measure, rollout) == min(row) for measure, row in table.values.items())
    return [
        *findings,
        Finding("LeGrad is the highest by all three", text, best, listed(legrad)),
        Finding("Classical Rollout is the lowest by all three", text, worst, listed(rollout)),
        Finding(
            "GMAR-L2 is slightly more precise than GMAR-L1",
            text,
            table.value("mAP", gmar_2) > table.value("mAP", gmar_1),
            f"mAP {table.value('mAP', gmar_2):.2f} and {table.value('mAP', gmar_1):.2f}; by mIoU it is the other way "
            f"round, {table.value('mIoU', gmar_2):.2f} and {table.value('mIoU', gmar_1):.2f}",
        ),
    ]


# SkipPLUS


def check_skipplus(paper: Paper) -> list[Finding]:
    """Check the start layers and the directions: the paper draws its results and prints no table."""
    findings = []
    for printed in paper.printed["start_layers"]:
        model, layers, start = printed["model"], printed["layers"], printed["start"]
        half = math.ceil(layers / 2)
        statement = f"SkipPLUS starts {model} ({layers} layers) at layer {start}: m = ceil(L/2), equation 4"
        findings.append(Finding(statement, paper.sources["start_layer"], half == start, f"ceil({layers}/2) = {half}"))
    complements = paper.printed["complements"]
    holds = all(
        measure.better == "higher" and measure.complement == (measure.name in complements) for measure in paper.measures
    )
    findings.append(
        Finding(
            "With 100 − x for deletion accuracy and insertion AOPC, higher is better by every measure",
            paper.sources["directions"],
            holds,
            ", ".join(f"{measure.name}: {measure.better}" for measure in paper.measures),
        )
    )
    return findings


CHECKS: Mapping[str, Callable[[Paper], list[Finding]]] = {
    "focusvit": check_focusvit,
    "cmi": check_cmi,
    "coporan": check_coporan,
    "joita": check_joita,
    "skipplus": check_skipplus,
}
