"""`clairvit bench` end to end: options and files, the plan, the table, queries, failures and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clairvit.bench.config import DataConfig, StudyConfig
from clairvit.bench.loggers import LOGGERS, FunctionLogger, run_logger
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.cli import main
from clairvit.cli.bench import StudyOptions, format_duration, progress_reporter
from clairvit.cli.options import DataOptions, ModelOptions
from helpers.small_study import ARCHITECTURE, photos, table, weights

Captured = pytest.CaptureFixture[str]
ARCH = ("--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}")
DATA = ("--data", "folder:photos")
QUICK = ("--method", "legrad,raw-attention", "--metric", "deletion(steps=3),sparseness")
USUAL = (*ARCH, *DATA, *QUICK, "--out", "store")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six photos and a tiny model in the working directory."""
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "tiny.safetensors")
    photos(tmp_path / "photos", 6)
    return tmp_path


def output_of(capsys: Captured, *arguments: str, status: int = 0) -> str:
    assert main(["bench", *arguments]) == status
    return capsys.readouterr().out


def answer(capsys: Captured, *arguments: str, status: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output_of(capsys, *arguments, "--json", status=status))
    assert (document["command"], bool(document["clairvit"])) == ("bench", True)
    return document


def refusal(capsys: Captured, *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    assert errors.count("\n") == 1, errors
    return errors


def file(**others: str) -> Path:
    """study.toml: what is usual, or other lines."""
    lines = {
        "models": f'[{{spec = "file:tiny.safetensors", arch = "timm:{ARCHITECTURE}"}}]',
        "data": '"folder:photos"',
        "methods": '["legrad", "raw-attention"]',
        "metrics": '["deletion(steps=3)", "sparseness"]',
        **others,
    }
    Path("study.toml").write_text("\n".join(f"{name} = {value}" for name, value in lines.items() if value))
    return Path("study.toml")


def test_the_plan_is_shown_and_nothing_is_done(capsys: Captured) -> None:
    shown = output_of(capsys, *USUAL, "--plan")
    assert "0 of 48 cells are done already; 1 unit to do, about " in shown
    assert not Path("store").exists()
    plan = answer(capsys, *USUAL, "--plan")["plan"]
    assert (plan["units"], plan["cells"], plan["done"]) == (1, 48, 0)
    (share,) = plan["shares"]
    assert (share["data"], share["images"], share["methods"], share["metrics"]) == ("folder:photos", 6, 4, 2)
    assert plan["forwards"] == share["forwards"] > 6


def test_a_study_is_run_shown_and_queried(capsys: Captured) -> None:
    shown = output_of(capsys, *USUAL)
    assert shown.index("The plan") < shown.index("6 images, file:tiny.safetensors") < shown.index("1 unit was computed")
    assert "legrad" in shown
    assert "random (baseline)" in shown
    again = output_of(capsys, *USUAL, "--plan")
    assert "48 of 48 cells are done already; nothing is left to do." in again

    sql = (
        "select method, count(*) n, avg(value) a, null b from results where metric = 'sparseness' group by 1 order by 1"
    )
    shown = output_of(capsys, "--out", "store", "--sql", sql)
    assert "4 rows" in shown
    assert "raw-attention" in shown
    document = answer(capsys, "--out", "store", "--sql", sql)
    assert document["columns"] == ["method", "n", "a", "b"]
    assert [row[:2] for row in document["rows"]] == [["center", 6], ["legrad", 6], ["random", 6], ["raw-attention", 6]]
    odd = answer(capsys, "--out", "store", "--sql", "select 'nan'::double, 1.5::decimal(3, 1), [1.0, 'inf'::double]")
    assert odd["rows"] == [[None, "1.5", [1.0, None]]]


def test_the_table_is_of_this_study_whatever_else_is_in_the_store(capsys: Captured) -> None:
    everything = answer(capsys, *USUAL)["results"][0]
    assert everything["images"] == [f"{n % 3}/{n:03}.png" for n in (0, 3, 1, 4, 2, 5)]
    few = answer(capsys, *ARCH, *DATA, "--out", "store", "--method", "legrad", "--metric", "sparseness", "--limit", "3")
    assert few["computed"] == 0
    (result,) = few["results"]
    assert len(result["images"]) == 3
    assert [(score["method"], score["baseline"]) for score in result["scores"]] == [
        ("legrad", False),
        ("random", True),
        ("center", True),
    ]
    (whole,) = (
        score for score in everything["scores"] if (score["method"], score["metric"]) == ("legrad", "sparseness")
    )
    values = dict(zip(everything["images"], whole["values"], strict=True))
    assert result["scores"][0]["values"] == [values[image] for image in result["images"]]


def test_a_file_says_the_same_as_options_and_options_win(capsys: Captured) -> None:
    first = answer(capsys, str(file()), "--out", "store")
    assert first["computed"] == 1
    assert answer(capsys, *USUAL)["computed"] == 0
    plan = answer(capsys, str(file(limit="3", seed="7")), "--out", "store", "--plan")["plan"]
    assert (plan["cells"], plan["done"]) == (24, 0)  # another seed
    plan = answer(capsys, str(file(limit="3", seed="7")), "--out", "store", "--seed", "0", "--plan")["plan"]
    assert (plan["cells"], plan["done"]) == (24, 24)
    options = ("--limit", "4", "--method", "legrad", "--metric", "complexity", "--maps", "abs")
    plan = answer(capsys, str(file(limit="3")), "--out", "store", *options, "--plan")["plan"]
    assert (plan["cells"], plan["done"]) == (12, 0)
    other = ("--model", "pets", "--data", "folder:photos/1,folder:photos/2")
    shares = answer(capsys, str(file()), "--out", "store", *other, "--plan")["plan"]["shares"]
    assert [(share["model"], share["data"], share["images"]) for share in shares] == [
        ("pets", "folder:photos/1", 2),
        ("pets", "folder:photos/2", 2),
    ]


def test_options_keep_the_other_keys_of_a_data_set_in_the_file() -> None:
    config = StudyConfig(data=(DataConfig("voc:PATH", limit=5, mask_kind="voc", void="object"),))
    (data,) = StudyOptions(data=DataOptions(limit=2), model_options=ModelOptions()).study(config).data
    assert data == DataConfig("voc:PATH", limit=2, mask_kind="voc", void="object")


def test_an_architecture_is_of_the_files_among_the_models(capsys: Captured) -> None:
    arguments = ("--model", "pets,file:tiny.safetensors", *ARCH[2:], *DATA, *QUICK, "--out", "store", "--plan")
    shares = answer(capsys, *arguments)["plan"]["shares"]
    assert [share["model"] for share in shares] == ["pets", "file:tiny.safetensors"]


def test_all_methods_are_those_that_are_not_slow(capsys: Captured) -> None:
    plan = answer(capsys, *ARCH, *DATA, "--out", "store", "--method", "all", "--metric", "sparseness", "--plan")["plan"]
    (share,) = plan["shares"]
    assert share["methods"] > 30


def test_a_unit_that_fails_is_named_and_the_next_run_tries_it_again(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Worker.rows

    def rows(self: Worker, unit: Any) -> Any:
        if 2 in unit.rows:
            raise RuntimeError("no memory")
        return usual(self, unit)

    arguments = (str(file(at_once="2")), "--out", "store")
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "rows", rows)
        assert main(["bench", *arguments]) == 2
        printed, errors = capsys.readouterr()
        assert "4 images, file:tiny.safetensors" in printed
        assert "1 of 3 could not be computed:" in errors
        assert "on folder:photos (1/001.png, 1/004.png): RuntimeError: no memory (test_bench.py, line " in errors
        (failed,) = answer(capsys, *arguments, status=2)["failed"]
        assert failed["error"].startswith("RuntimeError: no memory (test_bench.py, line ")
        assert failed["rows"] == [2, 3]
    assert answer(capsys, *arguments)["computed"] == 1


def test_what_is_left_out_is_reported(capsys: Captured) -> None:
    Path("photos/1/001.png").write_text("no picture")
    arguments = (*ARCH, *DATA, "--method", "legrad,cam", "--metric", "sparseness", "--out", "store")
    assert main(["bench", *arguments]) == 2
    shown, errors = capsys.readouterr()
    assert (
        "clairvit: 1 of 6 images could not be read and have no scores, file:tiny.safetensors on folder:photos: "
        in errors
    )
    assert "5 images, file:tiny.safetensors" in shown
    assert "Not read: 1/001.png. " in shown
    assert "Left out cam: 'cam' is defined for models whose head reads" in shown


def test_what_is_odd_about_a_folder_is_reported_once(home: Path, capsys: Captured) -> None:
    """Too few masks and too many, one of another size, a class without images: the rest is scored."""
    (home / "photos" / "empty").mkdir()
    (home / "masks").mkdir()
    for name, size in (("000", (32, 32)), ("001", (10, 7)), ("spare", (32, 32))):
        Image.new("L", size, 1).save(home / "masks" / f"{name}.png")
    arguments = (*ARCH, *DATA, "--method", "legrad", "--metric", "ap", "--masks", "masks", "--out", "store")
    assert main(["bench", *arguments]) == 2
    printed, errors = capsys.readouterr()
    for words in (
        "No images are in the class folder 'empty'.",
        "4 of 6 images have no mask in 'masks': '0/003.png'",
        "1 of 3 masks in 'masks' belong to no image: 'spare.png'.",
    ):
        assert errors.count(f"note: {words}") == 1, errors
    assert "Not read: 1/001.png. The mask 'masks/001.png' is 10 × 7 pixels and its image 32 × 32" in printed
    assert "n = 1" in printed  # one image has a score by masks
    shutil.rmtree(home / "masks")
    (home / "masks").mkdir()
    Image.new("L", (32, 32), 1).save(home / "masks" / "spare.png")
    assert "None of the 1 masks in 'masks' is called like one of the 6 images" in refusal(capsys, *arguments)


def test_images_of_which_none_can_be_read(home: Path, capsys: Captured) -> None:
    for photo in (home / "photos").rglob("*.png"):
        photo.write_text(f"no picture {photo.name}")
    assert main(["bench", *USUAL]) == 2
    printed, errors = capsys.readouterr()
    assert "No scores." in printed
    assert "None of the 6 images could be read; expected at least one that can. 0/000.png: " in errors
    assert main(["bench", *USUAL, "--quiet"]) == 2
    assert "None of the 6 images could be read" in capsys.readouterr().err


def test_one_unreadable_image_of_three_hundred_costs_only_itself(home: Path, capsys: Captured) -> None:
    shutil.rmtree(home / "photos")
    photos(home / "photos", 300)
    (home / "photos" / "2" / "200.png").write_text("no picture")
    arguments = (*ARCH, *DATA, "--method", "raw-attention", "--metric", "sparseness", "--out", "store")
    document = answer(capsys, *arguments, status=2)
    (result,) = document["results"]
    (failure,) = document["failed"]
    assert (failure["model"], failure["data"]) == ("file:tiny.safetensors", "folder:photos")
    assert failure["image"] == "2/200.png"
    assert "is not an image" in failure["error"]
    assert len(result["images"]) == 299
    (lost,) = result["failed"]
    assert lost["image"] == "2/200.png"
    assert "is not an image" in lost["error"]


def test_a_store_of_another_version_is_refused_and_left_alone(home: Path, capsys: Captured) -> None:
    output_of(capsys, *USUAL)
    about = home / "store" / "store.json"
    about.write_text(about.read_text().replace('"format": 1', '"format": 99'))
    before = {path: path.stat().st_mtime_ns for path in (home / "store").rglob("*")}
    for arguments in (USUAL, (*USUAL, "--plan"), ("--out", "store", "--sql", "select 1")):
        assert "has format 99" in refusal(capsys, *arguments)
    assert {path: path.stat().st_mtime_ns for path in (home / "store").rglob("*")} == before


def test_quiet_prints_nothing(capsys: Captured) -> None:
    assert main(["bench", *USUAL, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert len(Store.open("store").cells()) == 48


def test_a_damaged_part_is_named(capsys: Captured) -> None:
    output_of(capsys, *USUAL)
    (part,) = Path("store/parts").iterdir()
    part.write_bytes(part.read_bytes()[:100])
    assert main(["bench", *USUAL]) == 0
    printed, errors = capsys.readouterr()
    assert f"note: 'store/parts/{part.name}' is damaged" in errors
    assert "1 unit was computed" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ARCH, *DATA, *QUICK), "--out STORE"),
        ((*ARCH, *QUICK, "--out", "store"), "--data folder:PATH"),
        ((*USUAL, "--data", "fodler:photos"), "Did you mean 'folder'"),
        ((*USUAL, "--data", ","), "names nothing"),
        ((*USUAL, "--method", "legard"), "Did you mean 'legrad'"),
        ((*USUAL, "--metric", "deletoin"), "Did you mean 'deletion'"),
        ((*DATA, *QUICK, "--out", "store", "--arch", "timm:x"), "'pets' knows its own architecture"),
        ((*USUAL, "--target", "cat"), "expected 'label'"),
        ((*USUAL, "--maps", "ab"), "abs"),
        ((*USUAL, "--engine", "rya"), "Did you mean 'ray'"),
        ((*USUAL, "--address", "auto"), "--engine ray"),
        ((*USUAL, "--out", "photos"), "not empty and no store"),
        (("--out", "store", "--sql", "select 1"), "There is no store"),
        (("none.toml", "--out", "store"), "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(capsys: Captured, arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(capsys, *arguments)
    assert not Path("store").exists()


def test_mistakes_in_the_file_have_a_line(capsys: Captured) -> None:
    assert "study.toml, line 5: 'sede' is no key here. Did you mean 'seed'" in refusal(
        capsys, str(file(sede="3")), "--out", "store"
    )
    for key in ("methods", "metrics"):
        assert f"{key} = [] in the file names nothing" in refusal(capsys, str(file(**{key: "[]"})), "--out", "store")
    nothing = '[{spec = "folder:photos", limit = 0}]'
    assert "limit=0 was given" in refusal(capsys, str(file(data=nothing, limit="2")), "--out", "store")
    assert "--arch, --no-pretrained, --labels, --activation and preprocessing belong to --model" in refusal(
        capsys, str(file()), "--out", "store", "--arch", "timm:x"
    )


def test_a_wrong_query_says_what_there_is(capsys: Captured) -> None:
    output_of(capsys, *USUAL)
    assert "The table is 'results' with the columns unit, model" in refusal(
        capsys, "--out", "store", "--sql", "select valeu from results"
    )


@pytest.mark.ray
def test_ray_gives_the_same_table(home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, on a cluster that it begins and ends itself."""
    import ray

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    arguments = (str(file(at_once="2")), "--out")
    alone = answer(capsys, *arguments, "alone")
    document = answer(capsys, *arguments, "store", "--engine", "ray", "--workers", "1")
    assert (document["computed"], document["failed"]) == (3, [])
    values = [[score["values"] for score in run["results"][0]["scores"]] for run in (document, alone)]
    assert values[0] == values[1]
    assert table(Store.open("store")) == table(Store.open("alone"))
    assert not ray.is_initialized()
    assert answer(capsys, *arguments, "store", "--engine", "ray", "--workers", "1")["computed"] == 0
    message = refusal(capsys, *arguments, "new", "--engine", "ray", "--address", "127.0.0.1:1", "--quiet")
    assert "There is no Ray cluster at address '127.0.0.1:1'" in message


def test_ctrl_c_leaves_a_store_that_goes_on(home: Path, capsys: Captured) -> None:
    code = "import sys; from clairvit.cli import main; sys.exit(main())"
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    options = (str(file(at_once="1")), "--out", "store", "--method", "legrad,rise(samples=3000)", "--workers", "1")
    units = answer(capsys, *options[:-2], "--plan")["plan"]["units"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, "bench", *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    end = time.monotonic() + 100
    while not list(Path("store/parts").glob("*.parquet")) and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "clairvit: stopped; what was written until now is complete."
    assert "Traceback" not in errors
    assert [claim.name for claim in Path("store/claims").iterdir()] == ["store"]
    left = answer(capsys, *options[:-2], "--plan")["plan"]
    assert 0 < left["units"] < units
    assert left["done"] > 0


def test_progress_and_means_are_logged_and_parts_compacted(home: Path, capsys: Captured) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    with LOGGERS.restored():
        run_logger("fake")(lambda place: FunctionLogger(lambda *step: logged.append(step), lambda: None))
        output_of(capsys, *USUAL, "--log", "fake", "--quiet")
        assert "There is no logger 'fak'. Did you mean 'fake'" in refusal(capsys, *USUAL, "--log", "fak")
    assert [values["study/units"] for values, _ in logged[:-1]] == [float(step) for _, step in logged[:-1]] == [1.0]
    means = answer(capsys, "--out", "store", "--sql", "select method, avg(value) from results group by all")["rows"]
    assert len(means) == 4
    assert len(logged[-1][0]) == 8, "every method and baseline by every metric"
    assert json.loads(output_of(capsys, "--out", "store", "--compact", "--json"))["parts"] == 1


def test_a_log_says_now_and_then_how_far_it_is() -> None:
    heard: list[str] = []
    now = 100.0
    watch = progress_reporter(heard.append, lambda: now)
    for done, moment in ((0, 101.0), (1, 110.0), (2, 120.0), (4, 140.0), (9, 190.0), (10, 300.0)):
        now = moment
        watch("study", done, 10)
        watch("images", done, 10)
    assert heard == [
        "1 of 10 units, about 90 s left if the rest is as fast.",
        "4 of 10 units, about 60 s left if the rest is as fast.",
        "9 of 10 units, about 10 s left if the rest is as fast.",
    ]
    texts = [format_duration(seconds) for seconds in (0.4, 99, 100, 5999, 7200)]
    assert texts == [
        "0 s",
        "99 s",
        "2 min",
        "100 min",
        "2.0 h",
    ]


def test_a_study_at_a_url_goes_on_where_it_was(capsys: Captured) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    arguments = (*ARCH, *DATA, *QUICK, "--out", "memory://bucket/study")
    try:
        first = answer(capsys, *arguments)
        parts = memory.find("/bucket/study/parts")
        assert parts
        assert not any(path.endswith((".tmp", ".lock")) for path in memory.find("/bucket/study"))
        again = answer(capsys, *arguments)
        assert memory.find("/bucket/study/parts") == parts
        assert again["results"] == first["results"]
        counted = output_of(capsys, "--out", "memory://bucket/study", "--sql", "select count(*) from results")
        assert "0" not in counted.split()
    finally:
        memory.store.clear()
