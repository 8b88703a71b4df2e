"""Certificates: how many patches of a map suffice on how many photos, by split conformal prediction.

n calibration photos have sizes k_1 … k_n (`metrics/answer_size.py`). With q the ⌈(n + 1)(1 − α)⌉-th smallest of them,
k ≤ q for a further photo with probability ≥ 1 − α, if all n + 1 are exchangeable; nothing is assumed of the model or of
the method. Regions that a person drew have nothing to choose: what is certified is the share of photos, by Clopper and
Pearson's exact interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from clairvit._io import parse_json, to_json
from clairvit._rows import Rows, per_row, same
from clairvit._tables import TableRow, Tabular
from clairvit._version import __version__
from clairvit.errors import BadInput, Message, Verb
from clairvit.metrics.confidence_intervals import FEWEST, share_interval

KIND = "clairvit certificate"
FORMAT = 1
Statement = Literal["keep", "change", "region"]
STATEMENTS: tuple[str, ...] = get_args(Statement)
MAKE = Message(" Make one by ", Verb("certify", file="certificate.json"), ".")


def conformal_rank(count: int, keep: float) -> int:
    """Return ⌈(n + 1) · keep⌉, in whole numbers: 0.9 is nine tenths."""
    return math.ceil((count + 1) * Fraction(str(keep)))


def conformal_quantile(values: Sequence[float], keep: float) -> float:
    """Return the ⌈(n + 1) · keep⌉-th smallest of n values; infinity where there are fewer."""
    rank = conformal_rank(len(values), keep)
    return sorted(values)[rank - 1] if rank <= len(values) else math.inf


def fewest_photos(keep: float) -> int:
    """Return the smallest n with ⌈(n + 1) · keep⌉ ≤ n, which is ⌈1/α⌉ − 1: with fewer no quantile is finite."""
    return math.ceil(1 / (1 - Fraction(str(keep)))) - 1


@dataclass(frozen=True)
class Certificate(Tabular):
    """What holds for a share of photos like the calibration photos, and the photos that it was computed from.

    Attributes:
        statement: "keep": the top patches alone keep the model's answer; "change": hiding them changes it; "region":
            the inside of a region that was drawn in each photo alone keeps it.
        method: The method that ranks the patches; "" for regions.
        keep: The share of photos that was asked for, 1 − α.
        names: The calibration photos, n of them.
        sizes: Of each, the smallest number of top patches for which the statement holds, for all larger ones tried,
            too; None where it holds for none. For regions the number of patches in them.
        holds: For regions, whether the statement holds on each photo; else empty.
        tried: The numbers of patches that were tried, rising.
        grid: Rows and columns of patches (for clips frames, rows and columns).
        size: Height and width of the images, in pixels.
        classes: What the answer is: () the predicted class; (a,) the photos are those that the model calls a; (a, b)
            those where a is above b.
        target: The name of that class, or contrast; "" for the predicted class.
        score: The kind of score that the maps explain.
        removal: How the other patches were removed.
        replaced: What the others are, where their tokens could not be left out; "" where they were.
        seed: The seed of everything random.
        autocast: The half precision of the passes, or None.
        model: The name of the model.
        weights: The hash of its parameters and buffers.
        preprocess: Its preprocessing.
        data: The hash of the calibration photos.
        code: The hash of the method's code, for a method of one's own.
        notes: Photos that were left out, fallbacks.
        version: The version of ClairViT.

    Example:
        >>> import clairvit as cv, torch
        >>> noise = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
        >>> certificate = cv.certify("scenes", noise, "ixg", keep=0.5)
        >>> certificate.n, certificate.patches, certificate.q == sorted(certificate.sizes)[2]
        (4, 144, True)
    """

    statement: Statement
    method: str
    keep: float
    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    tried: tuple[int, ...]
    grid: tuple[int, ...]
    size: tuple[int, int]
    model: str
    weights: str
    holds: tuple[bool, ...] = ()
    classes: tuple[int, ...] = ()
    target: str = ""
    score: str = "logit"
    removal: str = "token"
    replaced: str = ""
    seed: int = 0
    autocast: str | None = None
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""
    code: str = ""
    notes: tuple[str, ...] = ()
    version: str = __version__

    @property
    def n(self) -> int:
        """Return the number of calibration photos."""
        return len(self.names)

    @property
    def alpha(self) -> float:
        """Return the share of photos on which the statement may fail."""
        return float(1 - Fraction(str(self.keep)))

    @property
    def patches(self) -> int:
        """Return the number of patches of an image."""
        return math.prod(self.grid)

    @property
    def q(self) -> int | None:
        """Return the certified size: the ⌈(n + 1)(1 − α)⌉-th smallest of `sizes`; None where it is infinite.

        Regions have none.
        """
        if self.statement == "region":
            return None
        value = conformal_quantile([math.inf if size is None else size for size in self.sizes], self.keep)
        return None if math.isinf(value) else int(value)

    @property
    def share(self) -> tuple[float, float]:
        """Return the 95 % interval of the share of photos on which a region keeps the answer; NaN for patches."""
        if self.statement != "region":
            return math.nan, math.nan
        return share_interval(sum(self.holds), self.n)

    @property
    def population(self) -> str:
        """Return which photos the statement is about."""
        if len(self.classes) == 2:
            return f"photos like the calibration photos for which {self.target} is above 0"
        return f"photos like the calibration photos{f' that the model calls {self.target}' if self.classes else ''}"

    @property
    def sentence(self) -> str:
        """Return the statement in words."""
        if self.statement == "region":
            low, high = self.share
            asked = "which is at least" if low >= self.keep else "which does not show"
            return (
                f"{self._keeps} from the inside of the region alone{self._others} on {sum(self.holds)} of {self.n} "
                f"photos: on {_percent(low, 1)} to {_percent(high, 1)} of {self.population} (95 % interval), {asked} "
                f"the {_percent(self.keep)} asked for."
            )
        if self.q is None:
            return f"No number of top patches that was tried is enough for {self._for}: {self._of_all(self.tried[-1])}."
        return f"{self.statement_about(f'the top {self.q}')}, for {self._for} ({self.n} of them)."

    def statement_about(self, these: str) -> str:
        """Return the statement about "these 26" of the patches, as the beginning of a sentence."""
        if self.statement == "keep":
            return f"{self._keeps} from {these} of {self.patches} patches alone{self._others}"
        answer = f"takes {self.target} to 0 or below" if len(self.classes) == 2 else "changes the model's answer"
        return f"Hiding {these} of {self.patches} patches{self._others} {answer}"

    @property
    def _keeps(self) -> str:
        return f"The model keeps {f'{self.target} above 0' if len(self.classes) == 2 else 'its answer'}"

    @property
    def _others(self) -> str:
        """Return what stands where patches were removed, if their tokens could not be left out."""
        return f" ({self.replaced})" if self.replaced else ""

    @property
    def _for(self) -> str:
        return f"{_percent(self.keep)} of {self.population}"

    def _of_all(self, size: int) -> str:
        """Return on how many photos the statement holds for the largest size that was tried."""
        count = sum(known is not None for known in self.sizes)
        return f"{size} of {self.patches} are on {count} of {self.n} photos"

    def __str__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, with q, n, α and the sentence."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        computed = {**self._computed(), "sentence": self.sentence}
        return dict(to_json({"kind": KIND, "format": FORMAT, **values, **computed}))

    def _computed(self) -> dict[str, Any]:
        """Return the numbers that follow from the photos; a file in which they do not was changed by hand."""
        low, high = self.share
        share = None if math.isnan(low) else [low, high]
        return {"n": self.n, "alpha": self.alpha, "patches": self.patches, "q": self.q, "share": share}

    def summary(self) -> dict[str, Any]:
        """Return the document without what it has of each photo."""
        return {name: value for name, value in self.to_dict().items() if name not in ("names", "sizes", "holds")}

    def _table(self) -> list[TableRow]:
        """Return a row per calibration photo: its size in patches and as a share, and whether the statement holds."""
        q = math.inf if self.q is None else self.q
        holds = self.holds or tuple(size is not None and size <= q for size in self.sizes)
        return [
            {"image": name, "patches": size, "share": None if size is None else size / self.patches, "holds": held}
            for name, size, held in zip(self.names, self.sizes, holds, strict=True)
        ]

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the certificate (.json), which `load` reads, or a row per calibration photo (.csv).

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
        """
        return super().save(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Certificate:
        """Read a certificate that was saved as .json.

        Args:
            path: A file that `save` wrote.

        Returns:
            The certificate.

        Raises:
            BadInput: The file cannot be read, is no certificate, or was changed by hand.
        """
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"The certificate '{path}' cannot be read: {error.strerror}.", MAKE) from error
        except ValueError as error:
            raise BadInput(f"'{path}' is not JSON ({error}), so it is no certificate.", MAKE) from error
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: Any, source: str = "The document") -> Certificate:
        """Return the certificate that `to_dict` described; raise BadInput where it is none, or was changed."""
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise BadInput(f'\'{source}\' is JSON, and no certificate: expected "kind": "{KIND}".', MAKE)
        if content.get("format") != FORMAT:
            raise BadInput(
                f"'{source}' is a certificate of format {content.get('format')}, written by ClairViT "
                f"{content.get('version')}; this is {__version__}, which reads format {FORMAT}.",
                MAKE,
            )
        names = {entry.name for entry in fields(cls)}
        try:
            values: dict[str, Any] = {
                key: tuple(v) if isinstance(v, list) else v for key, v in content.items() if key in names
            }
            certificate = cls(**values)
            changed = [name for name, value in certificate._computed().items() if content.get(name) != value]
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise BadInput(f"'{source}' is a damaged certificate ({type(error).__name__}: {error}).", MAKE) from error
        if changed:
            raise BadInput(
                f"'{source}' was changed after cv.certify wrote it: its '{changed[0]}' is {content.get(changed[0])!r}, "
                f"and its photos give {certificate._computed()[changed[0]]!r}. Take the file as it was."
            )
        return certificate


def check_keep(keep: float) -> float:
    """Return the share as a Python number; raise BadInput unless it lies between 0 and 1."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep < 1:
        raise BadInput(f"keep={keep!r} was given; expected a share of photos between 0 and 1, such as 0.9.")
    return float(keep)


def check_count(count: int, keep: float, statement: Statement, left_out: Sequence[str] = ()) -> None:
    """Raise BadInput for too few photos: the certified size would be infinite, or a share have no interval."""
    photos = f"{count} photo{'s' * (count != 1)}"
    more = "".join(f" {reason}." for reason in left_out)
    if statement == "region":
        if count < FEWEST:
            raise BadInput(f"{photos} with regions say nothing of other photos; expected {FEWEST} or more.{more}")
    elif count < (fewest := fewest_photos(keep)):
        alpha = float(1 - Fraction(str(keep)))
        raise BadInput(
            f"{photos} cannot certify anything for {_percent(keep)} of photos; expected {fewest} calibration photos or "
            f"more, ⌈1/α⌉ − 1 with α = {alpha:g}, or a smaller share than keep={keep:g}.{more}"
        )


class CertifiedPatches(Rows, Tabular):
    """The patches of each map that a certificate is about.

    Args:
        patches: bool [B, rows, columns], the top q patches of each map.
        names: B names of images.
        targets: B names of what the maps explain.
        certificate: The certificate.
        held: Whether the statement holds on each photo, where it was tested; else empty.
        answers: What the model answers then, where it was tested; else empty.

    Example:
        >>> import clairvit as cv, torch
        >>> model = cv.load("scenes")
        >>> noise = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
        >>> certificate = cv.certify(model, noise, "ixg", keep=0.5)
        >>> marked = cv.explain(model, noise[:1], "ixg").certify(certificate)
        >>> int(marked.patches.sum()) == certificate.q
        True
    """

    patches: Tensor = per_row()
    names: tuple[str, ...] = per_row()
    targets: tuple[str, ...] = per_row()
    certificate: Certificate = same()
    held: tuple[bool, ...] = per_row(default=())
    answers: tuple[str, ...] = per_row(default=())

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return one or two sentences per map: the statement about these patches, and whether it holds here."""
        certificate = self.certificate
        about = f"{certificate.statement_about(f'these {certificate.q}')}, for {certificate._for}."
        if certificate.q == certificate.patches:
            about += " These are all patches: no fewer are certified."
        if not self.held:
            return (about,) * len(self)
        then = "from them alone" if certificate.statement == "keep" else "without them"
        return tuple(
            f"{about} On this photo it {'holds' if held else 'does not hold'}: {then} the answer is {answer}."
            for held, answer in zip(self.held, self.answers, strict=True)
        )

    @property
    def condition(self) -> str:
        """Return what the statement takes for granted and nothing here checks."""
        return "Whether a photo is like the calibration photos is not checked."

    @property
    def sentence(self) -> str:
        """Return the sentence of a single map; raise BadInput for several."""
        if len(self) != 1:
            raise BadInput(f"These are the patches of {len(self)} maps; expected one: read .sentences.")
        return self.sentences[0]

    def __str__(self) -> str:
        several = len(set(self.sentences)) > 1
        lines = [f"{name}: {text}" for name, text in zip(self.names, self.sentences, strict=True)]
        return "\n".join([*(lines if several else self.sentences[:1]), self.condition])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values: the certificate without its photos, and (row, column) of the patches."""
        maps = [
            {
                "name": name,
                "target": target,
                "patches": patches.nonzero().tolist(),
                "held": self.held[row] if self.held else None,
                "answer": self.answers[row] if self.answers else None,
                "sentence": self.sentences[row],
            }
            for row, (name, target, patches) in enumerate(zip(self.names, self.targets, self.patches, strict=True))
        ]
        return {"certificate": self.certificate.summary(), "condition": self.condition, "maps": maps}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], certificate: Certificate) -> CertifiedPatches:
        """Return what `to_dict` described, given the whole certificate."""
        maps = content["maps"]
        patches = torch.zeros(len(maps), *certificate.grid, dtype=torch.bool)
        for row, entry in enumerate(maps):
            for place in entry["patches"]:
                patches[(row, *place)] = True
        return cls(
            patches,
            tuple(entry["name"] for entry in maps),
            tuple(entry["target"] for entry in maps),
            certificate,
            tuple(entry["held"] for entry in maps if entry["held"] is not None),
            tuple(entry["answer"] for entry in maps if entry["answer"] is not None),
        )

    def _table(self) -> list[TableRow]:
        """Return a row per map."""
        certificate = self.certificate
        return [
            {"image": entry["name"], "target": entry["target"], "method": certificate.method}
            | {"q": certificate.q, "patches": certificate.patches, "keep": certificate.keep}
            | {"held": entry["held"], "answer": entry["answer"], "sentence": entry["sentence"]}
            for entry in self.to_dict()["maps"]
        ]


def _percent(share: float, digits: int = 6) -> str:
    """Return 0.9 as "90 %"; NaN as it is."""
    return f"{round(100 * share, digits):g} %"
