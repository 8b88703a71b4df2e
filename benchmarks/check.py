"""What the verdicts of `check` are worth: true maps, shuffled ones, and maps that are wrong and plausible.

    OMP_NUM_THREADS=1 python benchmarks/check.py record pets.npz --data pets:PATH --trimaps PATH/annotations/trimaps
    python benchmarks/check.py record dinov2.npz --data pets:PATH --trimaps … --model file:dinov2-pets.safetensors \
        --arch timm:vit_small_patch14_dinov2 --labels pets-labels.json --resize 248
    python benchmarks/check.py record vitb.npz --data folder:PHOTOS --model file:vitb.safetensors \
        --arch timm:vit_base_patch16_224 --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5
    python benchmarks/check.py table pets.npz dinov2.npz vitb.npz --tuning other-pets.npz --json check.json
    python benchmarks/check.py table docs/results/check.json

`record` runs the passes of a check once per photo (the random sets, and without what each map marks) and stores the
scores with all maps; photos are drawn from those that the results in docs are not of. `table` weighs them by the
functions of the package and prints Markdown; thresholds were chosen on the photos of `--tuning`, which no table counts.
`--first` takes other photos, so that several files share the work.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import clairvit as cv
from clairvit._rng import make_generator
from clairvit.data.open import open_data
from clairvit.metrics.check import PASSES, Design, Measured, removals_of, scores_of_class, weigh
from clairvit.metrics.check_result import CLEAR_FALL, PREDICTS, SPECIFIC, SUPPORTED, YARDSTICK, judge
from clairvit.metrics.removal_prediction import edge_map
from clairvit.models.images import resize_and_crop
from clairvit.numerics import pool_to_grid
from clairvit.perturbation.probe import probing

DEFAULT, OTHER = "attnlrp+plus", "genatt"  # the yardsticks
TRUE = (DEFAULT, OTHER, "gradcam")
SHOWN_IN_RESULTS = 200  # photos of the tables in docs, drawn with seed 0: not used here
LOADED = ("arch", "labels", "resize", "mean", "std")  # arguments of cv.load
ARRAYS = ("logits", "sets", "tops", "maps")
VERDICTS = ("supported", "weak", "not better than chance")
COLUMNS = ("effect", "partial", "yardstick", "prediction", "specific", "fall")
Array = NDArray[np.float64]


# Passes


def photo_paths(data: str, count: int) -> list[str]:
    """Return photos of a data set that the tables in docs are not of, drawn with seed 7."""
    opened = open_data(data)
    used = set(map(str, open_data(data, limit=SHOWN_IN_RESULTS, seed=0).dataset.names))
    rest = [name for name in map(str, opened.dataset.names) if name not in used]
    return [str(Path(data.split(":", 1)[1]) / name) for name in random.Random(7).sample(rest, len(rest))[:count]]


def silhouette(trimap: Path, model: cv.Model, grid: tuple[int, int]) -> Tensor:
    """Return the share of each patch that the animal or its border covers."""
    with Image.open(trimap) as image:
        cropped = resize_and_crop(image, model.preprocess, "nearest")
    inside = torch.from_numpy(np.array(cropped) != 2).double()
    return pool_to_grid(inside[None], grid)[0]


def candidate_maps(
    model: cv.Model, photo: str, classes: Sequence[int], grid: tuple[int, int], previous: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return kinds of maps [rows, columns] for the first of three classes: true, and of other classes and photos."""
    first, second, other = classes
    maps: dict[str, Tensor] = {}

    def add(kind: str, explanation: cv.Explanation) -> None:
        maps[kind] = pool_to_grid(explanation.maps.double(), grid)[0]

    for method, explanation in cv.compare(model, photo, list(TRUE), target=first).items():
        add(method, explanation)
    for name, target in (("second class", second), ("random class", other)):
        for method, explanation in cv.compare(model, photo, [DEFAULT, OTHER], target=target).items():
            add(f"{method} of the {name}", explanation)
    maps |= {f"{method} of another photo": previous[method] for method in (DEFAULT,) if method in previous}
    flat = maps[DEFAULT].flatten()
    order = torch.randperm(len(flat), generator=make_generator(first, "benchmarks/shuffled maps", second))
    maps[f"{DEFAULT}, shuffled"] = flat[order].reshape(grid)
    add("center", cv.explain(model, photo, "center"))
    add("random", cv.explain(model, photo, "random"))
    return maps


def record(arguments: argparse.Namespace) -> None:
    """Run the passes for all photos and store them."""
    given: dict[str, Any] = {name: value for name in LOADED if (value := getattr(arguments, name)) is not None}
    model = cv.load(arguments.model, device=arguments.device, **given)
    photos = photo_paths(arguments.data, arguments.first + arguments.photos + 1)[arguments.first :]
    generator = np.random.default_rng(3)
    previous: dict[str, Tensor] = {}
    rows: list[dict[str, Any]] = []
    for photo in photos:
        trace = cv.trace(model, photo)
        rows_columns = trace.layout.plane
        first, second = trace.logits[0].topk(2).indices.tolist()
        other = int(generator.choice([c for c in range(trace.logits.shape[1]) if c != first]))
        maps = candidate_maps(model, photo, (first, second, other), rows_columns, previous)
        maps["edges (Sobel)"] = edge_map(trace.pixels, rows_columns).reshape(rows_columns)
        if arguments.trimaps is not None:
            maps["silhouette"] = silhouette(arguments.trimaps / f"{Path(photo).stem}.png", model, rows_columns)
        is_first, previous = not previous, {method: maps[method] for method in (DEFAULT,)}
        if is_first:
            continue  # it has no other photo before it
        design = Design.of(trace.layout.patches, PASSES, 0)
        keep = [design.keep]
        for values in maps.values():
            place = values.float().flatten().argsort(descending=True, stable=True).argsort()
            keep += [(place >= count)[None] for count in design.hidden]
        with probing(trace, "token", label="check", forwards=len(torch.cat(keep)), seed=0) as probe:
            scores = probe.score_kept(torch.cat(keep)[None], lambda logits, _: logits.double())[0]
        tops = scores[PASSES:].reshape(len(maps), len(design.hidden), -1)
        scored = {"logits": trace.logits[0].detach().double(), "sets": scores[:PASSES], "tops": tops}
        scored["maps"] = torch.stack(list(maps.values())).flatten(1)
        rows.append({"name": Path(photo).stem, "classes": (first, second, other), **scored})
        if len(rows) % 5 == 0 or photo == photos[-1]:
            store(arguments.out, arguments.name or model.name, list(maps), rows_columns, rows)
            print(f"{len(rows)} of {arguments.photos} photos", flush=True)


def store(out: Path, model: str, kinds: list[str], grid: tuple[int, int], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what was recorded so far."""
    facts = {"model": model, "kinds": kinds, "grid": list(grid), "names": [row["name"] for row in rows]}
    arrays: dict[str, Any] = {name: np.stack([np.asarray(row[name], np.float32) for row in rows]) for name in ARRAYS}
    np.savez_compressed(out, facts=json.dumps(facts), classes=np.array([row["classes"] for row in rows]), **arrays)


# What they say


@dataclass(frozen=True)
class Recorded:
    """What a check says of all kinds of maps of the photos of one model.

    Args:
        model: Its name.
        kinds: The kinds of maps.
        photos: The names of the photos.
        values: [photos, kinds, columns], the numbers of `COLUMNS`.
        tuning: How many photos, from the first on, thresholds were chosen on.
    """

    model: str
    kinds: tuple[str, ...]
    photos: tuple[str, ...]
    values: Array
    tuning: int = 0

    def by_photo(self) -> dict[str, Array]:
        """Return photo -> [kinds, columns]."""
        return dict(zip(self.photos, self.values, strict=True))

    def verdicts(self, row: int, kind: int) -> tuple[str, bool]:
        """Return the verdict of one map, and whether it is called specific to its class."""
        effect, partial, yardstick, _, specific, fall = self.values[row, kind].tolist()
        verdict = judge(effect, partial, yardstick, fall >= CLEAR_FALL)
        return verdict, verdict != "not better than chance" and specific >= SPECIFIC


def read_passes(path: Path) -> Recorded:
    """Return the numbers of all maps of one file of passes, by the functions that `check` uses."""
    with np.load(path) as stored:
        facts = json.loads(str(stored["facts"]))
        arrays = {name: torch.from_numpy(stored[name].astype(np.float64)) for name in ARRAYS}
        classes = stored["classes"].tolist()
    kinds, grid = facts["kinds"], tuple(facts["grid"])
    edges = kinds.index("edges (Sobel)")
    design = Design.of(arrays["maps"].shape[-1], PASSES, 0)
    values = np.zeros((len(classes), len(kinds), len(COLUMNS)))
    for row, (first, second, _) in enumerate(classes):
        of_photo = {name: array[row] for name, array in arrays.items()}
        sets, full = (scores_of_class(scores, first, second) for scores in (of_photo["sets"], of_photo["logits"][None]))
        yardsticks = [of_photo["maps"][kinds.index(method)] for method in (DEFAULT, OTHER)]
        for kind in range(len(kinds)):
            measured = Measured(full[0], sets, scores_of_class(of_photo["tops"][kind], first, second), 0.0)
            values_of_map = of_photo["maps"][kind]
            order = values_of_map.argsort(descending=True, stable=True)
            weighed = weigh(design, measured, values_of_map, order, yardsticks, of_photo["maps"][edges], grid)
            removals = removals_of(design, measured, len(of_photo["maps"][kind]))
            effect = sum(removal.effect for removal in removals) / len(removals)
            fall = max(removal.fall for removal in removals)
            numbers = (effect, weighed.partial, weighed.yardstick, weighed.prediction, weighed.specific, fall)
            values[row, kind] = [0.0 if number is None else number for number in numbers]
    return Recorded(facts["model"], tuple(kinds), tuple(facts["names"]), values)


def print_table(recorded: Recorded) -> None:
    """Print the verdicts of all kinds of maps, of the photos that nothing was tuned on."""
    rows = range(recorded.tuning, len(recorded.photos))
    print(f"\n**{recorded.model}**, {len(rows)} photos (other than the {recorded.tuning} for tuning)\n")
    print(f"| map, tested for the predicted class | {' | '.join(VERDICTS)} | called specific | predicts (median) |")
    print("|---|--:|--:|--:|--:|--:|")
    for kind, name in enumerate(recorded.kinds):
        said = [recorded.verdicts(row, kind) for row in rows]
        shares = [np.mean([verdict == wanted for verdict, _ in said]) for wanted in VERDICTS]
        shares.append(np.mean([specific for _, specific in said]))
        shares.append(np.median(np.clip(recorded.values[rows, kind, COLUMNS.index("prediction")], 0, None) ** 2))
        print(f"| {name} | {percentages(shares)} |")


def percentages(shares: Sequence[Any]) -> str:
    """Return shares as cells of a table, '93 % | 5 %'."""
    return " | ".join(f"{100 * share:.0f} %" for share in shares)


def print_operating_curve(recorded: Recorded, kinds: Sequence[str]) -> None:
    """Print how often kinds of maps are supported at other thresholds of the partial correlation and the yardstick."""
    rows = range(recorded.tuning, len(recorded.photos))
    print(f"\n**{recorded.model}**: supported, at other thresholds\n")
    print("| effect ≥ | partial ≥ | yardstick | " + " | ".join(kinds) + " |\n|--:|--:|--:|" + "--:|" * len(kinds))
    for effect_limit in (2.0, 3.0, 4.0, 5.0):
        for partial_limit, part in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.5), (0.2, 0.5), (0.2, 0.7), (0.3, 0.7)):
            shares = []
            for name in kinds:
                effect, partial, yardstick, _, _, fall = recorded.values[rows, recorded.kinds.index(name)].T
                predicts = (partial >= partial_limit) & (partial >= part * np.clip(yardstick, 0, None))
                shares.append(np.mean(predicts & (effect >= effect_limit) & (fall >= CLEAR_FALL)))
            print(f"| {effect_limit:g} | {partial_limit:g} | {part:g} | {percentages(shares)} |")


def merged(judged: Sequence[Recorded], tuning: Sequence[Recorded]) -> list[Recorded]:
    """Return one entry per model, with each photo of all its files once: those for tuning, then the others."""
    models = []
    for model in dict.fromkeys(part.model for part in judged):
        first = {name: row for part in tuning if part.model == model for name, row in part.by_photo().items()}
        rest = {name: row for part in judged if part.model == model for name, row in part.by_photo().items()}
        by_photo = first | {name: row for name, row in rest.items() if name not in first}
        kinds = next(part.kinds for part in judged if part.model == model)
        count = len(first) + sum(part.tuning for part in judged if part.model == model)
        models.append(Recorded(model, kinds, tuple(by_photo), np.stack(list(by_photo.values())), count))
    return models


def read(path: Path) -> list[Recorded]:
    """Return the numbers of a file of passes, or of a JSON file of numbers."""
    if path.suffix != ".json":
        return [read_passes(path)]
    return [
        Recorded(
            entry["model"], tuple(entry["kinds"]), tuple(entry["photos"]), np.array(entry["values"]), entry["tuning"]
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))["models"]
    ]


def table(arguments: argparse.Namespace) -> None:
    """Print the tables of all models, and keep their numbers."""
    judged, tuning = ([part for path in paths for part in read(path)] for paths in (arguments.files, arguments.tuning))
    models = merged(judged, tuning)
    print(f"supported: effect ≥ {SUPPORTED:g}, a fall of {100 * CLEAR_FALL:g} points beyond that of random parts,")
    print(f"partial correlation ≥ {PREDICTS:g} and ≥ {YARDSTICK:g} × that of the class's own maps;")
    print(f"specific: correlation with the difference to the runner-up ≥ {SPECIFIC:g}")
    for recorded in models:
        print_table(recorded)
        if arguments.curve:
            wrong = [name for name in recorded.kinds if name not in TRUE and name != "random"]
            print_operating_curve(recorded, [DEFAULT, OTHER, *wrong])
    if arguments.json is not None:
        content = [vars(each) | {"values": np.round(each.values, 2).tolist()} for each in models]
        arguments.json.write_text(json.dumps({"columns": COLUMNS, "models": content}, separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="run the passes of all photos")
    recording.add_argument("out", type=Path)
    recording.add_argument("--data", required=True, help="pets:PATH, folder:PATH, …")
    recording.add_argument("--trimaps", type=Path, help="a folder of trimaps, for silhouettes")
    recording.add_argument("--photos", type=int, default=300)
    recording.add_argument("--first", type=int, default=0, help="leave out so many photos, which another file has")
    recording.add_argument("--model", default="pets")
    recording.add_argument("--name", help="of the model in tables")
    recording.add_argument("--arch", help="of a weights file, e.g. timm:vit_small_patch14_dinov2")
    recording.add_argument("--labels", help="of a weights file")
    recording.add_argument("--resize", type=int, help="of a weights file: the short side before the crop, in pixels")
    recording.add_argument("--mean", type=float, nargs=3)
    recording.add_argument("--std", type=float, nargs=3)
    recording.add_argument("--device", default="cpu")
    recording.set_defaults(run=record)
    tables = commands.add_parser("table", help="print the tables of recorded passes, or of a JSON file of numbers")
    tables.add_argument("files", type=Path, nargs="+")
    tables.add_argument("--tuning", type=Path, nargs="*", default=[], help="files of photos that thresholds rest on")
    tables.add_argument("--curve", action="store_true", help="also the shares at other thresholds")
    tables.add_argument("--json", type=Path, help="a file for the numbers of all maps")
    tables.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
