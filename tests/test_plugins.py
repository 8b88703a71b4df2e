"""Methods and metrics of others: modules beside ours, installed packages with entry points, imported files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from helpers.other_packages import FACTS, METHOD, METRIC, METRIC_FACTS, answers_of, write_package

# Everything that lists, finds or describes a method or metric, asked in a new process
EVERYWHERE = """
import contextlib, io, sys
import clairvit as cv
from clairvit.cli import main
from clairvit.methods.plain_language import plain_words
from clairvit.metrics.registry import find_metric
from clairvit.web.state import methods_response

sys.path.insert(0, DOCS)
import generate_lists

def printed(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(list(arguments)) == 0
    return text.getvalue()

texts = generate_lists.texts()
card = next(card for card in methods_response().methods if card.name == "token-length")
try:
    cv.parse_method("activation-norm")
except cv.errors.UnknownName as error:
    suggestion = str(error)
from helpers.method_conditions import METHODS
answer = {
    "listed": [name for name in (*cv.list_methods(), *cv.list_metrics()) if name in ("token-length", "peak-share")],
    "parsed": [str(cv.parse_method("token-length(power=2)+last")), str(cv.parse_metric("peak-share(power=2)"))],
    "command": printed("methods", "token-length") + printed("metrics", "peak-share"),
    "cited": printed("cite", "token-length+last", "peak-share"),
    "sections": [f"`{name}`" in texts[page] for name, page in
        (("token-length", "docs/methods.md"), ("peak-share", "docs/metrics.md"), ("token-length", "docs/papers.md"))],
    "count": f"by {len(cv.list_methods())} methods" in texts["README.md"],
    "snapshot": [line for line in texts["tests/registry.txt"].splitlines() if "token-length" in line],
    "card": [card.title, card.sentence, card.also, card.paper],
    "words": plain_words(cv.parse_method("token-length+last")).title,
    "suggestion": suggestion,
    "swept": "token-length" in METHODS,
    "discrepancies": find_metric("peak-share").discrepancies,
    "map": list(cv.explain("pets", "demo", "token-length+last").maps.shape),
}
"""
DOCS = str(Path(__file__).parent.parent / "docs")


def check(answer: dict[str, Any]) -> None:
    """Check that the method and the metric are everywhere, with their facts."""
    assert answer["listed"] == ["token-length", "peak-share"]
    assert answer["parsed"] == ["token-length(power=2.0)+last", "peak-share(power=2.0)"]
    assert "The paper squares the lengths." in answer["command"]
    assert "The paper leaves the border out." in answer["command"]
    assert [line for line in answer["cited"].splitlines() if line.startswith("@")] == [
        "@misc{doe2026lengths,",
        "@inproceedings{abnar2020quantifying,",
    ]
    assert answer["sections"] == [True, True, True]
    assert answer["count"]
    assert answer["snapshot"] == ["method  token-length  custom  tokens  class-agnostic  unsigned"]
    assert answer["card"] == [
        "Length of tokens",
        "Shows which parts have long vectors.",
        ["norm of activations"],
        "Doe, 2026",
    ]
    assert answer["words"] == "Length of tokens, last layer"
    assert "Did you mean 'token-length'" in answer["suggestion"]
    assert answer["swept"]
    assert answer["discrepancies"] == "The paper leaves the border out."
    assert answer["map"] == [1, 14, 14]


def test_an_installed_package_is_everywhere(tmp_path: Path) -> None:
    files = {"maps.py": METHOD, "maps.toml": FACTS, "scores.py": METRIC, "scores.toml": METRIC_FACTS}
    write_package(tmp_path, "lengths", files, methods="maps", metrics="scores")
    check(answers_of(f"DOCS = {DOCS!r}\n{EVERYWHERE}", tmp_path)[0])


def test_a_module_with_facts_beside_it_is_all_that_a_new_method_needs(tmp_path: Path) -> None:
    """A file of code and a file of facts in the folder of a package of ours; the method has its last place in lists."""
    for folder, name, code, facts in (("m", "lengths", METHOD, FACTS), ("s", "shares", METRIC, METRIC_FACTS)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(code, encoding="utf-8")
        (tmp_path / folder / f"{name}.toml").write_text(facts, encoding="utf-8")
    (tmp_path / "m" / "unlisted.py").write_text("raise ImportError('a module without facts is not imported')")
    code = f"""
import clairvit.methods, clairvit.metrics
clairvit.methods.__path__.append({str(tmp_path / "m")!r})
clairvit.metrics.__path__.append({str(tmp_path / "s")!r})
DOCS = {DOCS!r}
{EVERYWHERE}
"""
    check(answers_of(code, tmp_path)[0])


LISTS = """
import warnings
import clairvit as cv
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = cv.list_methods(), cv.list_metrics()
answer = {"count": [len(listed) for listed in names], "others": [
    name for listed in names for name in listed if name in ("token-length", "peak-share", "early")
], "warnings": [str(warning.message) for warning in caught if issubclass(warning.category, cv.ClairWarning)]}
"""
EARLY = METHOD.replace("token-length", "early")


@functools.cache
def answer_without_packages() -> Any:
    return answers_of(LISTS)[0]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        (f"{EARLY}\n1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: "),
        (
            EARLY + METHOD.replace("token-length", "rollout"),
            "There is a built-in method 'rollout'; expected another name, such as 'my-rollout'. overwrite=True",
        ),
        (EARLY + METHOD, "There is a method 'token-length' of the package 'lengths'; expected another name"),
    ],
    ids=["missing module", "raises", "syntax", "built-in name", "name of another package"],
)
def test_a_broken_package_is_one_warning_and_the_rest_goes_on(tmp_path: Path, broken: str, reason: str) -> None:
    """Nothing of it stays registered, not even what it registered before it failed."""
    plain = answer_without_packages()
    write_package(tmp_path / "a", "lengths", {"maps.py": METHOD}, methods="maps")
    write_package(tmp_path / "b", "spoilt", {"maps.py": broken}, methods="maps", metrics="maps")
    write_package(tmp_path / "c", "shares", {"scores.py": METRIC}, metrics="scores")
    answer, _ = answers_of(LISTS, *(tmp_path / name for name in "abc"))
    assert answer["others"] == ["token-length", "peak-share"]
    assert answer["count"] == [count + 1 for count in plain["count"]]
    (warning,) = answer["warnings"]
    assert warning.startswith("The methods and metrics of the package 'spoilt' are left out")
    assert reason in warning


def test_packages_are_not_imported_by_an_import_of_ours(tmp_path: Path) -> None:
    write_package(tmp_path, "lengths", {"maps.py": METHOD}, methods="maps")
    code = """
import sys
import clairvit, clairvit.registry
before = "lengths.maps" in sys.modules
clairvit.list_metrics()
between = "lengths.maps" in sys.modules
clairvit.list_methods()
answer = [before, between, "lengths.maps" in sys.modules]
"""
    assert answers_of(code, tmp_path)[0] == [False, False, True]


def test_threads_that_ask_at_once_get_every_method(tmp_path: Path) -> None:
    write_package(tmp_path, "lengths", {"maps.py": f"import time\ntime.sleep(0.2)\n{METHOD}"}, methods="maps")
    code = """
import clairvit as cv
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    lists = list(pool.map(lambda _: cv.list_methods(), range(4)))
answer = ["token-length" in listed for listed in lists]
"""
    assert answers_of(code, tmp_path)[0] == [True] * 4


def test_the_code_of_an_installed_package_is_part_of_what_it_computes(tmp_path: Path) -> None:
    """Also what its other modules define; the facts of a method change no number."""
    method = METHOD.replace("layer.x", "halved(layer.x)").replace(
        "import clairvit", "from .sums import halved\nimport clairvit"
    )
    codes = []
    for place, (half, facts) in enumerate((("x / 2", FACTS), ("x / 2", ""), ("x / 3", FACTS))):
        files = {"maps.py": method, "maps.toml": facts, "sums.py": f"def halved(x):\n    return {half}\n"}
        write_package(tmp_path / str(place), "lengths", files, methods="maps")
        code = "from clairvit.metrics.own_code import codes_of\nanswer = codes_of(['token-length', 'rollout'], [])"
        codes.append(answers_of(code, tmp_path / str(place))[0][0])
    assert [[text for text, _ in pairs] for pairs in codes] == [["token-length"]] * 3
    assert codes[0] == codes[1] != codes[2]
