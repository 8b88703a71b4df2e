"""Hypothesis strategies of inputs, from valid to malformed."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from PIL import Image

import clairvit as cv
from clairvit.methods.registry import find_method, list_methods
from clairvit.metrics.registry import find_metric, list_metrics

MODES = [
    "1",
    "L",
    "P",
    "RGB",
    "RGBA",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "LA",
    "PA",
    "RGBX",
    "RGBa",
    "La",
    "I;16",
]
NUMPY = [
    "?",
    "i1",
    "u1",
    "i2",
    "u2",
    "i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    "f8",
    ">f4",
    ">u2",
    "c8",
    "O",
    "U3",
    "S2",
    "M8[s]",
]
TORCH = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64),
]
SIDES = st.sampled_from([0, 1, 2, 3, 4, 5, 17, 31, 32, 33, 64])
TEXT = st.text(max_size=12)
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), TEXT, st.binary(max_size=4), st.just(()), st.just({}),
    st.just({1, 2}), st.just(object), st.builds(object), st.just(math.nan), st.lists(TEXT, max_size=2),
    st.dictionaries(TEXT, st.integers(), max_size=2), st.just(range(3)), st.just(1 + 2j), st.just(2**70),
)  # fmt: skip


@st.composite
def pictures(draw: DrawFn) -> Image.Image:
    """PIL images of every mode, from nothing to very narrow ones, some with a palette, transparency or EXIF."""
    mode = draw(st.sampled_from(MODES))
    width, height = draw(st.tuples(SIDES, SIDES) | st.sampled_from([(1, 900), (900, 1), (40, 30)]))
    image = Image.new(mode, (width, height))
    seed = draw(st.integers(0, 3))
    if seed and width and height and mode not in ("1", "P", "PA", "I;16"):
        raw = np.random.default_rng(seed).integers(0, 256, len(image.tobytes()), dtype=np.uint8).tobytes()
        image = Image.frombytes(mode, (width, height), raw)  # in mode F these are NaN and infinity, too
    if mode == "P" and seed:
        image.putpalette(bytes(range(3 * 8 * seed)))
        image.info["transparency"] = draw(st.sampled_from([0, 3, b"\x00\x80", 999, "no"]))
    if draw(st.booleans()):
        image.getexif()[0x0112] = draw(st.sampled_from([1, 3, 6, 8, 0, 99, 2**15]))
    return image


@st.composite
def arrays(draw: DrawFn) -> Any:
    """Arrays of odd kinds and shapes, many of them nearly right."""
    shape = draw(
        st.lists(SIDES, min_size=0, max_size=5)
        | st.tuples(SIDES, SIDES, st.sampled_from([1, 2, 3, 4, 5]))
        | st.tuples(st.integers(1, 3), st.just(8), st.just(8), st.just(3))
    )
    while math.prod(shape) > 200_000:
        shape = shape[:-1]
    kind = draw(st.sampled_from(["u1", "u1", "u1", *NUMPY]))
    values = np.random.default_rng(draw(st.integers(0, 3))).integers(0, 256, shape)
    array = values.astype(kind)
    if kind in ("f2", "f4", "f8") and array.size and draw(st.booleans()):
        array.flat[0] = draw(st.sampled_from([np.nan, np.inf, -np.inf, -1.0]))
    if array.ndim >= 2 and draw(st.booleans()):
        array = array[::-1, ::-1]  # negative strides
    return array


@st.composite
def tensors(draw: DrawFn) -> torch.Tensor:
    """Tensors of odd shapes, kinds and values; about half of them what the model takes."""
    right = draw(st.booleans())
    shape = (
        draw(st.sampled_from([(1, 3, 32, 32), (3, 32, 32), (2, 3, 32, 32)]))
        if right
        else tuple(draw(st.lists(SIDES, max_size=5) | st.tuples(st.just(1), st.just(3), SIDES, SIDES)))
    )
    while math.prod(shape) > 300_000:
        shape = shape[:-1]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values * draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 100.0, 1e30, 1e-30]))
    if values.numel() and draw(st.integers(0, 4)) == 0:
        values.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    tensor = values.to(draw(st.sampled_from([torch.float32] * 20 + TORCH)))
    change = draw(st.sampled_from(["", "", "", "", "grad", "transposed", "expanded", "sparse", "meta", "quantized"]))
    if change == "grad" and tensor.is_floating_point():
        tensor.requires_grad_()
    elif change == "transposed" and tensor.ndim >= 2:
        tensor = tensor.transpose(-1, -2)
    elif change == "expanded" and tensor.ndim:
        tensor = tensor[:1].expand(tensor.shape)
    elif change == "sparse" and tensor.ndim and tensor.dtype != torch.bool:
        tensor = tensor.to_sparse()
    elif change == "meta":
        tensor = tensor.to("meta")
    elif change == "quantized" and tensor.dtype == torch.float32:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch will give them up
            tensor = torch.quantize_per_tensor(tensor, 0.1, 10, torch.quint8)
    return tensor


def images() -> SearchStrategy[Any]:
    """One picture or array, several of them, or something that is no image at all."""
    single = pictures() | arrays()
    right = st.sampled_from(["RGB", "L", "RGBA", "P"]).map(lambda mode: Image.new(mode, (40, 30), 3))
    names = st.sampled_from(
        ["", " ", ".", "~no-such-user/x", "demo ", "a\x00b", "x" * 5000, "*.jpg", "\ud800.png", "demo"]
    )
    return st.one_of(
        right,
        pictures(),
        arrays(),
        st.lists(right | pictures(), min_size=1, max_size=3),
        st.lists(single, max_size=3),
        st.lists(single | tensors() | ODD, max_size=2),
        names,
        names.map(lambda name: [name]),
        ODD,
        st.lists(ODD, max_size=2),
        st.just(iter(())),
        st.tuples(arrays()),
    )


@st.composite
def damaged(draw: DrawFn) -> bytes:
    """Files that begin like images: whole, cut, with bytes changed, or made up."""
    kind = draw(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "made up"]))
    if kind == "made up":
        start = draw(
            st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe1", b"GIF89a", b"BM", b"II*\x00", b"RIFF"])
        )
        return start + draw(st.binary(max_size=80))
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    options = {"exif": draw(st.binary(max_size=30))} if kind in ("JPEG", "PNG", "WEBP") and draw(st.booleans()) else {}
    Image.fromarray(noise).save(file, kind, **options)
    raw = bytearray(file.getvalue())
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.just(len(raw)) | st.integers(0, len(raw)))])


def _raises(_: Any) -> Any:
    raise ArithmeticError("of the user")


FUNCTIONS = [
    *(lambda y: y[:, 1], lambda y: y, lambda y: y.sum(), lambda y: None, lambda y: 3.0, lambda y: y[:, 99], _raises),
    *(lambda y: y[:, 0].detach(), lambda y: y[:, 0] * math.nan, lambda y: y[:0, 0], lambda y: y[:, 0] > 0, lambda: 1),
]


@st.composite
def targets(draw: DrawFn) -> Any:
    """Classes by number and name, contrasts, functions, lists, and things that are none of these."""
    right = st.integers(0, 6) | st.sampled_from([None, "cat", "cow", "dog", "be", "1", np.int64(1), FUNCTIONS[0]])
    odd = [
        2**40,
        -(2**63),
        True,
        1.0,
        2.5,
        math.nan,
        " 2",
        "--5",
        "9" * 5000,
        "",
        "Cat",
        "ca",
        "d",
        "c",
        "label",
        "cat,dog",
    ]
    wrong = st.one_of(
        st.integers(-9, 9),
        st.sampled_from(odd),
        TEXT,
        st.sampled_from(FUNCTIONS),
        ODD,
        st.sampled_from([np.float32(1), torch.tensor(1), torch.tensor([1, 2])]),
        st.just(np.array([1, 2])),
    )
    mostly = right if draw(st.integers(0, 3)) else right | wrong
    shape = draw(st.sampled_from(["one", "one", "one", "pair", "list", "two", "nested", "wrong"]))
    pair = st.builds(cv.Contrast, mostly, mostly)
    return draw(
        {
            "one": mostly,
            "pair": pair,
            "list": st.lists(mostly | pair, min_size=1, max_size=3),
            "two": st.lists(mostly, min_size=2, max_size=2),
            "nested": st.lists(st.lists(mostly, max_size=2), max_size=2),
            "wrong": wrong,
        }[shape]
    )


VALUES = st.one_of(
    st.integers(-2, 4).map(str),
    st.sampled_from(["0.5", "-0.5", "1e-3", "nan", "inf", "-inf", "1e999", "True", "false", "None", "auto", "", "max"]),
    st.sampled_from(
        ["mean", "min", "token", "black", "blur", "pixel", "patch", "plain", "[1,2]", "(1,2)", "'a'", "{}"]
    ),
    st.sampled_from(["1_0", "0x2", "٣", "1e", "--1", "1.", "lambda: 1", "__import__('os')", "a=b", "x" * 50]),
    st.text(max_size=6),
)
JUNK = st.text(alphabet="abz019_-+:.,=() []{}'\"\\\n\té😀\x00", max_size=24)
FEW = {"n": 2, "samples": 4, "steps": 2, "runs": 3, "layers": 1, "masks": 4, "at_once": 8, "draws": 2, "count": 2}


@st.composite
def _call(draw: DrawFn, names: list[str], options_of: Any, junk: bool = True) -> str:
    """NAME(option=value, …), with few samples where there are any."""
    name = draw(st.sampled_from(names))
    options = options_of(name)
    values = {key: str(value) for key, value in FEW.items() if isinstance(options.get(key), int)}
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(sorted(options)) if options and draw(st.integers(0, 3)) else TEXT)
        default = options.get(key)
        value = draw(VALUES) if junk and draw(st.booleans()) else str(default)
        values[key] = value if key not in FEW or value in ("-1", "0", "1", "2", "nan", "-inf") else values.get(key, "2")
    inside = ",".join(f"{key}={value}" for key, value in values.items())
    return f"{name}({inside})" if inside else name


@st.composite
def method_texts(draw: DrawFn) -> str:
    """Method strings: names, options, combinators, nesting, and garbage."""
    names = sorted(method.name for method in list_methods())
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(JUNK)
    text: str = draw(_call(names, lambda name: find_method(name).options))
    if draw(st.integers(0, 2)) == 0:
        text += draw(
            st.sampled_from(["+plus", "+skipplus", "+rollout", "+layer:0", "+layer:-1", "+layer:9", "+from:1", "+last"])
            | st.sampled_from(
                ["+", "+from:auto", "+from:", "+plus+plus", "+mean", "+sum", "+max", " + plus", "+layer:x"]
            )
        )
    if kind in (1, 2):
        other: str = draw(_call(names, lambda name: find_method(name).options, junk=False))
        text = draw(
            st.sampled_from(
                [
                    f"smooth({text},n=2)",
                    f"ensemble({text},{other})",
                    f"ensemble({text},{other},by=minmax)",
                    f"smooth({text},n={draw(st.sampled_from(['0', '1', 'x', '-1', '1.5']))})",
                    f"ensemble({text})",
                    f"smooth(ensemble({text},{other}),n=1,sigma=0)",
                    f"ensemble(smooth({text},n=1),{other},by=max)",
                ]
            )
        )
    if kind == 3:
        position = draw(st.integers(0, len(text)))
        text = text[:position] + draw(JUNK) + text[position + draw(st.integers(0, 3)) :]
    return text


@st.composite
def metric_texts(draw: DrawFn) -> str:
    """Metric strings in the same way."""
    names = sorted(metric.name for metric in list_metrics())
    text: str = draw(_call(names, lambda name: find_metric(name).options))
    if draw(st.integers(0, 5)) == 0:
        position = draw(st.integers(0, len(text)))
        text = text[:position] + draw(JUNK) + text[position:]
    return text


@st.composite
def masks(draw: DrawFn) -> Any:
    """Masks: arrays, pictures, tensors and paths, of the image's shape or another."""
    shapes = [(32, 32)] * 6 + [(1, 32, 32)] * 4 + [(64, 64), (8, 8), (32, 33), (0, 0), (), (32, 32, 3)]
    shape = draw(st.sampled_from(shapes))
    values = np.random.default_rng(draw(st.integers(0, 3))).integers(0, draw(st.sampled_from([1, 2, 4, 256])), shape)
    kinds = ["bool", "u1", "i8", "f4", "tensor", "bool tensor", "float tensor", "picture", "odd", "nan"]
    kind = draw(st.sampled_from(kinds))
    if kind == "odd":
        return draw(ODD)
    if kind == "nan":
        return np.full(shape, np.nan)
    if kind == "picture":
        return Image.fromarray(values.astype(np.uint8)) if len(shape) == 2 and values.size else draw(pictures())
    if kind.endswith("tensor"):
        return torch.from_numpy(values).to(
            {"bool tensor": torch.bool, "float tensor": torch.float32}.get(kind, torch.int64)
        )
    return values.astype(kind)


@st.composite
def studies(draw: DrawFn) -> str:
    """TOML files: right ones, with keys and values exchanged, and text that is no TOML."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.text(alphabet="abc=[]{}\"'#\n .,-1é\x00", max_size=40))
    lines = []
    for key in draw(st.lists(st.sampled_from(sorted(RIGHT)), unique=True, max_size=5)):
        value = draw(st.sampled_from(RIGHT[key]))
        if draw(st.integers(0, 9)) == 0:
            value = draw(st.sampled_from(WRONG) | st.text(alphabet="ab\"'[]{}=1,", max_size=8))
        if draw(st.integers(0, 14)) == 0:
            key = draw(st.sampled_from(["method", "model", "", "a b", "modles", "'x'", "models.spec"]))
        lines.append(f"{key} = {value}")
    return "\n".join(lines)


RIGHT = {
    "models": ['"pets"', '["pets"]', '{spec = "pets", labels = ["a"]}', '[{spec = "timm:x", arch = "y"}]'],
    "data": ['"folder:x"', '[{spec = "folder:x", limit = 2}]', '["pets:x", "folder:y"]'],
    "methods": ['["legrad", "rollout(fusion=max)"]', '"legrad,genatt"', '["smooth(ixg,n=2)"]'],
    "metrics": ['["deletion"]', '"deletion(steps=3),sparseness"', '["iou"]'],
    "split": ['"test"', '"val"'],
    "limit": ["1", "200"],
    "seed": ["0", "7"],
    "target": ['"label"'],
    "maps": ['"raw"', '"abs"'],
    "at_once": ["1", "8"],
}
WRONG = [
    *("[]", "{}", "[[]]", '[""]', '""', "0", "-1", "true", "1.5", "nan", "inf", "1979-05-27", "[1]", "{limit = 2}"),
    *("99999999999999999999", "{spec = 1}", '{spec = "x", arch = 3}', '"rolout"', '["deletion(steps=0)"]', '"x"'),
    *('[{spec = "x", speck = 1}]', "'''a\nb'''", "[1, 'a']", '{spec = "folder:x", mask_kind = "y"}', "a", "="),
]
