"""Hooks of mkdocs: the API reference is generated from the public names, links to files outside docs/ become text."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
API_MARKER = "<!-- api -->"
GENERATED = re.compile(r"^\*Made by [^*]*; do not edit\.\*\s*", re.MULTILINE)  # for editors, not for readers


SOURCE = ROOT / "src" / "clairvit"


def public_names() -> dict[str, dict[str, str]]:
    """Return heading -> public name -> where it is defined: the flat names, then those of each public module alone."""
    groups: dict[str, dict[str, str]] = {}
    modules: list[str] = []
    for line in (SOURCE / "__init__.pyi").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"# ([A-Z]\w+)", line):
            groups[heading[1]] = {}
        elif module := re.match(r"from \. import (\w+)", line):
            modules.append(module[1])
        elif (source := re.match(r"from \.([\w.]+) import", line)) and groups:
            names = re.findall(r"(\w+) as \w+", line)
            groups[next(reversed(groups))] |= {name: f"clairvit.{source[1]}.{name}" for name in names}
    del groups["Modules"]
    documented = {place for group in groups.values() for place in group.values()}
    for module in modules:
        members = {f"{module}.{name}": place for name, place in module_names(module).items()}
        groups[f"cv.{module}"] = {name: place for name, place in members.items() if place not in documented}
        documented |= set(members.values())
    return groups


def module_names(module: str) -> dict[str, str]:
    """Return public name -> where it is defined, of a public module or package."""
    stub, file = SOURCE / module / "__init__.pyi", SOURCE / f"{module}.py"
    tree = ast.parse((stub if stub.exists() else file).read_text(encoding="utf-8"))
    places: dict[str, str] = {}
    listed: list[str] | None = None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            source = f"clairvit.{module}.{node.module}" if node.level else node.module
            places |= {alias.name: f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            places[node.name] = f"clairvit.{module}.{node.name}"
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and stub.exists():  # Neuron = _neuron.Neuron
            places[ast.unparse(node.targets[0])] = f"clairvit.tracing.neuron.{ast.unparse(node.targets[0])}"
    return places if listed is None else {name: places[name] for name in listed}


def api_reference() -> str:
    """Return a section per group with a mkdocstrings directive per public name."""
    sections = []
    for heading, names in public_names().items():
        sections.append(f"## {heading}\n")
        for name, place in names.items():
            sections.append(f"::: {place}\n    options:\n      heading: cv.{name}\n      toc_label: cv.{name}\n")
    return "\n".join(sections)


def without_outer_links(markdown: str, folder: Path) -> str:
    """Return the text with links to files of the repository that are outside docs/ as plain text."""

    def replace(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        return match[0] if target.is_relative_to(ROOT / "docs") else match[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", replace, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the API reference; drop links that lead out of the site, and notes for those who edit a page."""
    source = Path(page.file.abs_src_path)
    return without_outer_links(GENERATED.sub("", markdown).replace(API_MARKER, api_reference()), source.parent)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Refuse a site that would fetch scripts, styles, fonts or images from another host."""
    foreign = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
    styles = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^\"')]+")
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        pattern = {".html": foreign, ".css": styles}.get(path.suffix)
        if pattern and (match := pattern.search(path.read_text(encoding="utf-8"))):
            raise SystemExit(f"{path} fetches {match[0]!r} from another host; expected a site that works offline.")
