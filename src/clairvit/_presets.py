"""Presets: published variants of a method or metric by name, as options (data) or as a function of their own.

An entry of a registry, `Method` or `Metric`, has `presets`: name -> options (`preset` among them is another preset that
they come on top of), or the entry of a variant. A variant has
the name, the family and the references of the entry, and a function with a formula and options of its own; `preset` is
its name, and it has no presets itself. What other people's code computes, bugs included, is a variant in
`clairvit.compat`, so that the entry's own function has the options that a person would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from clairvit._registry import Registry
from clairvit.errors import UnknownName, did_you_mean


class Entry(Protocol):
    """What has presets: `Method` and `Metric`."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def presets(self) -> Mapping[str, Any]: ...
    @property
    def preset(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def moved(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=Entry)
F = TypeVar("F", bound=Callable[..., Any])


def preset_decorator(
    registry: Registry[E], name: str, preset: str, moved: Sequence[str], fields: Mapping[str, Any]
) -> Callable[[F], F]:
    """Return a decorator that registers a function as a preset of an entry; `fields` are those that differ from it."""

    def decorate(function: F) -> F:
        entry: Any = _base(registry, name)
        variant = dataclasses.replace(entry, function=function, preset=preset, moved=tuple(moved), presets={}, **fields)
        registry.register(name, dataclasses.replace(entry, presets={**entry.presets, preset: variant}))
        return function

    return decorate


def add_presets(registry: Registry[E], name: str, presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Add presets that are options to an entry: preset name -> options."""
    entry: Any = _base(registry, name)
    registry.register(name, dataclasses.replace(entry, presets={**entry.presets, **presets}))


def _base(registry: Registry[E], name: str) -> E:
    """Return the entry that a preset is added to; import it if it is not there yet."""
    return registry.registered(name) or registry.resolve(name)


def choose_preset(entry: E, preset: str) -> tuple[E, dict[str, Any]]:
    """Return the entry whose function a preset runs, and the options that the preset gives it.

    Raises:
        UnknownName: If the entry has no preset of this name.
    """
    if preset not in entry.presets:
        listed = ", ".join(entry.presets) or "none"
        raise UnknownName(
            f"'{entry.name}' has no preset '{preset}'; it has {listed}.{did_you_mean(preset, entry.presets)}"
        )
    chosen = entry.presets[preset]
    if not isinstance(chosen, Mapping):
        return chosen, {}
    settings = dict(chosen)
    entry, more = choose_preset(entry, settings.pop("preset")) if "preset" in settings else (entry, {})
    return entry, more | settings


def with_preset(entry: E, options: Mapping[str, Any]) -> tuple[E, dict[str, Any], dict[str, Any]]:
    """Return the entry whose function runs, the options of a typed `preset=NAME`, and what was typed next to it.

    What was typed next to a preset wins. `compat=NAME` is the same.
    """
    typed, settings = dict(options), dict[str, Any]()
    for keyword in ("preset", "compat"):
        if keyword in typed:
            entry, chosen = choose_preset(entry, str(typed.pop(keyword)))
            settings = chosen | settings
    return entry, settings, typed


def is_registered(registry: Registry[E], entry: E) -> bool:
    """Return whether an entry, or a variant of one, is the one that its name stands for now."""
    registered = registry.registered(entry.name)
    return registered is not None and any(
        entry is other for other in (registered, registered.presets.get(entry.preset))
    )


def preset_settings(entry: Entry, preset: str) -> dict[str, Any]:
    """Return the options that a preset sets; of a variant, those whose defaults are not the entry's."""
    chosen = entry.presets[preset]
    if isinstance(chosen, Mapping):
        return dict(chosen)
    return {name: value for name, value in chosen.options.items() if entry.options.get(name, chosen) != value}


def preset_formula(entry: Entry, preset: str) -> str:
    """Return the first line of a variant's function; nothing for a preset that is options."""
    chosen = entry.presets[preset]
    return "" if isinstance(chosen, Mapping) else str(chosen.summary)


def moved_option(entry: Entry, chosen: Entry, option: str, value: Any) -> str:
    """Return the sentence for an option, or a value of one, that presets of an entry have now; else nothing.

    `chosen` is the entry, or the variant that was asked for, whose own options are none of these.
    """
    for moved in (option, f"{option}={value}"):
        names = [name for name, variant in entry.presets.items() if moved in getattr(variant, "moved", ())]
        if names and not (option in chosen.options and (chosen.preset or moved == option)):
            presets = " and ".join(f"{entry.name}(preset={name})" for name in names)
            return f"'{entry.name}' takes no {moved} any more; it is part of {presets}."
    return ""
