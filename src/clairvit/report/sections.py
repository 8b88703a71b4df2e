"""Sections: from findings to the blocks of a report. One function a section; each says in words what it cannot show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.inference import FEWEST, LEVEL, fewest_values
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Score, lead, leads
from clairvit.plotting.curves import LUCK
from clairvit.plotting.measures import ARROWS
from clairvit.report.blocks import Block, Cell, Column, Figures, Row, Section, Table, Text
from clairvit.report.charts import curves_chart, images, intervals_chart, radar_chart, strokes
from clairvit.report.numbers import NOTHING, edges, places_for, plain, short
from clairvit.report.ranking import FOCUSVIT, RadarData, agreement, by_class, differs, mean_ranks, ranks, star
from clairvit.report.study_results import Findings
from clairvit.selection import stats

SIDE_BY_SIDE = 4  # metrics in one table: what a sheet of paper holds
MOST_CLASSES = 60  # lines of a table; the CSV has all
DOUBT, WORSE = "†", "‡"


def ranking(findings: Findings) -> Section:
    """Means with intervals, the best of each metric in bold, baselines apart."""
    if not findings.methods:
        return Section("Ranking", [Text("No method but the baselines was scored.")])
    order = ranks(findings.scores, findings.methods, findings.metrics)
    mean = dict(zip(findings.methods, mean_ranks(order).tolist(), strict=True))
    blocks: list[Block] = [Text(_verdict(findings, mean), lead=True)]
    parts = parted(findings.metrics)
    for number, part in enumerate(parts):
        blocks.append(_ranking_table(findings, part, mean, number, len(parts)))
    classes = strokes(findings.methods)
    charts = [intervals_chart(findings.of(metric), classes) for metric in findings.metrics]
    blocks.append(Figures(tuple(one for one in charts if one is not None)))
    return Section("Ranking", blocks)


def parted(metrics: Sequence[str]) -> list[Sequence[str]]:
    """As few tables as can be, of about the same width: five metrics are three and two."""
    wide = math.ceil(len(metrics) / math.ceil(len(metrics) / SIDE_BY_SIDE)) if metrics else 1
    return [metrics[at : at + wide] for at in range(0, len(metrics), wide)]


def _verdict(findings: Findings, mean: dict[str, float]) -> str:
    """Who leads, and whether that is more than luck."""
    best, *others = findings.methods
    seen = images(len(findings.scores.seen))
    metric = findings.key_metric
    if metric is None:
        return f"None of the metrics is defined on these {seen}."
    said = f"On {seen}, {best} "
    if not others:
        said += "is the only method that was scored."
        rival: str | None = LUCK if (LUCK, metric) in findings.scores else None
    else:
        count = len(findings.metrics)
        by = f"over {count} metrics" if count > 1 else f"by {metric}"
        said += f"has the best mean rank of {len(findings.methods)} methods ({mean[best]:.1f} {by})."
        rival = others[0]
    pair = findings.scores.get((best, metric)), findings.scores.get((rival or "", metric))
    if pair[0] is None or pair[1] is None:
        return said
    gap, (low, high) = lead(pair[0], pair[1])
    digits = places_for((gap, low, high), 2)
    word = "ahead of" if gap >= 0 else "behind"
    numbers = f"{short(abs(gap), digits)} {word} {rival}"
    if math.isnan(low):
        return f"{said} By {metric} it is {numbers}; with fewer than {FEWEST} images nothing says how sure that is."
    said += f" By {metric} it is {numbers}, 95 % interval {' to '.join(edges(low, high, digits))}"
    if not others:
        return f"{said}{'' if differs((low, high)) else ': no clear difference'}."
    p = after_picking(findings, best, metric)[others[0]]
    sure = "" if p < LEVEL else ": no clear difference"
    return f"{said}, p = {p:.2g} corrected for having picked the best of {len(findings.methods)}{sure}."


def after_picking(findings: Findings, best: str, metric: str) -> dict[str, float]:
    """Return the p-values of the best method against each other one, corrected for having picked it on these images."""
    own = findings.of(metric)
    rivals = [method for method in findings.methods if method != best and method in own]
    return dict(zip(rivals, stats.corrected_after_picking([leads(own[best], own[one]) for one in rivals]), strict=True))


def _ranking_table(findings: Findings, metrics: Sequence[str], mean: dict[str, float], part: int, parts: int) -> Table:
    columns = [Column("method", number=False), Column("mean rank")]
    best, digits = {}, {}
    for metric in metrics:
        own = findings.of(metric)
        some = next(iter(own.values()))
        columns.append(Column(f"{metric}\u00a0{ARROWS[some.better]}", note=resolve_metric(metric).metric.family))
        means = {m: own[m].mean for m in findings.methods if m in own and own[m].n_valid}
        pick = max if some.better == "higher" else min
        best[metric] = pick(means.values()) if len(means) > 1 else math.nan
        digits[metric] = places_for(one.mean for one in own.values())
    verdicts = {metric: against_luck(findings.of(metric)) for metric in metrics}
    rows, records = [], []
    for method in (*findings.methods, *findings.baselines):
        apart = method not in mean
        rank = math.nan if apart else mean[method]
        cells = [Cell(method), Cell(NOTHING if math.isnan(rank) else f"{rank:.1f}", order=rank)]
        for metric in metrics:
            score = findings.scores.get((method, metric))
            against, p = verdicts[metric].get(method, (None, None))
            cells.append(_score_cell(score, digits[metric], math.nan if apart else best[metric], against))
            if score is not None:
                records.append({**findings.names(), **_record(score, apart, rank, against, p)})
        rows.append(Row(tuple(cells), apart))
    caption = "Mean over images with 95 % interval" + (f" ({part + 1} of {parts})" if parts > 1 else "")
    notes = [
        "↑ higher is better, ↓ lower is better; the best of each metric is bold. Mean rank weighs all metrics alike."
    ]
    n = max((score.n_valid for metric in metrics for score in findings.of(metric).values()), default=0)
    test = "p < 0.05 in a paired test, corrected for the methods of the column"
    if any(cell.text.endswith(WORSE) for row in rows for cell in row.cells):
        notes.append(f"{WORSE} worse than random on the same images ({test}).")
    if any(cell.text.endswith(DOUBT) for row in rows for cell in row.cells):
        notes.append(f"{DOUBT} not told apart from random on the same images (not {test}).")
    fewest = fewest_values(len(findings.methods))
    if n < FEWEST:
        notes.append(f"Intervals, and any claim, take {FEWEST} images or more; here are {n}.")
    if n < fewest and LUCK in findings.baselines:
        notes.append(
            f"{images(n)} cannot tell {len(findings.methods)} methods from random, whatever they score: that takes "
            f"{fewest}."
        )
    return Table("ranking", caption, tuple(columns), tuple(rows), tuple(records), tuple(notes))


def against_luck(scores: Mapping[str, Score]) -> dict[str, tuple[str, float]]:
    """Return 'better', 'worse' or 'unclear' than random, and the corrected p, of each method by one metric.

    Paired differences on the same images, `stats.corrected` over the methods.
    """
    luck = scores.get(LUCK)
    methods = [name for name in scores if name not in BASELINES]
    if luck is None:
        return {}
    gaps = [leads(scores[name], luck) for name in methods]
    verdicts = {}
    for name, gap, p in zip(methods, gaps, stats.corrected(gaps, luck.seed).tolist(), strict=True):
        word = "unclear" if p >= LEVEL else "better" if gap.mean() > 0 else "worse"
        verdicts[name] = (word, p)
    return verdicts


def _score_cell(score: Score | None, digits: int, best: float, against: str | None) -> Cell:
    if score is None or not score.n_valid:
        return Cell(NOTHING, "undefined" if score is not None else "not run")
    low, high = score.interval
    more = "" if math.isnan(low) else f"[{', '.join(edges(low, high, digits))}]"
    more += f" n = {score.n_valid}" if score.n_invalid else ""
    text = short(score.mean, digits) + {"unclear": f"\u00a0{DOUBT}", "worse": f"\u00a0{WORSE}"}.get(against or "", "")
    return Cell(text, more.strip(), score.mean == best, score.mean)


def _record(score: Score, baseline: bool, rank: float, against: str | None, p: float | None) -> dict[str, object]:
    low, high = score.interval
    return {
        "method": score.method,
        "metric": score.metric,
        "better": score.better,
        "baseline": baseline,
        "mean": plain(score.mean),
        "low": plain(low),
        "high": plain(high),
        "standard_error": plain(score.standard_error),
        "n": score.n_valid,
        "n_invalid": score.n_invalid,
        "n_degenerate": score.n_degenerate,
        "mean_rank": plain(rank),
        "against_random": against,
        "p_against_random": p,
    }


def radar_section(findings: Findings) -> Section:
    found = star(findings.scores, findings.methods, findings.metrics)
    if isinstance(found, str):
        return Section("Radar", [Text(found)])
    arrows = {axis: ARROWS[findings.scores[found.methods[0], axis].better] for axis in found.axes}
    which = "FocusViT's four metrics" if found.focusvit else f"{len(found.axes)} metrics, not FocusViT's four"
    warning = (
        f"Area under radar (AUR) over {which}. The area depends on which methods are compared, on the order of the "
        "axes and on outliers, which flatten the rest of their axis: read it beside the ranking, never alone. "
        "Baselines are not among the methods."
    )
    if found.focusvit and arrows[found.axes[FOCUSVIT.index("sparseness")]] == ARROWS["higher"]:
        warning += (
            " Sparseness is good when high here, and when low in FocusViT (direction=lower): areas do not compare with "
            "its table."
        )
    blocks: list[Block] = [Text(warning), Figures((radar_chart(found, arrows, strokes(findings.methods)),))]
    blocks.append(_areas(findings, found))
    if found.left_out:
        blocks.append(Text(f"Without a score on one of the axes, so not in the chart: {', '.join(found.left_out)}."))
    return Section("Radar", blocks)


def _areas(findings: Findings, found: RadarData) -> Table:
    order = sorted(range(len(found.methods)), key=lambda place: -found.areas[place])
    best = float(found.areas.max())
    rows, records = [], []
    for place in order:
        area, r = float(found.areas[place]), found.r[place].tolist()
        cells = [Cell(short(one, 2), order=one) for one in r]
        rows.append(Row((Cell(found.methods[place]), Cell(short(area, 3), best=area == best, order=area), *cells)))
        own = {"method": found.methods[place], "area_under_radar": area}
        records.append({**findings.names(), **own, **dict(zip(found.axes, r, strict=True))})
    columns = (Column("method", number=False), Column("AUR"), *(Column(axis) for axis in found.axes))
    return Table(
        "radar", "Area under radar, and each axis from 0 (worst) to 1 (best)", columns, tuple(rows), tuple(records)
    )


def curves_section(findings: Findings) -> Section:
    classes = strokes(findings.methods)
    charts = [curves_chart(findings.of(metric), classes) for metric in findings.metrics]
    drawn = tuple(one for one in charts if one is not None)
    if not drawn:
        return Section("Curves", [Text("None of the metrics that were run is read off a curve.")])
    return Section("Curves", [Figures(drawn)])


def classes_section(findings: Findings) -> Section:
    """By true class where it is known for all images, else by predicted class."""
    metric, seen = findings.key_metric, findings.scores.seen
    if metric is None:
        return Section("Classes", [Text("None of the metrics is defined on these images.")])
    true = all(one.label is not None for one in seen)
    classes = {one.image: one.predicted if one.label is None or not true else one.label for one in seen}
    right = {one.image: one.predicted == one.label for one in seen}
    own = findings.of(metric)
    found = {method: by_class(score, classes) for method, score in own.items()}
    shown = [method for method in own if method in findings.methods[:5] or method == LUCK]
    numbers = sorted(set(classes.values()), key=lambda one: (-sum(c == one for c in classes.values()), one))
    digits = places_for(found[method][number][0] for method in shown for number in numbers)
    rows, records = [], []
    for number in numbers:
        inside = [image for image, one in classes.items() if one == number]
        share = sum(right[image] for image in inside) / len(inside)
        cells = [Cell(findings.class_name(number)), Cell(str(len(inside)), order=len(inside))]
        cells += [Cell(f"{100 * share:.0f} %", order=share)] if true else []
        means = [found[method][number][0] for method in shown]
        ours = [m for m, name in zip(means, shown, strict=True) if name != LUCK and math.isfinite(m)]
        best = (max if own[shown[0]].better == "higher" else min)(ours) if len(ours) > 1 else math.nan
        cells += [
            Cell(short(m, digits), best=m == best and n != LUCK, order=m) for m, n in zip(means, shown, strict=True)
        ]
        rows.append(Row(tuple(cells)))
        for method, by in found.items():
            about = {"class": number, "name": findings.class_name(number), "images": len(inside)}
            about |= {"accuracy": share if true else None, "metric": metric, "method": method}
            records.append({**findings.names(), **about, "mean": plain(by[number][0]), "n": by[number][1]})
    kind = "true" if true else "predicted"
    columns = [Column(f"{kind} class", number=False), Column("images"), *([Column("accuracy")] if true else [])]
    columns += [Column(method) for method in shown]
    arrow = ARROWS[own[shown[0]].better]
    notes = [] if len(numbers) <= MOST_CLASSES else [f"The {MOST_CLASSES} classes with most images of {len(numbers)}."]
    if not true:
        notes.append(
            "The true classes are not known (of all images), so images are grouped by what the model predicts."
        )
    if len(shown) < len(own):
        notes.append("The methods with the best mean ranks, and random; --format csv has all.")
    caption = f"Mean {metric} {arrow} by {kind} class"
    table = Table("classes", caption, tuple(columns), tuple(rows[:MOST_CLASSES]), tuple(records), tuple(notes))
    return Section("Classes", [table])


def agreement_section(findings: Findings) -> Section:
    """Spearman's correlation over methods, for each pair of metrics."""
    title = "Agreement between metrics"
    if len(findings.metrics) < 2 or len(findings.methods) < 3:
        return Section(title, [Text("Agreement is between two metrics or more over three methods or more.")])
    matrix = agreement(findings.scores, findings.methods, findings.metrics)
    rows, records = [], []
    for place, metric in enumerate(findings.metrics):
        line = matrix[place].tolist()
        cells = [Cell(short(rho, 2), order=rho, tint=0.0 if math.isnan(rho) else rho) for rho in line]
        rows.append(Row((Cell(metric), *cells)))
        for other, rho in zip(findings.metrics, line, strict=True):
            records.append({**findings.names(), "metric": metric, "other": other, "spearman": plain(rho)})
    columns = (Column("metric", number=False), *(Column(metric) for metric in findings.metrics))
    count = len(findings.methods)
    note = (
        f"Spearman's correlation of the ranks of {count} methods (without baselines, where both are defined): 1 where "
        "two metrics order them alike, −1 where they order them the other way round."
    )
    few = ["With so few methods a correlation says little."] if count < 6 else []
    return Section(title, [Table("agreement", "Rank agreement", columns, tuple(rows), tuple(records), (note, *few))])
