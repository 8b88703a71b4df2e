"""The sections of a report on one model and data, one function each; a section without data is one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clairvit._cost import Cost
from clairvit.methods.plain_language import plain_words
from clairvit.methods.registry import USUAL_PATCHES
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.confidence_intervals import FEWEST, LEVEL, fewest_values
from clairvit.metrics.score import Score, lead, leads
from clairvit.plotting.labels import (
    ARROWS,
    UNDEFINED,
    count_images,
    decimals_for,
    format_interval,
    format_number,
    format_seconds,
)
from clairvit.plotting.series import RANDOM, highlighted_styles
from clairvit.reports.blocks import Block, Cell, Charts, Column, Row, Section, Table, Text
from clairvit.reports.charts import curves_chart, intervals_chart, radar_chart
from clairvit.reports.ranking import (
    FOCUSVIT,
    RadarData,
    agreement,
    class_means,
    excludes_zero,
    mean_ranks,
    radar_data,
    ranks,
)
from clairvit.reports.study_results import StudyResults
from clairvit.selection import stats

METRICS_PER_TABLE = 4  # what a sheet of paper holds
MOST_CLASSES = 60  # rows of a table; the CSV has all
UNCLEAR, WORSE = "†", "‡"
PASSES = ("forwards", "backwards")


# Ranking


def ranking_section(results: StudyResults) -> Section:
    """Return means with intervals, the best of each metric in bold, baselines apart."""
    if not results.methods:
        return Section("Ranking", [Text("No method but the baselines was scored.")])
    table = ranks(results.scores, results.methods, results.metrics)
    mean = dict(zip(results.methods, mean_ranks(table).tolist(), strict=True))
    blocks: list[Block] = [
        Text(_summary(results, mean), lead=True),
        Text(_in_plain_words(results.specs.method(results.methods[0]))),
    ]
    groups = split_metrics(results.metrics)
    for number, metrics in enumerate(groups, start=1):
        part = f" ({number} of {len(groups)})" if len(groups) > 1 else ""
        blocks.append(_ranking_table(results, metrics, mean, f"Mean over images with 95 % interval{part}"))
    styles = highlighted_styles(results.methods)
    charts = [intervals_chart(results.by_method(metric), styles) for metric in results.metrics]
    blocks.append(Charts(tuple(chart for chart in charts if chart is not None)))
    return Section("Ranking", blocks)


def split_metrics(metrics: Sequence[str]) -> list[Sequence[str]]:
    """Split metrics into as few tables as can be, of about the same width: five metrics are three and two."""
    width = math.ceil(len(metrics) / math.ceil(len(metrics) / METRICS_PER_TABLE)) if metrics else 1
    return [metrics[start : start + width] for start in range(0, len(metrics), width)]


def _in_plain_words(method: MethodSpec) -> str:
    """Return what a method does, for readers who know no formulas."""
    words = plain_words(method)
    return f"{words.title}: {words.sentence}"


@dataclass(frozen=True)
class Gap:
    """By how much the first method is better than the next one, or than random where it is the only one."""

    metric: str
    rival: str
    difference: float  # mean over images, more is better
    interval: tuple[float, float]  # 95 %; NaN with too few images
    p: float  # corrected for having picked the best; NaN against random, where the interval decides

    @property
    def certain(self) -> bool | None:
        """Return whether the difference is significant; None where there are too few images to say."""
        if math.isnan(self.interval[0]):
            return None
        return excludes_zero(self.interval) if math.isnan(self.p) else self.p < LEVEL


def first_gap(results: StudyResults) -> Gap | None:
    """Return the gap between the first method and the next by the key metric; None where one has no score."""
    best, *rivals = results.methods
    metric, rival = results.key_metric, rivals[0] if rivals else RANDOM
    if metric is None:
        return None
    score, rival_score = results.scores.get((best, metric)), results.scores.get((rival, metric))
    if score is None or rival_score is None:
        return None
    difference, interval = lead(score, rival_score)
    p = corrected_p_values(results, best, metric)[rival] if rivals and not math.isnan(interval[0]) else math.nan
    return Gap(metric, rival, difference, interval, p)


def _summary(results: StudyResults, mean: Mapping[str, float]) -> str:
    """Return which method is the best, and whether its difference to the next is significant."""
    best, *rivals = results.methods
    image_count = count_images(len(results.scores.predictions))
    if results.key_metric is None:
        return f"None of the metrics is defined on these {image_count}."
    if rivals:
        by = f"over {len(results.metrics)} metrics" if len(results.metrics) > 1 else f"by {results.key_metric}"
        rank = f"has the best mean rank of {len(results.methods)} methods ({mean[best]:.1f} {by})."
        text = f"On {image_count}, {best} {rank}"
    else:
        text = f"On {image_count}, {best} is the only method that was scored."
    gap = first_gap(results)
    if gap is None:
        return text
    low, high = gap.interval
    decimals = decimals_for((gap.difference, low, high), 2)
    side = "ahead of" if gap.difference >= 0 else "behind"
    text += f" By {gap.metric} it is {format_number(abs(gap.difference), decimals)} {side} {gap.rival}"
    if gap.certain is None:
        return f"{text}; with fewer than {FEWEST} images nothing says how sure that is."
    text += f", 95 % interval {' to '.join(format_interval(low, high, decimals))}"
    if rivals:
        text += f", p = {gap.p:.2g} corrected for having picked the best of {len(results.methods)}"
    return f"{text}{'' if gap.certain else ': no clear difference'}."


def corrected_p_values(results: StudyResults, best: str, metric: str) -> dict[str, float]:
    """Return the p-values of the best method against each other one, corrected for its selection on these images."""
    scores = results.by_method(metric)
    rivals = [method for method in results.methods if method != best and method in scores]
    differences = [leads(scores[best], scores[rival]) for rival in rivals]
    return dict(zip(rivals, stats.corrected_after_picking(differences), strict=True))


@dataclass(frozen=True, eq=False)
class _MetricColumn:
    """What the cells of one metric's column share."""

    metric: str
    scores: Mapping[str, Score]
    best: float  # mean; NaN where a single method has one
    decimals: int
    against_random: Mapping[str, tuple[str, float]]

    def cell(self, method: str) -> Cell:
        """Return the mean, its interval, and a mark where it is not better than random."""
        score = self.scores.get(method)
        if score is None or not score.n_valid:
            return Cell(UNDEFINED, "undefined" if score is not None else "not run")
        verdict, _ = self.against_random.get(method, ("", math.nan))
        low, high = score.interval
        detail = "" if math.isnan(low) else f"[{', '.join(format_interval(low, high, self.decimals))}]"
        detail += f" n = {score.n_valid}" if score.n_invalid else ""
        mark = {"unclear": f"\u00a0{UNCLEAR}", "worse": f"\u00a0{WORSE}"}.get(verdict, "")
        is_best = method not in BASELINES and score.mean == self.best
        return Cell(format_number(score.mean, self.decimals) + mark, detail.strip(), is_best, score.mean)

    def record(self, method: str, rank: float) -> dict[str, object]:
        """Return the numbers of a cell."""
        score = self.scores[method]
        low, high = score.interval
        verdict, p = self.against_random.get(method, (None, None))
        return {
            "method": score.method,
            "metric": score.metric,
            "better": score.better,
            "baseline": method in BASELINES,
            "mean": score.mean,
            "low": low,
            "high": high,
            "standard_error": score.standard_error,
            "n": score.n_valid,
            "n_invalid": score.n_invalid,
            "n_degenerate": score.n_degenerate,
            "mean_rank": rank,
            "against_random": verdict,
            "p_against_random": p,
        }


def _metric_column(results: StudyResults, metric: str) -> _MetricColumn:
    scores = results.by_method(metric)
    means = [scores[method].mean for method in results.methods if method in scores and scores[method].n_valid]
    best = (max if _better(scores) == "higher" else min)(means) if len(means) > 1 else math.nan
    decimals = decimals_for(score.mean for score in scores.values())
    return _MetricColumn(metric, scores, best, decimals, compare_with_random(scores))


def _better(scores: Mapping[str, Score]) -> str:
    return next(iter(scores.values())).better


def _ranking_table(results: StudyResults, metrics: Sequence[str], mean: Mapping[str, float], caption: str) -> Table:
    columns = [_metric_column(results, metric) for metric in metrics]
    rows, records = [], []
    for method in (*results.methods, *results.baselines):
        rank = mean.get(method, math.nan)
        rank_cell = Cell(UNDEFINED if math.isnan(rank) else f"{rank:.1f}", sort_key=rank)
        cells = (Cell(method), rank_cell, *(column.cell(method) for column in columns))
        rows.append(Row(cells, method in results.baselines))
        records += [results.record(**column.record(method, rank)) for column in columns if method in column.scores]
    headings = [
        Column(
            f"{column.metric}\u00a0{ARROWS[_better(column.scores)]}",
            note=results.specs.metric(column.metric).metric.family,
        )
        for column in columns
    ]
    notes = _ranking_notes(results, rows, columns)
    heads = (Column("method", number=False), Column("mean rank"), *headings)
    return Table("ranking", caption, heads, tuple(rows), tuple(records), tuple(notes))


def _ranking_notes(results: StudyResults, rows: Sequence[Row], columns: Sequence[_MetricColumn]) -> list[str]:
    """Return the explanations of arrows and marks, and what so few images cannot show."""
    notes = [
        "↑ higher is better, ↓ lower is better; the best of each metric is bold. Mean rank weighs all metrics alike."
    ]
    texts = [cell.text for row in rows for cell in row.cells]
    test = "p < 0.05 in a paired test, corrected for the methods of the column"
    if any(text.endswith(WORSE) for text in texts):
        notes.append(f"{WORSE} worse than random on the same images ({test}).")
    if any(text.endswith(UNCLEAR) for text in texts):
        notes.append(f"{UNCLEAR} not told apart from random on the same images (not {test}).")
    n = max((score.n_valid for column in columns for score in column.scores.values()), default=0)
    needed = fewest_values(len(results.methods))
    if n < FEWEST:
        notes.append(f"Intervals, and any claim, take {FEWEST} images or more; here are {n}.")
    if n < needed and RANDOM in results.baselines:
        notes.append(
            f"{count_images(n)} cannot tell {len(results.methods)} methods from random, whatever they score: that "
            f"takes {needed}."
        )
    return notes


def compare_with_random(scores: Mapping[str, Score]) -> dict[str, tuple[str, float]]:
    """Return 'better', 'worse' or 'unclear' than random, and the corrected p, of each method by one metric.

    Paired differences on the same images, `stats.corrected` over the methods.
    """
    random = scores.get(RANDOM)
    if random is None:
        return {}
    methods = [name for name in scores if name not in BASELINES]
    differences = [leads(scores[name], random) for name in methods]
    verdicts = {}
    for name, difference, p in zip(
        methods, differences, stats.corrected(differences, random.seed).tolist(), strict=True
    ):
        word = "unclear" if p >= LEVEL else "better" if difference.mean() > 0 else "worse"
        verdicts[name] = (word, p)
    return verdicts


# Radar and curves


def radar_section(results: StudyResults) -> Section:
    """Return the radar chart with the areas, or why there is none."""
    data = radar_data(results.scores, results.methods, list(map(results.specs.metric, results.metrics)))
    if isinstance(data, str):
        return Section("Radar", [Text(data)])
    arrows = {axis: ARROWS[results.scores[data.methods[0], axis].better] for axis in data.axes}
    axes = "FocusViT's four metrics" if data.focusvit else f"{len(data.axes)} metrics, not FocusViT's four"
    text = (
        f"Area under radar (AUR) over {axes}. The area depends on which methods are compared, on the order of the "
        "axes and on outliers, which flatten the rest of their axis: read it next to the ranking, never alone. "
        "Baselines are not among the methods."
    )
    if data.focusvit and arrows[data.axes[FOCUSVIT.index("sparseness")]] == ARROWS["higher"]:
        text += (
            " Sparseness is good when high here, and when low in FocusViT (preset=focusvit): areas do not compare with "
            "its table."
        )
    chart = radar_chart(data, arrows, highlighted_styles(results.methods))
    blocks: list[Block] = [Text(text), Charts((chart,)), _areas_table(results, data)]
    if data.left_out:
        blocks.append(Text(f"Without a score on one of the axes, so not in the chart: {', '.join(data.left_out)}."))
    return Section("Radar", blocks)


def _areas_table(results: StudyResults, data: RadarData) -> Table:
    best = float(data.areas.max())
    rows, records = [], []
    for row in sorted(range(len(data.methods)), key=lambda row: -data.areas[row]):
        method, area, r = data.methods[row], float(data.areas[row]), data.r[row].tolist()
        area_cell = Cell(format_number(area, 3), best=area == best, sort_key=area)
        rows.append(Row((Cell(method), area_cell, *(Cell(format_number(value, 2), sort_key=value) for value in r))))
        axes = dict(zip(data.axes, r, strict=True))
        records.append({**results.record(method=method, area_under_radar=area), **axes})
    columns = (Column("method", number=False), Column("AUR"), *(Column(axis) for axis in data.axes))
    caption = "Area under radar, and each axis from 0 (worst) to 1 (best)"
    return Table("radar", caption, columns, tuple(rows), tuple(records))


def curves_section(results: StudyResults) -> Section:
    """Return a chart per metric that is read off a curve."""
    styles = highlighted_styles(results.methods)
    charts = [curves_chart(results.by_method(metric), styles) for metric in results.metrics]
    available = tuple(chart for chart in charts if chart is not None)
    if not available:
        return Section("Curves", [Text("None of the metrics that were run is read off a curve.")])
    return Section("Curves", [Charts(available)])


# Classes


@dataclass(frozen=True, eq=False)
class _ClassGroups:
    """Images grouped by true class where it is known for all of them, else by predicted class."""

    by_image: Mapping[str, int]
    correct: Mapping[str, bool]
    true_classes: bool

    @property
    def indices(self) -> list[int]:
        """Return the classes, the one with most images first."""
        assigned = list(self.by_image.values())
        return sorted(set(assigned), key=lambda index: (-assigned.count(index), index))

    def images(self, index: int) -> list[str]:
        """Return the images of one class."""
        return [image for image, assigned in self.by_image.items() if assigned == index]

    def accuracy(self, index: int) -> float | None:
        """Return the share of correct predictions; None where the true classes are not known."""
        images = self.images(index)
        return sum(self.correct[image] for image in images) / len(images) if self.true_classes else None


def _class_groups(results: StudyResults) -> _ClassGroups:
    predictions = results.scores.predictions
    true_classes = all(prediction.label is not None for prediction in predictions)
    by_image = {
        prediction.image: prediction.predicted if prediction.label is None or not true_classes else prediction.label
        for prediction in predictions
    }
    return _ClassGroups(
        by_image,
        {prediction.image: prediction.predicted == prediction.label for prediction in predictions},
        true_classes,
    )


def classes_section(results: StudyResults) -> Section:
    """Return the means by class of the key metric, of the best methods and random."""
    metric = results.key_metric
    if metric is None:
        return Section("Classes", [Text("None of the metrics is defined on these images.")])
    groups, scores = _class_groups(results), results.by_method(metric)
    means = {method: class_means(score, groups.by_image) for method, score in scores.items()}
    listed = [method for method in scores if method in results.methods[:5] or method == RANDOM]
    decimals = decimals_for(means[method][index][0] for method in listed for index in groups.indices)
    rows, records = [], []
    for index in groups.indices:
        name, count, accuracy = results.class_name(index), len(groups.images(index)), groups.accuracy(index)
        cells = [Cell(name), Cell(str(count), sort_key=count)]
        cells += [] if accuracy is None else [Cell(f"{100 * accuracy:.0f} %", sort_key=accuracy)]
        cells += _class_cells({method: means[method][index][0] for method in listed}, _better(scores), decimals)
        rows.append(Row(tuple(cells)))
        for method, by_class in means.items():
            about = {"class": index, "name": name, "images": count, "accuracy": accuracy}
            mean, n = by_class[index]
            records.append(results.record(**about, metric=metric, method=method, mean=mean, n=n))
    kind = "true" if groups.true_classes else "predicted"
    columns = [Column(f"{kind} class", number=False), Column("images")]
    columns += [Column("accuracy")] * groups.true_classes + [Column(method) for method in listed]
    caption = f"Mean {metric} {ARROWS[_better(scores)]} by {kind} class"
    notes = _class_notes(groups, len(listed) < len(scores))
    table = Table("classes", caption, tuple(columns), tuple(rows[:MOST_CLASSES]), tuple(records), notes)
    return Section("Classes", [table])


def _class_cells(means: Mapping[str, float], better: str, decimals: int) -> list[Cell]:
    """Return the means of one class, the best of the methods in bold."""
    candidates = [mean for method, mean in means.items() if method != RANDOM and math.isfinite(mean)]
    best = (max if better == "higher" else min)(candidates) if len(candidates) > 1 else math.nan
    return [
        Cell(format_number(mean, decimals), best=mean == best and method != RANDOM, sort_key=mean)
        for method, mean in means.items()
    ]


def _class_notes(groups: _ClassGroups, more_methods: bool) -> tuple[str, ...]:
    count, notes = len(groups.indices), []
    if count > MOST_CLASSES:
        notes.append(f"The {MOST_CLASSES} classes with most images of {count}.")
    if not groups.true_classes:
        notes.append(
            "The true classes are not known (of all images), so images are grouped by what the model predicts."
        )
    if more_methods:
        notes.append("The methods with the best mean ranks, and random; --format csv has all.")
    return tuple(notes)


# Agreement


def agreement_section(results: StudyResults) -> Section:
    """Return Spearman's correlation over methods, for each pair of metrics."""
    title = "Agreement between metrics"
    if len(results.metrics) < 2 or len(results.methods) < 3:
        return Section(title, [Text("Agreement is between two metrics or more over three methods or more.")])
    matrix = agreement(results.scores, results.methods, results.metrics)
    rows, records = [], []
    for metric, line in zip(results.metrics, matrix.tolist(), strict=True):
        cells = [Cell(format_number(rho, 2), sort_key=rho, tint=0.0 if math.isnan(rho) else rho) for rho in line]
        rows.append(Row((Cell(metric), *cells)))
        for other, rho in zip(results.metrics, line, strict=True):
            records.append(results.record(metric=metric, other=other, spearman=rho))
    columns = (Column("metric", number=False), *(Column(metric) for metric in results.metrics))
    count = len(results.methods)
    note = (
        f"Spearman's correlation of the ranks of {count} methods (without baselines, where both are defined): 1 where "
        "two metrics order them alike, −1 where they order them the other way round."
    )
    few = ("With so few methods a correlation says little.",) if count < 6 else ()
    return Section(title, [Table("agreement", "Rank agreement", columns, tuple(rows), tuple(records), (note, *few))])


# Cost


def cost_section(results: StudyResults) -> Section:
    """Return the passes through the model and the seconds that maps and scores take."""
    return Section("Cost", [_method_costs(results), _metric_costs(results)])


def _method_costs(results: StudyResults) -> Table:
    """Return the cost of a map alone, as the method declares it, and of all its scores, as they were counted."""
    patches = max((int(score.settings.get("patches", 0)) for score in results.scores.values()), default=0)
    rows, records = [], []
    for method in (*results.methods, *results.baselines):
        map_cost = results.specs.method(method).cost_for(patches or USUAL_PATCHES)
        scoring = [score.cost for (other, _), score in results.scores.items() if other == method]
        passes = {word: getattr(map_cost, word) for word in PASSES}
        passes |= {f"scoring_{word}": sum(getattr(cost, word) for cost in scoring) for word in PASSES}
        seconds = sum(cost.seconds for cost in scoring)
        rows.append(Row((Cell(method), *_cost_cells(passes.values(), seconds)), method in results.baselines))
        records.append(results.record(what="method", name=method, seconds=seconds, **passes))
    columns = [Column(word, note=note) for note in ("one map", "scoring it") for word in PASSES]
    size = f"{patches} patches" if patches else f"{USUAL_PATCHES} patches (how many the model has is not in the store)"
    note = (
        f"One map: what a method takes alone, for an image of {size}. Scoring it: what all metrics together took for "
        "one map, as counted. What methods share is divided among them, in passes and in seconds."
    )
    heads = (Column("method", number=False), *columns, Column("time", note="all images"))
    return Table("cost", "Cost of the methods", heads, tuple(rows), tuple(records), (note,))


def _metric_costs(results: StudyResults) -> Table:
    rows, records = [], []
    for metric in results.metrics:
        costs: list[Cost] = [score.cost for (_, other), score in results.scores.items() if other == metric]
        passes = {word: max(getattr(cost, word) for cost in costs) for word in PASSES}
        seconds = sum(cost.seconds for cost in costs)
        rows.append(Row((Cell(metric), *_cost_cells(passes.values(), seconds))))
        records.append(results.record(what="metric", name=metric, seconds=seconds, **passes))
    columns = [Column(word, note="one map") for word in PASSES]
    heads = (Column("metric", number=False), *columns, Column("time", note="all maps"))
    return Table("cost", "Cost of the metrics", heads, tuple(rows), tuple(records))


def _cost_cells(passes: Iterable[int], seconds: float) -> list[Cell]:
    return [*(Cell(str(count), sort_key=count) for count in passes), Cell(format_seconds(seconds), sort_key=seconds)]
