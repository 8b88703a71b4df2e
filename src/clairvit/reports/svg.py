"""A matplotlib figure as SVG inside an HTML page, in the colours and font of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import matplotlib
from matplotlib.figure import Figure

from clairvit.plotting.canvas import INK, LINE, PALE
from clairvit.plotting.series import COLOURS, LineStyle

# The page has other colours on dark screens: variables of templates/style.css.
CSS_COLOURS = {INK: "var(--ink)", PALE: "var(--pale)", LINE: "var(--rule)"} | {
    colour: f"var(--s{index})" for index, colour in enumerate(COLOURS)
}
PIXELS_PER_INCH = 125  # on a screen: text of 6.5 points is 11 pixels high, as on the rest of the page
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "clairvit"}  # text stays text
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_NUMBER = re.compile(r"-?\d+\.\d+")


def inline_svg(figure: Figure, title: str, description: str = "") -> str:
    """Return a figure as an <svg> element without identifiers, scripts, fonts or links; the same figure, the same text.

    Args:
        figure: A figure; its text in data coordinates must not be clipped, because clip paths are left out.
        title: What a screen reader says.
        description: The numbers that the figure shows, for a reader who does not see it.
    """
    for axes in figure.axes:
        axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    source = ElementTree.fromstring(buffer.getvalue())
    markers = {path.get("id", ""): path.get("d", "") for path in source.iter() if _tag(path) == "path"}
    width, height = (f"{PIXELS_PER_INCH * inches:.0f}" for inches in figure.get_size_inches())
    size = {"viewBox": source.get("viewBox", ""), "width": width, "height": height}
    svg = Element("svg", {**size, "role": "img", "aria-label": title})
    SubElement(svg, "title").text = title
    if description:
        SubElement(svg, "desc").text = description
    for child in source:
        svg.extend(_plain_elements(child, markers))
    return ElementTree.tostring(svg, encoding="unicode")


def stroke_style(style: LineStyle) -> str:
    """Return the CSS of a line in a legend."""
    dash = style.dash[1] if isinstance(style.dash, tuple) else (4, 2) if style.dash == "--" else ()
    dashes = f"; stroke-dasharray: {' '.join(f'{2 * part:g}' for part in dash)}" if dash else ""
    return f"stroke: {CSS_COLOURS[style.colour]}; stroke-width: {1.5 * style.width:g}{dashes}"


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _plain_elements(element: Element, markers: Mapping[str, str]) -> Iterator[Element]:
    """Yield the paths and texts of an element, with markers in place of references to them."""
    tag, attributes = _tag(element), dict(element.attrib)
    if tag == "g":
        for child in element:
            yield from _plain_elements(child, markers)
    elif tag == "use":
        reference = next(value for name, value in attributes.items() if name.endswith("href"))
        translation = f"translate({_rounded(attributes['x'])} {_rounded(attributes['y'])})"
        style = _css(attributes.get("style", ""))
        yield Element("path", {"d": _rounded(markers[reference[1:]]), "transform": translation, "style": style})
    elif tag == "path":
        yield Element("path", {"d": _rounded(attributes["d"]), "style": _css(attributes.get("style", ""))})
    elif tag == "text":
        text_attributes: dict[str, str] = {
            name: _rounded(attributes[name]) for name in ("x", "y", "transform") if name in attributes
        }
        if text_attributes.get("transform", "").startswith("rotate(-0 "):
            del text_attributes["transform"]
        text = Element("text", {**text_attributes, "style": _css(attributes.get("style", ""))})
        text.text = element.text
        yield text


def _rounded(text: str) -> str:
    """Return numbers with two decimals and without line breaks: a hundredth of a point is not seen."""
    return " ".join(_NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text).split())


def _css(style: str) -> str:
    """Return CSS with the page's colours and without a font family."""
    declarations = [part.strip() for part in style.split(";") if not part.strip().startswith("font-family")]
    text = "; ".join(declarations)
    for colour, variable in CSS_COLOURS.items():
        text = text.replace(colour, variable)
    return text
