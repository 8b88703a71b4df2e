"""Explanations as .npz files: arrays and JSON, written and read back; nothing is pickled."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import dumps_json, parse_json
from clairvit._rows import row_count
from clairvit.errors import BadInput
from clairvit.methods.explanation import Comparison, Explanation, Heads, TextRelevance
from clairvit.methods.result import LayerGrid, Refinement
from clairvit.models.preprocess import Preprocess
from clairvit.models.state_hash import WeightsHash

if TYPE_CHECKING:
    from clairvit.metrics.certificate import CertifiedPatches

FORMAT = 2  # of `about`; files of format 1, which did not say so, held no pixels and no class names
TENSORS = ("maps", "logits", "pixels", "standard_error", "chosen", "regions", "layers")
REFINEMENT = {"pass_scores": "scores", "in_top": "in_top"}  # array -> field of `Refinement`
HEADS = {"heads": "maps", "fused": "fused", "fused_whole": "whole"}  # array -> field of `Heads`
# Fields that `to_dict` has under their own names, and those that only the file needs.
DOCUMENTED = (*("method", "signed", "score", "model", "seed", "family", "class_specific", "activation", "versions"),)
EXTRA = ("classifier", "labels")
NARROW = {"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16}  # stored in float32
ADVICE = "expected a file that cv.Explanation.save wrote"


def npz_bytes(explanations: Mapping[str, Explanation]) -> bytes:
    """Return arrays `maps`, `layers`, `heads`, `logits`, `about` (JSON), …; of a comparison as 'METHOD/maps'.

    `pixels`, which methods share, are stored once.
    """
    arrays: dict[str, Any] = {}
    first = next(iter(explanations.values()), None)
    is_shared = first is not None and all(torch.equal(first.pixels, part.pixels) for part in explanations.values())
    for name, explanation in explanations.items():
        start = f"{name}/" if name else ""
        tensors = {field: getattr(explanation, field) for field in TENSORS}
        tensors |= {key: getattr(explanation.heads, field) for key, field in HEADS.items() if explanation.heads}
        tensors |= {key: getattr(explanation.refinement, field, None) for key, field in REFINEMENT.items()}
        for key, tensor in tensors.items():
            if tensor is not None:
                arrays["pixels" if key == "pixels" and is_shared else f"{start}{key}"] = _as_array(tensor)
        about = explanation.to_dict(values=False) | {field: getattr(explanation, field) for field in EXTRA}
        if explanation.certified is not None:
            about["certificate"] = explanation.certified.certificate.to_dict()  # with what it has of each photo
        dtypes = {
            key: str(tensor.dtype) for key, tensor in tensors.items() if str(getattr(tensor, "dtype", "")) in NARROW
        }
        arrays[f"{start}about"] = np.array(dumps_json(about | {"format": FORMAT, "dtypes": dtypes}))
    if isinstance(explanations, Comparison):
        content = {"skipped": explanations.skipped, "cost": vars(explanations.cost)}
        arrays["comparison"] = np.array(dumps_json(content))
    return arrays_as_bytes(arrays)


def arrays_as_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Return the content of a .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _as_array(tensor: Tensor) -> Any:
    """Return a tensor as an array of its own precision; what numpy has no type for, and half, in float32."""
    tensor = tensor.detach().cpu()
    return (tensor if tensor.dtype in (torch.bool, torch.float64) else tensor.float()).numpy()


def read_explanation(path: PathLike[str] | str) -> Explanation:
    """Return the explanation in a .npz file; raise BadInput if it is none, or holds several methods."""
    arrays = _read_arrays(path)
    methods = _methods_in(arrays)
    if "" not in methods:
        raise BadInput(
            f"'{path}' holds the maps of {len(methods)} methods ({', '.join(methods)}); expected those of one. Read it "
            "with cv.Comparison.load(path)."
        )
    return _explanation(arrays, "", path)


def read_comparison(path: PathLike[str] | str) -> Comparison:
    """Return the comparison in a .npz file; raise BadInput if it is none."""
    arrays = _read_arrays(path)
    methods = _methods_in(arrays)
    if "" in methods:
        raise BadInput(
            f"'{path}' holds the maps of one method; expected a file that cv.Comparison.save wrote. Read it with "
            "cv.Explanation.load(path)."
        )
    comparison = Comparison()
    for method in methods:
        comparison[method] = _explanation(arrays, f"{method}/", path)
    content = _parsed(arrays, "comparison", path) if "comparison" in arrays else {}
    comparison.skipped = dict(content.get("skipped", {}))
    comparison.cost = Cost(**content.get("cost", {}))
    return comparison


def _read_arrays(path: PathLike[str] | str) -> dict[str, Any]:
    """Return the arrays of a file by name; objects are not read, as they would be unpickled."""
    try:
        with np.load(Path(path), allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except OSError as error:
        if error.strerror is None:
            raise _unreadable(path, error) from error
        raise BadInput(f"'{path}' cannot be read ({error.strerror}); {ADVICE}.") from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        EOFError,
        NotImplementedError,
        zipfile.BadZipFile,
    ) as error:
        raise _unreadable(path, error) from error
    if not any(name.rpartition("/")[2] == "about" for name in arrays):
        raise BadInput(f"'{path}' holds no explanation, as it has no 'about'; {ADVICE}.")
    return arrays


def _methods_in(arrays: Iterable[str]) -> list[str]:
    """Return the methods of a file; "" for that of a single explanation."""
    return [start for start, _, key in (name.rpartition("/") for name in arrays) if key == "about"]


def _unreadable(path: PathLike[str] | str, error: Exception) -> BadInput:
    return BadInput(f"'{path}' is no .npz file of an explanation ({type(error).__name__}: {error}); {ADVICE}.")


def _parsed(arrays: Mapping[str, Any], name: str, path: PathLike[str] | str) -> dict[str, Any]:
    try:
        content = parse_json(str(arrays[name]))
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise BadInput(f"'{path}' has no table of values in '{name}'; {ADVICE}.")
    return content


def _explanation(arrays: Mapping[str, Any], start: str, path: PathLike[str] | str) -> Explanation:
    """Return one explanation of a file."""
    about = _parsed(arrays, f"{start}about", path)
    if about.get("format") != FORMAT:
        raise BadInput(
            f"'{path}' was written by another version of ClairViT ({about.get('versions', {}).get('clairvit', '?')}), "
            "without the pixels and class names that an explanation needs; expected a file of this version. Explain "
            "the images again, or read its arrays with numpy.load."
        )
    try:
        explanation = _from_parts(arrays, start, about)
        counts = {row_count(getattr(explanation, name), axis) for name, axis in explanation.row_axes.items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unreadable(path, error) from error
    if counts - {None} != {len(explanation)}:
        raise BadInput(f"'{path}' is damaged: its fields are of {sorted(counts - {None})} maps; {ADVICE}.")  # type: ignore[type-var]
    return explanation


def _from_parts(arrays: Mapping[str, Any], start: str, about: Mapping[str, Any]) -> Explanation:
    """Return an explanation from its arrays and from what `about` says."""
    from clairvit.metrics.check_result import CheckResult  # metrics come after methods

    def tensor(key: str) -> Tensor | None:
        array = arrays.get(f"{start}{key}", arrays.get(key) if key == "pixels" else None)
        if array is None:
            return None
        dtype = NARROW.get(about["dtypes"].get(key))
        return torch.from_numpy(array) if dtype is None else torch.from_numpy(array).to(dtype)

    tensors: dict[str, Any] = {key: tensor(key) for key in TENSORS}
    for key in ("maps", "logits", "pixels"):
        if tensors[key] is None:
            raise KeyError(key)
    heads = {field: tensor(key) for key, field in HEADS.items()}
    passes = {field: tensor(key) for key, field in REFINEMENT.items()}
    texts = about["text_relevance"] or ()
    return Explanation(
        **tensors,
        **{field: about[field] for field in DOCUMENTED},
        weights=WeightsHash(about["weights_hash"]),
        classifier=about["classifier"],
        labels=tuple(about["labels"]),
        layer_grids=tuple(LayerGrid(**grid) for grid in about.get("layer_grids", ())),
        targets=tuple(about["targets"]),
        classes=tuple(about["classes"]),
        probabilities=tuple(about["probabilities"]),
        names=tuple(about["names"]),
        notes=tuple(about["notes"]),
        preprocess=Preprocess.from_dict(about["preprocess"]),
        cost=Cost(**about["cost"]),
        heads=None if heads["maps"] is None else Heads(about["heads"]["method"], **heads),  # type: ignore[arg-type]
        refinement=None if passes["scores"] is None else Refinement(**passes),  # type: ignore[arg-type]
        text_relevance=tuple(
            TextRelevance(tuple(text["tokens"]), torch.tensor(_with_nan(text["values"]), dtype=tensors["maps"].dtype))
            for text in texts
        ),
        checked=None if about["check"] is None else CheckResult.from_dict(about["check"]),
        certified=_certified(about),
    )


def _certified(about: Mapping[str, Any]) -> CertifiedPatches | None:
    """Return the patches that a certificate names, with the whole certificate; None in files without."""
    from clairvit.metrics.certificate import Certificate, CertifiedPatches  # metrics come after methods

    if about.get("certified") is None:
        return None
    return CertifiedPatches.from_dict(about["certified"], Certificate.from_dict(about["certificate"]))


def _with_nan(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
