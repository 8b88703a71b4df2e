"""Draw the pictures of docs/targets.md from generated scenes and the built-in `scenes` model.

python docs/generate_targets.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import clairvit as cv
from clairvit.data.scenes import CLASSES, draw, plan, with_class

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from embedding_truth import scene_pair

FOLDER = Path(__file__).parent / "images"
SEED, DPI = 5, 110


def main() -> None:
    scenes = cv.load("scenes")
    pair = scene_pair()
    first, second = plan(SEED, 0, 2), plan(SEED, 1, 2)
    names = [str(item.marker.class_name) for item in first.objects if item.marker is not None]
    third = next(name for name in CLASSES if name not in names)
    pictures = [draw(first).picture, draw(with_class(with_class(second, names[0]), third, 1)).picture]
    prompts = [cv.Text(f"a disc with {name}", against=None) for name in names]
    by_prompt = cv.explain(pair, pictures[0], "attnlrp", targets=[*prompts, cv.Contrast(*prompts)])
    print(by_prompt.save(FOLDER / "targets-text.png", dpi=DPI))
    print(by_prompt.targets, by_prompt.target_scores)
    both = cv.match(scenes, *pictures, "attnlrp")
    print(both.save(FOLDER / "targets-similar.png", dpi=DPI))
    print(both)


if __name__ == "__main__":
    main()
