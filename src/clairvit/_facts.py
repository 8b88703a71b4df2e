"""Facts of methods and metrics that are no code: names, sentences, references. One TOML file beside each module.

`methods/rise.toml` has an entry for each method of `methods/rise.py`. A module of a package that has such a file is one
that registers methods or metrics, so that the file is all that a registry needs to find it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from clairvit.errors import BadInput, did_you_mean

PACKAGE = __name__.partition(".")[0]
REFERENCES, TEXTS, POSITION = "references", "texts", "position"  # keys of a file that are no names
SHARED_TEXTS = "texts.toml"  # texts that several files of a folder quote
LAST = sys.maxsize


@dataclass(frozen=True)
class Facts:
    """What is said of a method or metric, and is no code.

    Args:
        title: Its name for readers who know no formulas.
        sentence: What it does, without formulas.
        also: Further names that people search for.
        aliases: Names that papers, talks and other libraries use: they are suggested, never taken silently.
        references: Keys of BibTeX entries, the paper that proposed it first.
        discrepancies: Where papers and public code disagree, and what is done here.
        as_written: Why two networks that compute the same can get two maps.
    """

    title: str = ""
    sentence: str = ""
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    discrepancies: str = ""
    as_written: str = ""


NO_FACTS = Facts()
_LISTS = {"also", "aliases", "references"}
_JOINED = {"discrepancies": " ", "as_written": "; "}  # several texts may be given, by their names in [texts]


@dataclass(frozen=True, eq=False)
class FactsFile:
    """The content of a file of facts.

    Args:
        entries: Name of a method or metric -> its facts. "+plus" and "rules=libra" are what a combinator and the value
            of an option add, "attnlrp+plus" a combination with words of its own.
        references: Key -> fields of a BibTeX entry.
        position: Where the module stands in lists; modules without one come last, by name.
    """

    entries: Mapping[str, Facts] = field(default_factory=dict)
    references: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    position: int = LAST


NO_FILE = FactsFile()


def read_facts(path: Path, names: Sequence[str] | None = None) -> FactsFile:
    """Return the content of a file of facts; an empty one if there is no such file.

    Args:
        path: The file.
        names: The entries to read, None: all. What else the file holds is somebody else's.

    Raises:
        BadInput: It is no TOML, or an entry has an unknown key or a value of another kind.
    """
    if not path.is_file():
        return NO_FILE
    document = _document(path.read_bytes(), path)
    shared = path.with_name(SHARED_TEXTS)
    texts = _table(_document(shared.read_bytes(), shared)) if shared.is_file() else {}
    texts |= _table(document.pop(TEXTS, {}))
    position, references = document.pop(POSITION, LAST), _table(document.pop(REFERENCES, {}))
    chosen = document if names is None else {name: document[name] for name in names if name in document}
    entries = {name: _facts(path, name, entry, texts) for name, entry in chosen.items()}
    return FactsFile(entries, references, position if isinstance(position, int) else LAST)


def _document(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"The facts '{path}' cannot be read ({error}); expected a TOML file in UTF-8.") from error


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _facts(path: Path, name: str, entry: Any, texts: Mapping[str, str]) -> Facts:
    """Return an entry as `Facts`."""
    names = [item.name for item in fields(Facts)]
    values: dict[str, Any] = {}
    if not isinstance(entry, dict):
        raise BadInput(f"'{name}' in '{path}' is {entry!r}; expected a table of facts: {', '.join(names)}.")
    for key, value in entry.items():
        if key not in names:
            raise BadInput(
                f"'{key}' is no key of '{name}' in '{path}'; expected {', '.join(names)}.{did_you_mean(key, names)}"
            )
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if key in _LISTS and is_list:
            values[key] = tuple(value)
        elif key in _JOINED and (is_list or isinstance(value, str)):
            items = [value] if isinstance(value, str) else value
            if missing := [item for item in items if " " not in item and item not in texts]:
                raise BadInput(
                    f"'{key}' of '{name}' in '{path}' names the text '{missing[0]}'; expected a sentence, or one of "
                    f"[{TEXTS}]: {', '.join(texts) or 'none'}.{did_you_mean(missing[0], texts)}"
                )
            values[key] = _JOINED[key].join(texts.get(item, item) for item in items)
        elif key not in _LISTS and isinstance(value, str):
            values[key] = value
        else:
            expected = "a list of texts" if key in _LISTS else "a text"
            raise BadInput(f"'{key}' of '{name}' in '{path}' is {value!r}; expected {expected}.")
    return Facts(**values)


@functools.cache
def package_facts(package: str) -> Mapping[str, FactsFile]:
    """Return module -> facts of the modules of a package that have a file beside them, in the order of lists.

    No module is imported but the package itself.
    """
    folders = map(Path, importlib.import_module(package).__path__)
    paths = [path for folder in folders for path in folder.glob("*.toml") if path.with_suffix(".py").exists()]
    files = {path.stem: read_facts(path) for path in paths}
    stems = sorted(files, key=lambda stem: (files[stem].position, stem))
    return {f"{package}.{stem}": files[stem] for stem in stems}


def facts_beside(module: str, names: Sequence[str]) -> FactsFile:
    """Return the facts of these names, in the file beside a module that is imported."""
    package = module.rpartition(".")[0]
    if package.partition(".")[0] == PACKAGE:
        return package_facts(package).get(module, NO_FILE)
    file = getattr(sys.modules.get(module), "__file__", None)
    return NO_FILE if file is None else read_facts(Path(file).with_suffix(".toml"), names)


def facts_of(name: str, module: str) -> Facts:
    """Return the facts of a method or metric that a module registers.

    Of ours, every file of the package is asked: a named variant belongs to the module that names it.
    """
    package = module.rpartition(".")[0]
    ours = package_facts(package).values() if package.partition(".")[0] == PACKAGE else ()
    files = (facts_beside(module, [name]), *ours)
    return next((file.entries[name] for file in files if name in file.entries), NO_FACTS)


def entries_of(package: str) -> Mapping[str, Facts]:
    """Return all entries of a package of ours, in the order of lists."""
    return {name: facts for file in package_facts(package).values() for name, facts in file.entries.items()}
