"""Leaks: three hundred explanations, and memory is where it was after the first hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MEGABYTES = 20.0
SCRIPT = """
import ctypes, gc, json, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import clairvit as cv
from helpers.verbs import KINDS, NAME, TARGET
from helpers.tiny_models import build, pixels

trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

def resident():
    # Return the megabytes that this process holds, after the collector and the allocator have given back theirs.
    gc.collect()
    if trim is not None:
        trim(0)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    return 0.0  # elsewhere live tensors alone are counted

def live():
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

model = cv.wrap(build(NAME))
methods = list(KINDS.values())
for method in methods:  # lazy imports, caches of kernels, what is remembered of the model
    cv.explain(model, pixels(NAME, batch=1), method, target=TARGET)
gc.collect()
gc.freeze()  # the modules: the collector need not look at them thirty times
memory, tensors = [], []
for number in range(300):
    cv.explain(model, pixels(NAME, batch=1, seed=number), methods[number % len(methods)], target=TARGET)
    if number % 10 == 9:
        memory.append(resident())
        tensors.append(live())
print(json.dumps({"memory": memory, "tensors": tensors}))
"""


@pytest.mark.slow
def test_three_hundred_explanations_leave_memory_flat() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(TESTS)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    memory, tensors = measured["memory"], measured["tensors"]
    third = len(memory) // 3
    growth = sum(memory[-third:]) / third - sum(memory[:third]) / third
    assert growth <= MEGABYTES, f"{growth:.1f} MB more after 300 explanations: {memory}"
    assert tensors[-1] <= tensors[third - 1], f"tensors that stay alive: {tensors}"
