"""Optional packages: a missing one is one sentence with the command that installs it, and the core needs none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
import typer
from PIL import Image

from clairvit.cli.app import app

OPTIONAL = (
    *("pyarrow", "duckdb", "skimage", "tifffile", "imageio", "pandas", "h5py", "datasets", "ray"),
    *("transformers", "open_clip", "fastapi", "uvicorn", "starlette", "multipart", "pillow_heif", "pycocotools"),
    *("captum", "quantus", "pytorch_grad_cam", "lightning", "pytorch_lightning", "torchmetrics", "wandb", "mlflow"),
)
THROUGH_TORCH = ("jinja2", "filelock", "fsspec")  # torch has these, and imports them itself
STUDY = ("pyarrow", "duckdb", "jinja2", "filelock")
SCENES = ("--data", "scenes", "--model", "scenes", "--limit", "1", "--method", "saliency")
# (packages of which each alone is missing, command, what the message advises)
ENTRIES: list[tuple[Sequence[str], tuple[str, ...], str]] = [
    (STUDY, ("bench", *SCENES, "--metric", "deletion", "--out", "store"), '"clairvit[study]"'),
    (STUDY, ("bench", "--out", "store", "--sql", "select 1"), '"clairvit[study]"'),
    (STUDY, ("bench", "--out", "store", "--merge", "other"), '"clairvit[study]"'),
    (STUDY, ("bench", "--out", "store", "--compact"), '"clairvit[study]"'),
    (STUDY, ("report", "store"), '"clairvit[study]"'),
    (STUDY, ("reproduce", "cmi", "--data", "scenes", "--model", "scenes"), '"clairvit[study]"'),
    (("pyarrow",), ("evaluate", "--data", "parquet:images.parquet", "--method", "saliency"), '"clairvit[study]"'),
    (("datasets",), ("evaluate", "--data", "hfds:a/b:train", "--method", "saliency"), "datasets"),
    (("h5py",), ("evaluate", "--data", "imagenet-seg:.", "--method", "saliency"), "h5py"),
    (("skimage",), ("explain", "demo", "--method", "lime(features=superpixels,samples=9)"), '"clairvit[superpixels]"'),
    (("skimage",), ("evaluate", *SCENES, "--metric", "irof"), '"clairvit[superpixels]"'),
    (("tifffile",), ("explain", "bands.tif", "--model", "five:model"), '"clairvit[tiff]"'),
    (("pillow_heif",), ("explain", "photo.heic"), '"clairvit[heic]"'),
    (("transformers",), ("explain", "demo", "--model", "hf:a/b"), '"clairvit[hf]"'),
    (("open_clip",), ("explain", "demo", "--model", "open_clip:ViT-B-32:openai"), '"clairvit[clip]"'),
    (("fastapi", "uvicorn"), ("serve",), '"clairvit[web]"'),
    (("ray",), ("bench", *SCENES, "--metric", "deletion", "--engine", "ray", "--out", "store"), '"clairvit[ray]"'),
    (("wandb",), ("bench", *SCENES, "--metric", "deletion", "--log", "wandb", "--out", "store"), "wandb"),
]
TINY = ("--model", "timm:vit_tiny_patch16_224", "--no-pretrained", "--size", "32", "--with", "patch_size=8,depth=1")
# What each command does without any extra; those that need one are in ENTRIES.
CORE_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("explain", "demo", "--model", "scenes", "--check", "--out", "one.png"),
    ("compare", "demo", "--method", "saliency,rollout", "--out", "two.png"),
    ("evaluate", *SCENES, "--metric", "deletion", "--out", "scores"),
    ("choose", "--model", "scenes", "--data", "scenes", "--limit", "2"),
    ("calibrate", "--model", "scenes", "--data", "scenes", "--limit", "8", "--out", "recipe.json"),
    ("certify", "--model", "scenes", "--data", "scenes", "--limit", "9", "--out", "certificate.json"),
    ("expect", "--model", "scenes", "--data", "scenes", "--limit", "2"),
    ("mistakes", "--model", "scenes", "--data", "scenes", "--limit", "4", "--out", "mistakes.csv"),
    ("doctor", "scenes"),
    ("features", "demo", "--model", "scenes", "--out", "features.png"),
    ("intervene", "demo", "--model", "scenes"),
    ("finetune", "photos", *TINY, "--epochs", "1", "--out", "weights.safetensors"),
    ("methods",),
    ("methods", "rollout"),
    ("metrics",),
    ("metrics", "deletion"),
    ("models",),
    ("classes", "--model", "scenes"),
    ("cite", "rollout"),
)
RUN = """
import contextlib, io, json, sys, traceback
from clairvit.cli import main
answers = []
for package, command in json.loads(sys.argv[1]):
    modules = dict(sys.modules)
    sys.modules[package] = None
    for name in [name for name in modules if name.startswith(("clairvit.web", "clairvit.reports"))]:
        del sys.modules[name]  # they import their package when they are imported
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            status = main(command)
        except BaseException:
            status = traceback.format_exc()
    answers.append((status, output.getvalue()))
    sys.modules.update({package: modules[package]} if package in modules else {})
    if package not in modules:
        del sys.modules[package]
print(json.dumps(answers))
"""
FIVE = """
import timm, clairvit as cv
net = timm.create_model("vit_tiny_patch16_224", in_chans=5, depth=1, num_classes=3)
model = cv.wrap(net, size=224, mean=0.5, std=0.5)
"""
CORE = """
import builtins, sys
blocked, through_torch, ours = set({optional!r}), set({through_torch!r}), []
for name in blocked:
    sys.modules[name] = None
load = builtins.__import__
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = str((globals or {{}}).get("__name__"))
    if level == 0 and name.split(".")[0] in through_torch and importer.startswith("clairvit"):
        ours.append((importer, name))
    return load(name, globals, locals, fromlist, level)
builtins.__import__ = watched

import clairvit as cv
from clairvit.cli import main
explanation = cv.explain("scenes", "demo")
explanation.check()
cv.compare("scenes", "demo", ["saliency", "rollout"]).save("two.png")
cv.evaluate("scenes", "demo", "saliency", "deletion")
for command in (["--help"], *{commands!r}):
    status = main(list(command))
    assert status == 0, (command, status)
for name in cv.__all__:
    getattr(cv, name)
assert not ours, ours
"""


def run_python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, tuple[str, ...]], tuple[object, str]]:
    """Return exit status and error output of every command with every package missing, all from one process."""
    folder = tmp_path_factory.mktemp("extras")
    for name in ("images.parquet", "gtsegs_ijcv.mat"):
        (folder / name).touch()
    (folder / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    (folder / "five.py").write_text(FIVE, encoding="utf-8")
    tifffile.imwrite(folder / "bands.tif", np.zeros((5, 224, 224), np.uint8), photometric="minisblack")
    rows = [(package, command) for packages, command, _ in ENTRIES for package in packages]
    done = run_python(RUN, json.dumps(rows), folder=folder)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {row: (status, message) for row, (status, message) in zip(rows, results, strict=True)}


@pytest.mark.parametrize(
    ("package", "command", "advice"),
    [(package, command, advice) for packages, command, advice in ENTRIES for package in packages],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value,
)
def test_a_missing_package_is_one_sentence(
    answers: dict[tuple[str, tuple[str, ...]], tuple[object, str]], package: str, command: tuple[str, ...], advice: str
) -> None:
    status, message = answers[package, command]
    assert status == 2, message
    sentences = [line for line in message.splitlines() if line.startswith("clairvit: ")]
    assert len(sentences) == 1, message
    assert f"type: pip install {advice}" in sentences[0]
    assert "Traceback" not in message


def test_every_command_runs_without_extras_or_names_the_one_it_needs() -> None:
    """A new command is listed in one of the two."""
    commands = {name for name, command in typer.main.get_command(app).commands.items() if not command.hidden}  # type: ignore[attr-defined]
    in_core = {command[0] for command in CORE_COMMANDS}
    assert in_core <= commands
    assert commands - in_core == {"bench", "report", "reproduce", "serve"}
    for name in commands - in_core:
        needed = {package for packages, command, _ in ENTRIES if command[0] == name for package in packages}
        assert needed >= set(STUDY) or needed == {"fastapi", "uvicorn"}, name


def test_the_core_imports_no_optional_package(tmp_path: Path) -> None:
    for name, colour in {"red": (220, 30, 30), "blue": (30, 30, 220)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (40, 36), (colour[0], 5 * number, colour[2]))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    code = CORE.format(optional=OPTIONAL, through_torch=THROUGH_TORCH, commands=CORE_COMMANDS)
    done = run_python(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
