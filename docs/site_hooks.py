"""Hooks of mkdocs: the API reference is generated from the public names, links to files outside docs/ become text."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
API_MARKER = "<!-- api -->"
GENERATED = re.compile(r"^\*Made by [^*]*; do not edit\.\*\s*", re.MULTILINE)  # for editors, not for readers


def public_names() -> dict[str, list[str]]:
    """Return heading -> public names, by the comments in `_MODULES` of clairvit/__init__.py."""
    text = (ROOT / "src" / "clairvit" / "__init__.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    (table,) = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_MODULES"]
    groups: dict[str, list[str]] = {}
    for line in (ast.get_source_segment(text, table) or "").splitlines():
        if heading := re.fullmatch(r"\s*# (.+)", line):
            groups[heading[1]] = []
        elif name := re.match(r'\s*"(\w+)": "([\w.]+)"', line):
            groups[next(reversed(groups))].append(f"{name[2]}.{name[1]}")
    return groups


def api_reference() -> str:
    """Return a section per group with a mkdocstrings directive per public name."""
    sections = []
    for heading, names in public_names().items():
        sections.append(f"## {heading.capitalize()}\n")
        for name in names:
            public = f"cv.{name.rpartition('.')[2]}"
            sections.append(f"::: {name}\n    options:\n      heading: {public}\n      toc_label: {public}\n")
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
