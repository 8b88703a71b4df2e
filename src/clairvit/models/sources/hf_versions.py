"""The oldest version of transformers that each family of models needs; `make matrix` tests with each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from clairvit.errors import ModelUnavailable

OLDEST = "5.0"  # of the families that are not listed; pyproject.toml has it too
# Model type of a configuration -> oldest version. Qwen: older ones place image tokens by other arguments; LLaVA: with
# 5.3 two tests of generated words fail, of which it is not known whether they depend on the random weights alone.
FAMILIES: Mapping[str, str] = MappingProxyType({"qwen2_vl": "5.3", "qwen2_5_vl": "5.3", "llava": "5.13"})


def oldest_version(model_type: str) -> str:
    """Return the oldest version of transformers for a model type."""
    return FAMILIES.get(model_type, OLDEST)


def check_version(model_type: str) -> None:
    """Raise ModelUnavailable if the installed transformers is too old for a model type.

    Args:
        model_type: As in the model's configuration; "" for what any family needs.
    """
    import transformers

    needed, installed = oldest_version(model_type), str(transformers.__version__)
    if _numbers(installed) < _numbers(needed):
        subject = f"'{model_type}' models need" if model_type else "ClairViT needs"
        raise ModelUnavailable(
            f"{subject} transformers {needed} or newer, and {installed} is installed; type: "
            f'pip install "transformers>={needed}"'
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return (5, 0, 0) for "5.0.0rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
