"""BibTeX: every method and metric has entries, they parse, and what a spec is made of is cited."""

from __future__ import annotations

import json
import re

import pytest

import clairvit as cv
from clairvit._facts import entries_of
from clairvit.citations import OURS, bibtex, citation_keys, references
from clairvit.cli import main
from clairvit.methods.registry import COMBINATORS, METHODS
from clairvit.metrics.registry import METRICS

REQUIRED = {  # what BibTeX's standard styles ask for
    "article": {"author", "title", "journal", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "book": {"author", "title", "publisher", "year"},
    "techreport": {"author", "title", "institution"},
    "misc": {"author", "title", "year"},
    "software": {"author", "title", "year"},
}


def parse_bibtex(text: str) -> dict[str, dict[str, str]]:
    """Return key -> fields, reading braces one by one; text between entries is a comment, as in BibTeX."""
    entries: dict[str, dict[str, str]] = {}
    position = 0
    while match := re.compile(r"@(\w+)\{([\w-]+),").search(text, position):
        assert match[2] not in entries, "each key once"
        fields = {"type": match[1]}
        position = match.end()
        while field := re.compile(r"\s*(\w+) = \{").match(text, position):
            depth, end = 1, field.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            fields[field[1]] = text[field.end() : end - 1]
            assert text[end] == ","
            position = end + 1
        close = re.compile(r"\s*\}").match(text, position)
        assert close, text[position : position + 40]
        position = close.end()
        entries[match[2]] = fields
    return entries


@pytest.mark.parametrize("key", sorted(references()))
def test_every_entry_parses_and_has_the_fields_of_its_kind(key: str) -> None:
    (fields,) = parse_bibtex(bibtex(key)).values()
    assert REQUIRED[fields["type"]] <= set(fields)
    assert re.fullmatch(r"\{[^{}]+\}", fields["title"]), "capitals are kept"
    assert not re.search(r"[#%&_~^$]", fields["author"] + fields["title"]), (
        "characters that LaTeX would read as commands"
    )
    if "year" in fields:
        assert 1900 <= int(fields["year"]) <= 2026
    if "eprint" in fields:
        assert re.fullmatch(r"\d{4}\.\d{4,5}", fields["eprint"])
        assert fields["archiveprefix"] == "arXiv"
    if "others" not in fields["author"] and "{" not in fields["author"]:
        assert all("," in author or author == "contributors" for author in fields["author"].split(" and "))


@pytest.mark.parametrize("name", METHODS.names)
def test_every_method_has_an_entry(name: str) -> None:
    keys = citation_keys(cv.parse_method(name))
    assert keys, f"add references to '{name}' in the file beside its module"
    assert list(parse_bibtex(cv.cite(name))) == list(keys)


@pytest.mark.parametrize("name", METRICS.names)
def test_every_metric_has_an_entry(name: str) -> None:
    keys = citation_keys(cv.parse_metric(name))
    assert keys, f"add references to '{name}' in the file beside its module"
    assert list(parse_bibtex(cv.cite(name))) == list(keys)


def test_years_agree_with_what_the_registry_says() -> None:
    """Where a registered paper names a year, one of the entries has it."""
    registered = {m.name: m.paper for m in METHODS.values()} | {m.name: m.paper for m in METRICS.values()}
    for name, paper in registered.items():
        years = set(re.findall(r"(?<!\.)\b(?:19|20)\d\d\b", paper))
        cited = {str(references()[key].get("year")) for key in citation_keys(_spec(name))}
        assert not years or years & cited, f"{name}: the registry says {paper}, the entries are of {sorted(cited)}"


def _spec(name: str) -> cv.extend.MethodSpec | cv.extend.MetricSpec:
    return cv.parse_method(name) if name in METHODS else cv.parse_metric(name)


def test_facts_name_only_what_exists() -> None:
    methods, metrics = entries_of("clairvit.methods"), entries_of("clairvit.metrics")
    added = {name for name in methods if name[0] == "+" or "=" in name}
    combined = {name for name in methods if "+" in name} - added
    assert set(methods) - added - combined == {*METHODS.names, "smooth", "shift", "ensemble", "refine", "calibrated"}
    assert set(metrics) == set(METRICS.names)
    assert {name for name in added if name[0] == "+"} == {f"+{name.partition(':')[0]}" for name in COMBINATORS}
    assert all(_has_value(*name.split("=")) for name in added if "=" in name)
    assert all(str(cv.parse_method(name)) == name for name in combined)
    keys = {key for facts in (*methods.values(), *metrics.values()) for key in facts.references}
    assert keys == set(references()), "no unknown key, no unused reference"
    assert not set(METHODS.names) & set(METRICS.names), "a name says which of the two it is"


def _has_value(option: str, value: str) -> bool:
    """Return whether a method has an option that takes this value."""
    names = [method.name for method in METHODS.values() if option in method.options]
    return any(dict(cv.parse_method(name, **{option: value}).options)[option] == value for name in names)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("genatt+skipplus", ["chefer2021generic", "mehri2024skipplus"]),
        ("ixg+layer:3", ["shrikumar2016not"]),
        ("raw-attention+rollout", ["chefer2021transformer", "abnar2020quantifying"]),
        ("genatt(rules=libra)", ["chefer2021generic", "mehri2025libragrad"]),
        ("smooth(genatt+plus)", ["smilkov2017smoothgrad", "chefer2021generic", "mehri2024skipplus"]),
        ("ensemble(genatt, legrad)", [OURS, "chefer2021generic", "bousselham2025legrad"]),
        ("deletion(preset=rise)", ["petsiuk2018rise"]),
    ],
)
def test_what_a_spec_is_made_of_is_cited(name: str, keys: list[str]) -> None:
    assert list(parse_bibtex(cv.cite(name))) == keys


def test_a_reference_is_printed_once_with_all_that_it_is_cited_for() -> None:
    text = cv.cite("rollout", "attention-flow", "rise", "deletion", "rollout")
    assert list(parse_bibtex(text)) == ["abnar2020quantifying", "petsiuk2018rise"]
    assert text.startswith("% rollout, attention-flow\n")
    assert "% rise, deletion\n" in text


def test_without_names_clairvit_itself_is_cited() -> None:
    (fields,) = parse_bibtex(cv.cite()).values()
    assert fields["version"] == cv.__version__


def test_unknown_names_and_other_things_are_refused() -> None:
    with pytest.raises(
        cv.errors.UnknownName, match=r"There is no method or metric 'gennatt'\. Did you mean 'genatt'\?"
    ):
        cv.cite("gennatt")
    with pytest.raises(cv.errors.UnknownName, match="has no option 'colour'"):
        cv.cite("genatt(colour=red)")
    with pytest.raises(cv.errors.BadInput, match="3 cannot be cited; expected a method or metric"):
        cv.cite(3)  # type: ignore[arg-type]
    with METHODS.restored():
        cv.method("mine-too", paper="Me, 2026", output="image")(_user_method)
        with pytest.raises(
            cv.errors.UnknownName, match=r"'mine-too' has no BibTeX entry.* names its source as: Me, 2026"
        ):
            cv.cite("mine-too")


def _user_method(trace: cv.Trace) -> object:
    """Return nothing: only its name is used."""


def test_the_command_prints_bibtex_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cite", "genatt+skipplus", "deletion"]) == 0
    assert capsys.readouterr().out.strip() == cv.cite("genatt+skipplus", "deletion")
    assert main(["cite", "genatt", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["key"] == "chefer2021generic"
    assert record["cited_for"] == ["genatt"]
    assert parse_bibtex(record["bibtex"])
    assert main(["cite", "gennatt"]) == 2
    captured = capsys.readouterr()
    assert "Did you mean 'genatt'?" in captured.err
    assert "Traceback" not in captured.err
