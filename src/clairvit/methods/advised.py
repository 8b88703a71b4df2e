"""A method that is named by a recipe: the one thing that a study gives back to the methods."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from clairvit.errors import BadInput
from clairvit.models.model import Model

if TYPE_CHECKING:
    from clairvit.methods.recipe import Recipe

USUAL = "legrad"


def advised(
    model: Model, method: str | PathLike[str] | Recipe | None, recipe: str | PathLike[str] | Recipe | None
) -> str:
    """A method string: what was typed, a recipe's method, or a typed "focusvit(m=auto)" with the recipe's layer."""
    if recipe is None and method is None:
        return USUAL
    if recipe is None and isinstance(method, str) and not method.lower().endswith(".json"):
        return method
    from clairvit.methods.recipe import Recipe, recipe_of

    if recipe is None:
        if not isinstance(method, str | PathLike | Recipe):
            raise BadInput(f"{method!r} is not a method; expected NAME such as 'legrad', or a recipe.")
        recipe, method = method, None
    found = recipe_of(recipe)
    text = found.method_for(None if method is None else str(method))
    found.check(model)
    return text
