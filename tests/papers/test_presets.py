"""The papers' printed numbers against themselves, by formulas written out here; every preset binds, its tables, claims
and efforts name what there is, and the claims are what the papers' own tables say.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from clairvit.errors import BadInput, UnknownName
from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.papers.checks import AREA, AXES, CHECKS, radar_areas
from clairvit.papers.paper import (
    EFFORTS,
    NAMES,
    Finding,
    Measure,
    Paper,
    check_effort,
    find_paper,
    list_papers,
)
from clairvit.papers.paper_file import read_paper

# FocusViT, Table 2 and 3, Flower, by method: faithfulness, sensitivity, sparseness, randomisation, area
FLOWER = {
    "LIME": (0.0006, 3.7378, 0.9987, 0.1854, 0.0163),
    "SHAP": (-0.0009, 13.3765, 0.3449, 0.0000, 1.1656),  # the sign is lost in print
    "LRP": (0.0323, 1.0035, 0.4348, 0.1265, 1.0342),
    "Grad-CAM": (0.0293, 1.0020, 0.5466, 0.1583, 0.7785),
    "Attention": (0.0216, 1.0004, 0.5056, 0.0016, 1.1859),
    "FocusViT": (0.0350, 1.0037, 0.1248, 0.0015, 1.9916),
}


def holding(findings: list[Finding], start: str) -> dict[str, bool]:
    holds = {entry.statement: entry.holds for entry in findings if entry.statement.startswith(start)}
    assert holds, f"nothing is said of '{start}'"
    return holds


# Of each row of the printed tables: once its first number, twice the second, … (from the papers' text, not from ours)
SUMS = {
    "Flower": (0.5345, 48.5335, 8.4561, 1.2151, 26.4432),
    "Dog": (0.2775, 150.6684, 11.6433, 5.3697, 23.0235),
    "MiT": (0.6717, 164.5228, 9.9282, 2.6236, 24.6415),
    "Caltech": (1.0878, 43.0533, 11.2498, 4.2689, 22.3737),
    "Pet": (0.6023, 102.5285, 10.7654, 2.6034, 28.3775),
    "11 images": (1.33791, 1.66209),
    "VOC 2012": (32.91, 53.41, 207.19, 49.5, 188.2),
    "14 images of VOC 2012": (833.27, 198.87, 595.97),
}


def test_no_digit_is_wrong() -> None:
    """Numbers that nothing follows from are kept as they are printed, too."""
    tables = {table.data: table for preset in list_papers() for table in preset.tables}
    assert set(tables) == set(SUMS)
    for data, sums in SUMS.items():
        rows = tables[data].values.values()
        totals = [sum(k * value for k, value in enumerate(row, 1)) for row in rows]
        assert totals == pytest.approx(sums, abs=6e-5), data


# FocusViT


def test_flower_areas_are_half_the_product_of_two_sums() -> None:
    """On four axes ½ Σ r_i r_{i+1} = ½ (r_1 + r_3)(r_2 + r_4)."""
    columns = list(zip(*FLOWER.values(), strict=True))

    def place(value: float, axis: int) -> float:
        share = (value - min(columns[axis])) / (max(columns[axis]) - min(columns[axis]))
        return share if axis == 0 else 1 - share

    computed = radar_areas(find_paper("focusvit").tables[0], lost_sign=True)
    for (name, row), area in zip(FLOWER.items(), computed, strict=True):
        r = [place(value, axis) for axis, value in enumerate(row[:4])]
        assert area == pytest.approx((r[0] + r[2]) * (r[1] + r[3]) / 2, abs=1e-12)
        assert (abs(area - row[4]) < 1e-4) == (name != "SHAP"), name


def test_flower_is_kept_as_it_is_printed() -> None:
    table = find_paper("focusvit").tables[0]
    measures = (*AXES, AREA)
    for name, row in FLOWER.items():
        assert [table.value(measure, name) for measure in measures] == [abs(value) for value in row]


def test_focusvit_areas_that_follow_and_that_do_not() -> None:
    findings = find_paper("focusvit").check()
    flower = [entry.holds for entry in findings if "on Flower follows" in entry.statement]
    assert flower == [True, False, True, True, True, True], "all but SHAP"
    assert set(holding(findings, "The same with SHAP's faithfulness as it is printed").values()) == {False}
    assert set(holding(findings, "AUR on ").values()) == {False}
    assert set(holding(findings, "FocusViT has the largest AUR").values()) == {True}, "printed and computed"
    computed = {table.data: radar_areas(table)[-1] for table in find_paper("focusvit").tables}
    expected = {"Dog": 1.5148, "MiT": 1.7836, "Caltech": 1.5266, "Pet": 1.8758}  # METRICS 1.5
    assert {data: round(computed[data], 4) for data in expected} == expected


def test_focusvit_areas_that_nothing_can_give() -> None:
    statements = [entry.statement for entry in find_paper("focusvit").check() if "any scaling" in entry.statement]
    assert [what.removeprefix("AUR of ").partition(" can")[0] for what in statements] == [
        *("SHAP on Flower", "SHAP on Dog", "Attention on Dog", "SHAP on MiT", "Grad-CAM on MiT"),
        *("SHAP on Caltech", "Attention on Caltech"),
    ]


def test_focusvit_reads_two_measures_the_wrong_way() -> None:
    findings = find_paper("focusvit").check()
    sensitivity, randomisation = findings[-2:]
    assert not sensitivity.holds
    assert not randomisation.holds
    tables = {table.data: table.values["Max-Sensitivity"][2:] for table in find_paper("focusvit").tables}
    near = sum(0.99 < value < 1.01 for row in tables.values() for value in row)
    assert near == 9
    assert "9 of 20 values are within 0.01 of 1" in sensitivity.numbers
    assert "Flower LIME, Dog Attention, MiT Grad-CAM, Caltech Attention, Pet LRP" in randomisation.numbers


def test_the_bound_is_reached_and_never_passed_by_areas_of_four_axes() -> None:
    """Of all polygons with places 0 and 1 in any order of the axes, those with so many zeros."""
    for zeros, spec in {0: 2.0, 1: 1.0, 2: 0.5}.items():
        rows = [row for row in itertools.product((0, 1), repeat=4) if row.count(0) == zeros]
        areas = [sum(row[k] * row[(k + 1) % 4] for k in range(4)) / 2 for row in rows]
        assert max(areas) == spec


# CMI, Coporan, Joita, SkipPLUS


def test_cmi_sums_and_means() -> None:
    paper = find_paper("cmi")
    (table,) = paper.tables
    assert len(table.images) == 11
    for name, printed in (("Attention Rollout", 0.382), ("Gradient Attention Rollout", 0.478)):
        fafs, bafs = (table.per_image[measure][name] for measure in ("FAF", "BAF"))
        assert len(fafs) == len(bafs) == 11
        for faf, baf in zip(fafs, bafs, strict=True):
            assert faf + baf == pytest.approx(1, abs=1e-12)
        assert f"{sum(fafs) / 11:.3f}" == f"{printed:.3f}" == f"{paper.printed['mean_faf'][name]:.3f}"
    assert all(finding.holds for finding in paper.check())
    assert len(paper.check()) == 5


def test_cmi_check_sees_a_wrong_digit() -> None:
    paper = find_paper("cmi")
    (table,) = paper.tables
    faf = table.per_image["FAF"]
    wrong = {**faf, "Attention Rollout": (0.209, *faf["Attention Rollout"][1:])}
    altered = replace(paper, tables=(replace(table, per_image={**table.per_image, "FAF": wrong}),))
    findings = altered.check()
    assert [finding.holds for finding in findings] == [False, True, False, True, True]
    assert "10 of 11" in findings[0].numbers


def test_coporan_bounds_and_counts() -> None:
    findings = find_paper("coporan").check()
    assert len(findings) == 7
    assert all(entry.holds for entry in findings)
    assert [entry.numbers for entry in findings if "pointing" in entry.statement] == [
        "641 of 1449 are 44.24 %",
        "1043 of 1449 are 71.98 %",
    ]
    # F1 of single images never has a larger mean than F1 of the mean Jaccard index, nor a smaller one than that index
    images = [0.0, 0.02, 0.1, 0.5, 0.93]
    mean = statistics.fmean(images)
    assert mean <= statistics.fmean(2 * j / (1 + j) for j in images) <= 2 * mean / (1 + mean)


def test_two_class_overlap_is_at_least_half_of_the_accuracy() -> None:
    """What excludes the mean of two classes for Coporan and Joita, by every way in which 100 pixels can be right."""
    for right in range(1, 100):
        wrong = 100 - right
        lowest = min((tp / (tp + wrong) + (right - tp) / (right - tp + wrong)) / 2 for tp in range(right + 1))
        assert lowest >= right / 200 - 1e-12


def test_joita_text_follows_from_its_table() -> None:
    findings = find_paper("joita").check()
    assert len(findings) == 5
    assert all(entry.holds for entry in findings)


def test_skipplus_has_every_base_in_three_forms() -> None:
    names = {entry.name: entry.method for entry in find_paper("skipplus").methods if not entry.extra}
    bases = [name for name in names if "∘" not in name and name != "Rollout"]
    assert len(bases) == 20
    for base in bases:
        assert {base, f"{base}∘PLUS", f"{base}∘SkipPLUS"} <= set(names)
        assert names[f"{base}∘SkipPLUS"].endswith("+skipplus")
        assert names[f"{base}∘PLUS"].endswith("+plus")
    assert names["AttIxG"] == "attcat+layer:0"
    assert names["AttIxG∘PLUS"] == "attcat+plus"
    assert all(entry.holds for entry in find_paper("skipplus").check())


def test_skipplus_prints_hundred_minus_x_for_two() -> None:
    written = {entry.name: entry.as_printed(0.25) for entry in find_paper("skipplus").measures}
    assert written == {
        "Deletion Accuracy": 75.0,
        "Deletion AOPC": 25.0,
        "Insertion Accuracy": 25.0,
        "Insertion AOPC": 75.0,
        "AP": 25.0,
    }
    assert {entry.better for entry in find_paper("skipplus").measures} == {"higher"}


# Every preset


@pytest.fixture(params=NAMES)
def preset(request: pytest.FixtureRequest) -> Paper:
    return find_paper(request.param)


def test_methods_and_metrics_exist(preset: Paper) -> None:
    for effort in EFFORTS:
        for entry in preset.methods:
            assert resolve_method(preset.at_effort(effort, entry.method)).text
        for measure in preset.measures:
            metric = resolve_metric(preset.at_effort(effort, measure.metric))
            assert metric.better == resolve_metric(measure.metric).better
    for method in preset.sweep:
        assert resolve_method(f"{method}+from:1").text


def test_no_method_or_measure_is_there_twice(preset: Paper) -> None:
    names, methods = (
        [entry.name for entry in preset.methods_and_baselines],
        [resolve_method(entry.method).text for entry in preset.methods_and_baselines],
    )
    assert len(set(names)) == len(names)
    assert len(set(methods)) == len(methods) - (preset.tune is not None), "one more starts where it is chosen"
    measures = [resolve_metric(entry.metric).text for entry in preset.measures]
    assert len(set(measures)) == len(measures)
    assert [entry.name for entry in preset.methods_and_baselines[-2:]] == ["random", "center"]


def test_tables_are_of_the_methods_and_measures(preset: Paper) -> None:
    method_names = tuple(entry.name for entry in preset.methods if not entry.extra)
    columns = {entry.name for entry in preset.measures} | {preset.area}
    assert bool(preset.tables) == (preset.name != "skipplus")
    for table in preset.tables:
        assert table.methods == tuple(name for name in method_names if name in table.methods)
        # Joita's code and its equation are two methods under one printed name: the printed numbers are the code's
        assert set(method_names) - set(table.methods) <= ({"LeGrad (equation)"} if preset.name == "joita" else set())
        assert set(table.values) <= columns
        assert table.source
        for measure, row in table.values.items():
            assert len(row) == len(table.methods), measure
            assert all(map(math.isfinite, row))
        assert math.isnan(table.value("no such measure", method_names[0]))
        assert math.isnan(table.value(next(iter(table.values)), "no such method"))


def test_efforts_change_what_is_there(preset: Paper) -> None:
    texts = {entry.method for entry in preset.methods} | {entry.metric for entry in preset.measures}
    for effort, changed in preset.efforts.items():
        assert effort in EFFORTS
        assert set(changed) <= texts
        assert all(preset.at_effort(effort, text) == less != text for text, less in changed.items())
    assert all(preset.at_effort("paper", text) == text for text in texts), "the paper's effort is the protocol itself"


def test_claims_name_methods_and_measures(preset: Paper) -> None:
    names = {entry.name for entry in preset.methods_and_baselines}
    columns = {entry.name for entry in preset.measures} | {preset.area}
    assert preset.claims
    for claim in preset.claims:
        assert claim.pairs
        assert {name for pair in claim.pairs for name in pair} <= names
        assert all(winner != loser for winner, loser in claim.pairs)
        assert set(claim.measures) <= columns


def test_claims_are_what_the_tables_say(preset: Paper) -> None:
    """A method that a claim calls better is better in print, by the direction of each measure; not all are printed."""
    better = {entry.name: entry.better for entry in preset.measures} | {preset.area: "higher"}
    for table in preset.tables:
        for claim in preset.claims:
            for (winner, loser), measure in itertools.product(claim.pairs, claim.measures):
                gap = table.value(measure, winner) - table.value(measure, loser)
                if preset.name == "joita" and not {winner, loser} <= set(table.methods):
                    continue  # the equation of LeGrad, and the usual order of the layers: our own rows
                assert gap > 0 if better[measure] == "higher" else gap < 0, (table.data, claim.statement, winner, loser)


def test_every_paper_says_what_differs(preset: Paper) -> None:
    for words in (
        preset.title,
        preset.citation,
        preset.models,
        preset.data,
        preset.images,
        preset.protocol,
        *preset.gaps,
    ):
        assert words
    assert len(preset.gaps) >= 4
    for finding in preset.check():
        assert finding.statement
        assert finding.source
        assert finding.numbers


def test_numbers_on_the_same_data_are_chosen() -> None:
    paper = find_paper("focusvit")
    for data, table in (("pets:/x", "Pet"), ("indoor67:/x", "MiT"), ("dogs:/x", "Dog"), ("folder:/x", "Flower")):
        chosen = paper.table_for(data)
        assert chosen is not None
        assert chosen.data == table
    assert find_paper("skipplus").table_for("pets:/x") is None


def test_directions_are_the_papers() -> None:
    assert [entry.better for entry in find_paper("focusvit").measures] == ["higher", "lower", "lower", "lower"]
    assert [entry.better for entry in find_paper("coporan").measures] == [
        "higher",
        "higher",
        "higher",
        "lower",
        "higher",
    ]
    assert Measure("x", "deletion", complement=True).better == "higher"


def test_confident_images_are_taken_for_all_but_the_pointing_game() -> None:
    assert [entry.min_confidence for entry in find_paper("coporan").measures] == [0.85, 0.85, 0.85, 0.85, None]


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'focusvit'"):
        find_paper("focusvti")
    with pytest.raises(UnknownName, match="focusvit, cmi, coporan, skipplus, joita"):
        find_paper("zzz")
    with pytest.raises(BadInput, match="quick, usual, paper"):
        check_effort("fast")
    assert [entry.name for entry in list_papers()] == list(NAMES)


TOY = """
name = "toy"
title = "Toy"
citation = "nobody"
models = "none"
data = "none"
images = "3"
protocol = "none"
methods = [{name = "A", method = "rollout"}, {name = "B", method = "genatt"}, {name = "C", method = "legrad"}]
measures = [{name = "overlap", metric = "iou"}]

[[tables]]
data = "here"
source = "Table 1"
methods = ["A", "B"]
images = ["x", "y"]
per_image = {overlap = {A = [0.25, 0.75], B = [1, 0.5]}}

[[claims]]
statement = "A is the best"
source = "text"
winners = ["A"]
losers = "others"
measures = ["overlap"]
"""


def test_a_paper_is_read_from_toml(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text(TOY, encoding="utf-8")
    paper = read_paper(tmp_path / "toy.toml")
    assert paper.tables[0].values == {"overlap": (0.5, 0.75)}, "means over images"
    assert paper.claims[0].pairs == (("A", "B"), ("A", "C"))
    (finding,) = paper.check()
    assert finding.statement == "A is the best (by the table on here)"
    assert not finding.holds
    assert finding.numbers == "0 of 1 printed comparisons; overlap: A is not better than B"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "toy"', 'nam = "toy"', "line 2: 'nam' is no key here. Did you mean 'name'?"),
        ('name = "toy"', "", "line 1: 'name' is missing in the file"),
        ('name = "toy"', 'name = "a b/c"', "line 2: 'a b/c' is no name of files"),
        ('name = "toy"', 'name = "all"', "line 2: its name is 'all', which stands for every paper"),
        ('metric = "iou"', "metric = 3", "line 10: 'metric' is 3: input should be a valid string."),
        ('metric = "iou"', 'metric = "iuo"', "line 10: There is no metric 'iuo'."),
        ('method = "genatt"', 'method = "gennatt"', "line 9: There is no method 'gennatt'."),
        (', metric = "iou"', "", "line 10: 'metric' is missing in a table of 'measures'"),
        ('methods = ["A", "B"]', 'methods = ["A", "D"]', "line 15: the table on here names 'D'"),
        ("[1, 0.5]", '[1, "x"]', "line 17: 'B' is"),
        ('measures = ["overlap"]', 'measures = ["accuracy"]', "line 24: 'A is the best' names 'accuracy', which"),
        ('winners = ["A"]', 'winners = ["Z"]', "line 22: 'A is the best' names 'Z', which the paper does not have"),
        ('winners = ["A"]', "winners = 5", "line 22: 'winners' is 5; expected a list"),
        ('winners = ["A"]', 'winer = ["A"]', "line 22: 'winer' is no key here. Did you mean 'winners'?"),
        ('images = "3"', 'images = "3"\nefforts = {fast = {}}', "line 8: 'fast' is no effort"),
        (
            'images = "3"',
            'images = "3"\nefforts = {quick = {ixg = "vanilla"}}',
            "line 8: effort 'quick' replaces 'ixg'",
        ),
        ('images = "3"', "images = ", "is not TOML: Invalid value (at line 7, column 10)."),
    ],
)
def test_a_paper_that_does_not_fit_together_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TOY
    (tmp_path / "toy.toml").write_text(TOY.replace(old, new), encoding="utf-8")
    with pytest.raises(BadInput, match=r"toy\.toml") as caught:
        read_paper(tmp_path / "toy.toml")
    assert words in str(caught.value)


def test_every_packaged_paper_has_checks() -> None:
    assert set(CHECKS) == set(NAMES)
