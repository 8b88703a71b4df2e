"""Print docs/methods.md from the registry:  python docs/generate_methods.py > docs/methods.md"""

from __future__ import annotations

import inspect

import clairvit as cv
from clairvit.methods.method import COMBINATORS, MATRIX_COMBINATORS, Method


def main() -> None:
    print("# Methods\n\n*Made by `python docs/generate_methods.py`; do not edit.*\n")
    print("`A` attention (row = query), `G` its gradient, `x` a block's input, `dx` its gradient, `h` head, `l` layer.")
    print()
    print("Combinators replace the way layers are combined:\n")
    for name, meaning in COMBINATORS.items():
        print(f"* `+{name}`: {meaning}")
    families: dict[str, list[Method]] = {}
    for method in cv.methods():
        families.setdefault(method.family, []).append(method)
    for family, members in families.items():
        print(f"\n## {family.capitalize()}")
        for method in members:
            section(method)
    print(
        "\n## Not here\n\n**I-SAW** (Mallick et al., ICIP 2022) is named in one of the five papers without a formula, "
        "and no code or text of it could be read. Nothing is shipped under that name until it can be."
    )


def section(method: Method) -> None:
    doc = inspect.getdoc(method.function) or ""
    print(f"\n### `{method.name}`\n\n{doc}\n")
    passes = {
        "none": "no pass",
        "forward": "1 forward",
        "backward": f"1 forward + 1 backward, rules `{method.rules}`",
        "local": "1 forward + one backward through each block alone",
    }[method.passes]
    if method.more is not None:
        passes = f"{method.cost.forwards} forwards + {method.cost.backwards} backwards with these options"
    sign = "signed" if method.signed and not method.relu else "not negative"
    if method.relu:
        sign = "not negative (signed with `relu=False` and under a combinator)"
    kind = "one map for every class" if not method.class_specific else "a map for each class"
    print(f"* Paper: {method.paper}\n* Cost: {passes}\n* Map: {sign}; {kind}")
    if method.slow:
        print("* Slow: `clairvit compare --methods all` leaves it out")
    if method.options:
        print("* Options: " + ", ".join(f"`{name}={value}`" for name, value in method.options.items()))
    for name, options in method.presets.items():
        print(f"* Preset `{name}`: " + ", ".join(f"`{key}={value}`" for key, value in options.items()))
    if not method.combinators:
        print("* Combinators: none (it sees the whole image at once)")
    elif method.gives != "matrix":
        without = " and ".join(f"`+{name}`" for name in MATRIX_COMBINATORS)
        print(f"* Combinators: all but {without} (it says one number for each token)")


if __name__ == "__main__":
    main()
