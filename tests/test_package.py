"""The package as users get it: metadata, the wheel in a clean environment, what is imported, the lists of versions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

import clairvit as cv
from clairvit.models.sources import hf_versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LARGEST_WHEEL = 20 * 2**20  # bytes
# Packages of the extras, and of integrations: loaded by the one function that needs them.
OPTIONAL = (
    *(
        "pyarrow",
        "duckdb",
        "skimage",
        "tifffile",
        "pandas",
        "transformers",
        "open_clip",
        "ray",
        "fastapi",
        "uvicorn",
        "starlette",
    ),
    *(
        "captum",
        "quantus",
        "pytorch_grad_cam",
        "lightning",
        "pytorch_lightning",
        "torchmetrics",
        "tensorboard",
        "wandb",
    ),
    *("datasets", "tensorflow", "playwright"),
)


def test_importing_every_public_name_imports_no_extra() -> None:
    code = f"""
import sys, clairvit as cv
for name in cv.__all__:
    getattr(cv, name)
cv.list_methods(), cv.list_metrics()
print(*sorted(set({OPTIONAL!r}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in PROJECT["optional-dependencies"]:
        assert f"`{extra}`" in page, extra


def test_metadata_says_who_and_under_which_terms() -> None:
    assert PROJECT["authors"]
    assert PROJECT["license"] == "Apache-2.0"
    assert {"LICENSE", "NOTICE"} <= set(PROJECT["license-files"])
    pythons = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert pythons == list(matrix().PYTHONS), "the Pythons of the classifiers are those of make matrix"
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for card in (ROOT / "src" / "clairvit" / "models" / "builtin").glob("*/README.md"):
        assert card.parent.name in notice, "the terms of every built-in model"


def test_citation_file_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == cv.__version__  # type: ignore[index]
    for key in ("cff-version", "message", "title", "authors", "license"):
        assert re.search(rf"^{key}:", text, re.MULTILINE), key


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file; tags of Python, which mkdocs.yml has, are read as None."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that knows the tag."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda *_: None)
    document = yaml.load(path.read_text(encoding="utf-8"), Loader)
    assert isinstance(document, dict), path
    return document


def test_workflows_run_commands_that_exist() -> None:
    """Every step uses an action of a stated version or runs a command; `make` targets and scripts are there."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = {path.stem: read_yaml(path) for path in (ROOT / ".github" / "workflows").iterdir()}
    assert set(workflows) == {"tests", "lint", "docs", "release"}
    for workflow in workflows.values():
        assert {"name", "permissions", "jobs"} <= set(workflow)
        for job in workflow["jobs"].values():
            assert job["runs-on"] == "ubuntu-latest"
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                assert re.fullmatch(r"[\w./-]+@[\w./-]+", step.get("uses", "owner/action@v1"))
                assert set(re.findall(r"\bmake ([\w-]+)", step.get("run", ""))) <= targets
                assert all((ROOT / script).exists() for script in re.findall(r"python (\.ci/\S+)", step.get("run", "")))
    pythons = workflows["tests"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == list(matrix().PYTHONS)


def test_workflows_use_pinned_actions_and_keep_no_credentials() -> None:
    """A tag can be moved to other code; `release/v1` of PyPI's action is the one whose commit is not known here."""
    steps = [
        step
        for path in (ROOT / ".github" / "workflows").iterdir()
        for job in read_yaml(path)["jobs"].values()
        for step in job["steps"]
    ]
    unpinned = {step["uses"] for step in steps if not re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))}
    assert unpinned == {"pypa/gh-action-pypi-publish@release/v1"}
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == 8
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    installed = [word for step in steps for word in re.findall(r"pip install (\S+)", step.get("run", ""))]
    assert installed
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", requirement) for requirement in installed)
    updates = read_yaml(ROOT / ".github" / "dependabot.yml")["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


def test_the_notice_names_what_is_not_ours() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    font = Path("src/clairvit/web/static/fonts")
    assert str(font / "inter.woff2") in notice
    assert "SIL Open Font License" in notice
    assert (ROOT / font / "LICENSE").is_file()


def test_templates_hooks_and_citation_are_valid_yaml() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        template = read_yaml(path)
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(template), path.name
            fields = [field["attributes"]["label"] for field in template["body"]]
            assert len(set(fields)) == len(fields)
    hooks = [
        hook["id"]
        for repository in read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
    ]
    assert hooks == ["ruff", "ruff-format", "mypy"]
    assert read_yaml(ROOT / "CITATION.cff")["cff-version"] == "1.2.0"
    assert read_yaml(ROOT / "mkdocs.yml")["nav"]


def changed_since_0_2(changelog: str) -> set[str]:
    """Return what later entries name: a name of 0.2 may have changed again."""
    return set(re.findall(r"`([\w./]+)`", changelog.partition("\n## 0.2.0")[0]))


def test_new_names_in_the_changelog_exist() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    table = text.partition("### Renamed and merged: modules")[2]
    rows = re.findall(r"\| `[\w/]+\.py` \| `([\w/.]+)` \|", table)
    assert len(rows) > 100
    missing = [place for place in rows if not (ROOT / "src" / "clairvit" / place).exists()]
    later = changed_since_0_2(text)
    assert [place for place in missing if not {f"clairvit.{Path(place).parts[0]}", Path(place).name} & later] == []


def test_new_classes_and_functions_in_the_changelog_exist() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    table = text.partition("### Renamed: classes, functions, fields")[2].partition("\n### ")[0]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in cells for cell in (row[2], row[5]) for name in re.findall(r"`(?:\w*\.)?(\w+)=?`", cell)}
    assert len(names) > 80
    defined = set(re.findall(r"(?:class|def) (\w+)|^\s*(\w+)\s*[:=]|[(,]\s*(\w+)\s*[:=]", sources, re.MULTILINE))
    assert names - {name for match in defined for name in match} - changed_since_0_2(text) == set()


def matrix() -> ModuleType:
    """Return the script of make matrix as a module."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_matrix_pins_the_lowest_versions() -> None:
    text = """
[project]
dependencies = ["torch>=2.6", "uvicorn[standard]>=0.30"]
[project.optional-dependencies]
hf = ["transformers>=4.51"]
web = ["fastapi>=0.115"]
"""
    assert matrix().lowest_versions(text, ["hf"]) == ["torch==2.6", "uvicorn==0.30", "transformers==4.51"]
    with pytest.raises(ValueError, match=r"\['torch'\] have no lowest version"):
        matrix().lowest_versions('[project]\ndependencies = ["torch"]\noptional-dependencies = {}', [])
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert len(matrix().lowest_versions(pyproject, matrix().EXTRAS)) > len(PROJECT["dependencies"])
    assert matrix().lowest_versions(text, ["hf"], "5.3")[-1] == "transformers==5.3"


def test_the_matrix_runs_every_version_that_a_family_of_transformers_needs() -> None:
    (required,) = PROJECT["optional-dependencies"]["hf"]
    assert required == f"transformers>={hf_versions.OLDEST}"
    rows = [row for row in matrix().combinations("lowest") if row.transformers]
    assert {row.transformers for row in rows} == set(hf_versions.FAMILIES.values())


def test_the_matrix_finds_interpreters_of_pyenv_and_no_shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim on the path that fails is no interpreter; an installed version that is not switched on is one."""

    def written(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    script = matrix()
    written(tmp_path / "shims" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    written(tmp_path / "root" / "versions" / "3.12.1" / "bin" / "python", "echo 3.12")
    written(tmp_path / "root" / "versions" / "3.13.0" / "bin" / "python", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "root"))
    assert script.find_interpreter("3.12") == str(tmp_path / "root" / "versions" / "3.12.1" / "bin" / "python")
    assert script.find_interpreter("3.99") is None
    rows = script.combinations(None, ["3.12"])
    assert [(row.python, row.versions) for row in rows] == [("3.12", "newest")], "the lowest are for the oldest Python"
    assert "| 3.13 | newest | – |" in script.table([], ["3.13"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, offline, by the build backend itself."""
    pytest.importorskip("hatchling", reason="the development extras build the wheel: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size <= LARGEST_WHEEL
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        message = Parser().parsestr(archive.read(place).decode("utf-8"))
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names, "data files too"
    assert "clairvit/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
    assert message["Version"] == cv.__version__
    assert message["License-Expression"] == "Apache-2.0"
    licences = message.get_all("License-File") or []
    assert {"LICENSE", "NOTICE", "src/clairvit/models/builtin/pets/README.md"} <= set(licences)


def distributions_of(requirements: Sequence[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that requirements without extras ask for, and those that these ask for."""
    needed: dict[str, metadata.Distribution] = {}
    remaining = list(requirements)
    while remaining:
        requirement = Requirement(remaining.pop())
        if requirement.name in needed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed[requirement.name] = metadata.distribution(requirement.name)
        remaining += needed[requirement.name].requires or []
    return needed


def files_of(distributions: Mapping[str, metadata.Distribution]) -> set[Path]:
    """Return the modules, packages and metadata of distributions, as they lie in site-packages."""
    files = (file for distribution in distributions.values() for file in distribution.files or ())
    return {
        Path(str(file.locate())).parents[len(file.parts) - 2] if len(file.parts) > 1 else Path(str(file.locate()))
        for file in files
        if file.parts[0] != ".."
    }


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Install it next to what the core depends on, and nothing else, and explain the demo without a network."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    for path in files_of(distributions_of(PROJECT["dependencies"])):
        if not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*install, "--force-reinstall", str(wheel)], check=True)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = tmp_path / "venv" / "bin" / "clairvit"
    run = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
    where = subprocess.run([python, "-c", "import clairvit; print(clairvit.__file__)"], **run).stdout  # type: ignore[call-overload]
    assert Path(where.strip()).is_relative_to(packages), "the installed one, not the sources"
    assert subprocess.run([command, "--version"], **run).stdout == f"clairvit {cv.__version__}\n"  # type: ignore[call-overload]
    subprocess.run([command, "explain", "demo", "--out", "demo.png"], **run)  # type: ignore[call-overload]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    study = [command, "bench", "--data", "scenes", "--model", "scenes", "--method", "saliency", "--metric", "deletion"]
    refused = subprocess.run([*study, "--out", "store"], **run | {"check": False})  # type: ignore[call-overload]
    assert refused.returncode == 2
    assert 'type: pip install "clairvit[study]"' in refused.stderr
