"""`clairvit report`: files under the names that were asked for, numbers for machines, and clear refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.bench.store import Store
from clairvit.cli import main
from helpers.small_report import MODEL, Reader, dataset, run, study_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run(
        tmp_path_factory.mktemp("cli") / "run", study_of(("legrad", "rollout", "genatt"), ("sparseness", "deletion"))
    )


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study's model and images can be loaded."""
    monkeypatch.setattr(ModelConfig, "load", lambda config, device=None: MODEL)
    monkeypatch.setattr(DataConfig, "open", lambda config, seed: dataset())


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    assert "clairvit report" in capsys.readouterr().out.split("Examples")[1]


@pytest.mark.usefixtures("at_hand")
def test_one_page_is_written(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pages" / "v1.2.html"
    assert main(["report", str(store.path), "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"Wrote {file}\n"
    assert [path.name for path in file.parent.iterdir()] == ["v1.2.html"]
    page = Reader(file.read_text(encoding="utf-8"))
    assert page.all("img")
    assert "legrad" in page.section("Ranking")


@pytest.mark.usefixtures("at_hand")
def test_all_formats_have_the_same_numbers(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["report", str(store.path), "--out", str(tmp_path / "r.html"), "--format", "html,md,csv", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    files = {Path(file).name for file in document["files"]}
    assert files == {path.name for path in tmp_path.iterdir()}
    assert {"r.html", "r.md", "r-ranking.csv", "r-classes.csv", "r-agreement.csv", "r-cost.csv"} <= files
    with (tmp_path / "r-ranking.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["mean"]) for row in rows] == [record["mean"] for record in document["tables"]["ranking"]]
    assert "| legrad |" in (tmp_path / "r.md").read_text(encoding="utf-8")
    assert document["command"] == "report"
    assert document["store"] == str(store.path)


def test_what_out_ends_in_decides_and_a_folder_gets_report_html(store: Store, tmp_path: Path) -> None:
    assert main(["report", str(store.path), "--no-gallery", "--quiet", "--out", str(tmp_path / "x.md")]) == 0
    assert (tmp_path / "x.md").read_text(encoding="utf-8").startswith("# ")
    assert main(["report", str(store.path), "--no-gallery", "--quiet", "--out", f"{tmp_path}/new/"]) == 0
    assert (tmp_path / "new" / "report.html").exists()


def test_a_report_without_images_is_still_a_report(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clairvit.errors import BadInput

    def lost(config: DataConfig, seed: int) -> object:
        raise BadInput("There is no folder 'photos'.")

    monkeypatch.setattr(ModelConfig, "load", lambda config, device=None: MODEL)
    monkeypatch.setattr(DataConfig, "open", lost)
    assert main(["report", str(store.path), "--quiet", "--out", str(tmp_path / "r.html")]) == 0
    page = Reader((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "There is no folder 'photos'." in page.section("Examples")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--format", "htlm"], "There is no format 'htlm'; expected html, md, csv. Did you mean 'html'"),
        (["--format", ","], "No format was given; write e.g. --format html,csv."),
        (["--out", "r.docx"], "ends in '.docx'; write to a name that ends in .html, .md or .csv"),
    ],
)
def test_what_cannot_be_written_is_refused(
    store: Store, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(store.path), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert f"There is no store in '{tmp_path}'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_empty_store_has_a_page_but_no_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store.open(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.csv")]) == 2
    assert "no results yet" in capsys.readouterr().err
