"""Check the documentation: lists are generated from the registries, examples run, links lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import typer

import clairvit
from clairvit.cli.app import app
from clairvit.cli.arguments import split_methods
from clairvit.methods.plain_language import plain_language
from clairvit.methods.registry import METHODS
from clairvit.models.image_files import read_image
from clairvit.papers.paper import list_papers
from clairvit.selection import choose
from helpers.executed_code import isolated, python_blocks, run_command, run_page, write_user_files
from helpers.page_setup import PAGES as SETUPS
from helpers.page_setup import PageSetup, photos
from helpers.tiny_models import wrapped

ROOT = Path(__file__).parent.parent
HISTORY = ("readers-test.md",)  # names files that were renamed
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["results", "results_tables"])
def test_generated_pages_are_up_to_date(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    importlib.import_module(f"generate_{name}").main()
    kept = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == kept, f"run: python docs/generate_{name}.py > docs/{name}.md"


def test_what_lists_methods_and_metrics_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, the count in README.md, and tests/registry.txt: what disappears from a registry must be seen."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    texts = importlib.import_module("generate_lists").texts()
    assert {"README.md", "docs/methods.md", "docs/metrics.md", "docs/papers.md", "tests/registry.txt"} == set(texts)
    for name, text in texts.items():
        assert text == (ROOT / name).read_text(encoding="utf-8"), f"{name}: run: make lists"


def test_figures_in_the_texts_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields such as {{mean pets lime ap}} are filled from docs/results/*.json; one that does not exist is an error."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    texts = importlib.import_module("results_text")
    run = {
        "scores": [{"method": "ixg", "metric": "ap", "mean": 0.12345}],
        "to_default": [{"method": "ixg", "metric": "ap", "gap": -0.0204, "interval": [-0.0391, 0.0002]}],
        "pairs": [{"better": "ixg", "worse": "cat", "metric": "ap", "gap": 0.5, "interval": [0.25, 0.75]}],
    }
    runs = {"pets": run}
    assert texts.field("mean", ["pets", "ixg", "ap"], runs) == "0.123"
    assert texts.field("gap", ["pets", "ixg", "ap"], runs) == "−0.020 [−0.039, 0.000]"
    assert texts.field("pair", ["pets", "ixg", "cat", "ap"], runs) == "+0.500 [0.250, 0.750]"
    with pytest.raises(KeyError):
        texts.field("mean", ["pets", "lime", "ap"], runs)
    with pytest.raises(ValueError, match="Unknown field"):
        texts.field("median", ["pets", "ixg", "ap"], runs)
    for page in ("results.md", "results_tables.md"):
        assert "{{" not in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_methods_are_added_to_kept_results_of_the_same_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/results/keep.py --add: what there is stays; another mean of the default is another run."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "results"))
    keep = importlib.import_module("keep")

    def run(**means: float) -> dict[str, Any]:
        rows = [{"method": method, "metric": "ap", "mean": mean} for method, mean in means.items()]
        gaps = [{"method": row["method"], "metric": "ap", "gap": 0.1} for row in rows if row["method"] != keep.DEFAULT]
        content = {"title": "a run", "images": 3, "pairs": [], "skipped": {}, "better": {"ap": "higher"}}
        return {**content, "scores": rows, "to_default": gaps}

    kept, more = run(**{keep.DEFAULT: 0.5, "ixg": 0.3}), run(**{keep.DEFAULT: 0.5004, "ixg": 0.9, "lime": 0.7})
    more["scores"].append({"method": "lime", "metric": "faf", "mean": 1.0})  # a metric that was not kept
    added = keep.with_methods_of(kept, more)
    assert added["scores"] == [*kept["scores"], {"method": "lime", "metric": "ap", "mean": 0.7}]
    assert [gap["method"] for gap in added["to_default"]] == ["ixg", "lime"]
    for other in (run(**{keep.DEFAULT: 0.51, "lime": 0.7}), run(lime=0.7), {**more, "images": 4}):
        with pytest.raises(SystemExit, match="not of the same images"):
            keep.with_methods_of(kept, other)


def test_insertion_minus_deletion_is_kept_as_it_would_be_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/results/keep.py: the difference of the two curves' areas, image by image, where it was not scored."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "results"))
    keep = importlib.import_module("keep")
    model = wrapped("timm-vit", torch.float64)
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    metrics = ["deletion", "insertion", "insertion-deletion"]
    scores = clairvit.evaluate(model, images, ["genatt", "ixg"], metrics).to_dict()["scores"]
    records = {(score["method"], score["metric"]): score for score in scores}
    expected = {key: records.pop(key) for key in list(records) if key[1] == "insertion-deletion"}
    added = keep.differences(records)
    assert added.keys() == expected.keys()
    assert len(added) == 2
    for key, record in added.items():
        assert record.keys() == expected[key].keys()
        assert record["values"] == pytest.approx(expected[key]["values"], abs=1e-12)
        for field in ("mean", "standard_error", "interval", "n_valid", "n_invalid", "better"):
            assert record[field] == pytest.approx(expected[key][field], abs=1e-12), field
    assert keep.differences(records | expected) == {}


def test_runs_on_different_images_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/results/keep.py: two halves of the photos give what all of them give."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "results"))
    keep = importlib.import_module("keep")
    model = wrapped("timm-vit", torch.float64)
    images = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(rows: range) -> dict[str, Any]:
        scores = clairvit.evaluate(model, images[rows.start : rows.stop], ["ixg", "genatt"], ["deletion", "sparseness"])
        return {**scores.to_dict(), "model": "tiny", "images": [f"{row}.png" for row in rows]}

    whole, halves = run(range(10)), [run(range(6)), run(range(6, 10))]
    joined = keep.of_all_images(halves)
    assert joined["images"] == whole["images"]
    for record, expected in zip(joined["scores"], whole["scores"], strict=True):
        assert record.keys() == expected.keys()
        assert record["values"] == pytest.approx(expected["values"], abs=1e-9)
        for field in ("mean", "standard_error", "interval", "n_valid", "n_invalid", "n_degenerate"):
            assert record[field] == pytest.approx(expected[field], abs=1e-9), field
    with pytest.raises(SystemExit, match="different methods"):
        keep.of_all_images([halves[0], {**halves[1], "model": "another"}])


def two_photos(folder: Path) -> None:
    """Save the demo photo twice, in two shapes."""
    folder.mkdir()
    for number, width in enumerate((225, 200)):
        read_image("demo").resize((width, 150)).save(folder / f"{number}.png")


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, the gallery's too but for what needs weights that do not come with the package; small models."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setattr(choose, "PANEL", ("rollout",))  # the whole of it takes minutes
    gallery = importlib.import_module("generate_gallery")
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) >= 2
    two_photos(tmp_path / "photos")
    with isolated(tmp_path) as names:
        names["my_module"] = timm.create_model("vit_tiny_patch16_224", num_classes=2, depth=2)
        names["my_names"] = ["a", "b"]
        exec("\n".join(blocks), names)
        for item in [item for item in gallery.ITEMS if item.language == "python" and not item.needs]:
            exec(item.code, {"cv": clairvit, "model": "scenes"} | (item.names() if item.names else {}))
    assert {path.stem for path in tmp_path.glob("*.png")} == {"why", "methods", "two", "alike", "other"}
    printed = capsys.readouterr().out
    assert re.findall(r"# (\('Bengal.*?\)): one", blocks[0])[0] in printed
    for pattern, unit in ((r"falls from (\d+) % to (\d+) %", 1.0), (r" (0\.\d\d)\S*; random (0\.\d\d)", 0.01)):
        (quoted,), (printed_output,) = re.findall(pattern, blocks[0]), re.findall(pattern, printed)
        for comment, value in zip(
            quoted, printed_output, strict=True
        ):  # both are rounded or cut: one unit of the last digit
            assert abs(float(comment) - float(value)) < 1.5 * unit, f"{comment} is said, {value} is printed"


def test_the_sentence_on_the_page_about_checks_is_what_is_printed() -> None:
    """Numbers are rounded to whole per cent, which another processor may round otherwise: one unit."""
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    quoted = " ".join(line.removeprefix("> ") for line in page.splitlines() if line.startswith("> "))
    printed = str(clairvit.explain("pets", "demo").check())
    numbers = re.compile(r"\d+(?= %)")
    assert numbers.sub("…", quoted) == numbers.sub("…", printed)
    for number_quoted, number_printed in zip(numbers.findall(quoted), numbers.findall(printed), strict=True):
        assert abs(int(number_quoted) - int(number_printed)) <= 1


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """All but the page, which runs until it is stopped (tests/web); in a folder with two photos, offline.

    The doctor looks at timm's smallest ViT instead of the one that the line names, which takes him seconds.
    """
    two_photos(tmp_path / "photos")
    lines = commands(ROOT / "README.md")
    assert {line.split()[1] for line in lines} >= {
        "explain",
        "compare",
        "evaluate",
        "doctor",
        "methods",
        "cite",
        "serve",
    }
    with isolated(tmp_path):
        for line in lines:
            if line != "clairvit serve":
                command = line.removeprefix("clairvit ").partition(" #")[0]
                run_command(command.replace("timm:vit_tiny_patch16_224", "timm:test_vit"))
    assert {path.name for path in (tmp_path / "maps").iterdir()} >= {"0-rollout_fusion=max.png"}
    assert any(path.name.endswith("-heads.png") for path in (tmp_path / "out").iterdir())


def test_the_gallery_is_that_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md and docs/gallery.md are up to date, every picture is there, and together they are small."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    gallery = importlib.import_module("generate_gallery")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert gallery.with_gallery(readme) == readme, "run: python docs/generate_gallery.py --texts"
    assert gallery.gallery_page() == (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "images" / "gallery").iterdir()}
    assert pictures.keys() == {item.name for item in gallery.ITEMS}
    assert sum(pictures.values()) <= 2_000_000
    assert len(readme.splitlines()) <= 180


def test_counts_in_the_readme_are_those_of_the_registries() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"by (\d+) methods", readme) == [str(len(METHODS))]
    papers = list_papers()
    (demo,) = re.findall(r"^DEMO := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    words = {5: "five", 15: "fifteen"}
    assert f"experiments of {words[len(papers)]} papers" in readme
    assert f"by {words[len(demo.split(','))]} methods, write out/demo.png" in readme


def commands(page: Path) -> list[str]:
    """Return the lines `clairvit …` of a page's code blocks, without comments; placeholders (…) are left out."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language in ("", "sh", "bash")]
    blocks += re.findall(r'<pre lang="sh">(.*?)</pre>', text)
    lines = [part.strip() for block in blocks for line in block.splitlines() for part in line.split(" && ")]
    return [line for line in lines if line.startswith("clairvit ") and "…" not in line.partition(" #")[0]]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_have_the_options_of_the_command_line(page: Path, tmp_path: Path) -> None:
    """Parse each command as the command line does, without running it, and the methods and metrics that it names."""
    group = typer.main.get_command(app)
    write_user_files(page, tmp_path)
    for line in commands(page):
        arguments = shlex.split(line, comments=True)[1:]
        with isolated(tmp_path), group.make_context("clairvit", list(arguments)) as context:
            name, command, rest = group.resolve_command(context, arguments)
            assert command is not None, line
            with command.make_context(name, rest, parent=context) as parsed:
                methods = parsed.params.get("method") or ()
                for method in split_methods(*methods) if methods else ():
                    stands_for_others = method == "all" or method.isupper() or method.endswith(".json")
                    assert stands_for_others or clairvit.parse_method(method), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    packages = "|".join(path.name for path in (ROOT / "src" / "clairvit").iterdir() if path.is_dir())
    for place in re.findall(rf"`((?:{packages})/[\w/]+\.(?:py|toml))", page.read_text(encoding="utf-8")):
        assert (ROOT / "src" / "clairvit" / place).exists(), f"{page.name} names {place}"
    for place in re.findall(r"`((?:tests|benchmarks|docs)/[\w/]+\.(?:py|md))", page.read_text(encoding="utf-8")):
        assert (ROOT / place).exists(), f"{page.name} names {place}"


def test_the_architecture_is_one_page_that_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "clairvit").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", text))
    assert len(text.splitlines()) <= 120
    assert text.count("](images/") == 1


def test_each_decision_is_one_line_with_a_link_to_its_code() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    records = text.partition("## Findings")[0].split("\n\n", 2)[2]
    for line in records.splitlines():
        assert not line or line.startswith(("## ", "* ")), f"expected a record of one line: {line}"
        if line.startswith("* "):
            assert "](../src/clairvit/" in line or "](../tests/" in line, f"expected a link to the code: {line}"
            assert len(re.sub(r"\]\([^)]*\)", "]", line)) <= 200, f"expected at most 200 characters: {line}"


def test_the_write_a_method_example_works(tmp_path: Path) -> None:
    """The file, its facts and the study of the page; each of its commands runs, but the server."""
    page = ROOT / "docs" / "write-a-method.md"
    write_user_files(page, tmp_path)
    photos(tmp_path, "photos/a.jpg", "photos/b.jpg")
    with isolated(tmp_path):
        for line in commands(page):
            if not line.startswith("clairvit serve"):
                chosen = " --model scenes" if line.startswith("clairvit choose") else ""  # many passes
                run_command(line.removeprefix("clairvit ") + chosen)
        ex = clairvit.explain("pets", "demo", "negative-attention+skipplus")
        assert ex.maps.shape == (1, 14, 14)
        assert ex.maps.min() >= 0
        assert ex.maps.any()
        assert plain_language("negative-attention").title == "Negative attention"
        assert "@misc{doe2026negative," in clairvit.cite("negative-attention")
        with pytest.raises(clairvit.errors.UnknownName, match="Did you mean 'negative-attention'"):
            clairvit.parse_method("negattn")
    assert (tmp_path / "maps").is_dir()
    assert (tmp_path / "study" / "store.json").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_examples_import_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clairvit"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cv":
                assert hasattr(clairvit, node.attr), f"cv.{node.attr}"


ELSEWHERE = ("gallery.md", "write-a-method.md")  # run by tests above
EXECUTED = [page.name for page in PAGES[1:] if python_blocks(page) and page.name not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_the_python_of_a_page_runs(name: str, tmp_path: Path) -> None:
    """From top to bottom, in an empty folder; what is the reader's own is made first (helpers/page_setup.py)."""
    run_page(ROOT / "docs" / name, tmp_path, SETUPS.get(name, PageSetup()))


def test_every_page_with_python_is_run() -> None:
    """A page is run because it has Python, not because somebody listed it; nothing is set up for pages without."""
    assert len(EXECUTED) >= 29
    assert set(SETUPS) <= set(EXECUTED)
    for page in PAGES:
        others = re.findall(r"^ *```(?!python\n)(py\w*|Python)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert others == [], f"{page.name}: a block that is Python under another name would not be run"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("howto-*.md")), ids=lambda page: page.stem)
def test_pages_by_task_are_short_and_name_pitfalls(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert "\n## Pitfalls\n" in text
    assert "\n## See also\n" in text


def test_known_issues_name_methods_and_metrics_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every issue has commands that parse and a picture of two sides that differ."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    issues = importlib.import_module("generate_known_issues").read_issues()
    page = (ROOT / "docs" / "known-issues-in-the-wild.md").read_text(encoding="utf-8")
    assert [issue.title for issue in issues] == re.findall(r"^## (.*)$", page, re.MULTILINE)
    pictures = {path.stem for path in (ROOT / "docs" / "images" / "issues").iterdir()}
    assert pictures == {issue.name for issue in issues}, "run: python docs/generate_known_issues.py --pictures"
    for issue in issues:
        maps = {(str(clairvit.parse_method(side.method)), side.target, side.score) for side in issue.sides}
        charts = {str(clairvit.parse_metric(chart.metric)) for chart in issue.charts}
        assert (len(maps), len(charts), issue.hook) in ((2, 0, None), (0, 2, None), (0, 0, "attn_drop")), issue.name
        commands = [*(part.command for part in (*issue.sides, *issue.charts)), *issue.commands]
        assert commands, issue.name
        for command in commands:
            assert command in page
            for metric in re.findall(r"--metric '?([^' ]+)'?", command):
                clairvit.parse_metric(metric)


def test_every_page_is_in_the_site_and_the_api_has_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("site_hooks")
    listed = {name for names in hooks.public_names().values() for name in names}
    modules = {name for name in clairvit.__all__ if isinstance(getattr(clairvit, name), ModuleType)}
    assert {name for name in listed if "." not in name} == set(clairvit.__all__) - modules - {"__version__"}
    documented = {id(functools.reduce(getattr, name.split("."), clairvit)) for name in listed}
    assert not [
        f"{module}.{name}"
        for module in modules
        for name in getattr(clairvit, module).__all__
        if id(getattr(getattr(clairvit, module), name)) not in documented
    ]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    listed_pages = set(re.findall(r"([\w-]+\.md)\s*$", navigation, re.MULTILINE))
    assert pages - listed_pages == set(), "pages that are missing in the navigation of mkdocs.yml"


def test_links_out_of_the_site_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    without = importlib.import_module("site_hooks").without_outer_links
    text = "see [the card](../src/x/README.md), [a page](methods.md) and [another](../docs/data.md#x)"
    assert without(text, ROOT / "docs") == "see the card, [a page](methods.md) and [another](../docs/data.md#x)"
