"""Requests and responses of the HTTP API; the OpenAPI document is generated from them."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
import torch
from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from torch import Tensor

# The letters of method strings; the registry parses them.
MethodText = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.,=+:()# \-]+$")]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
PhotoId = Annotated[str, StringConstraints(pattern=r"^(demo|[0-9a-f]{32})$")]
ClassText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
PromptText = Annotated[str, StringConstraints(min_length=1, max_length=400)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
ActivationName = Literal["softmax", "sigmoid", "raw"]
ScoreKind = Literal["logit", "prob", "logprob"]
Removal = Literal["token", "mean", "black", "blur"]


DEFAULT = "default"


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class EncodedArray(_Response):
    """An array: little-endian float32, row by row, in base64."""

    shape: list[int]
    float32: str


def encode_array(tensor: Tensor) -> EncodedArray:
    """Return a tensor of any shape as base64."""
    array = tensor.detach().to("cpu", torch.float32).numpy()
    return EncodedArray(
        shape=list(array.shape), float32=base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()
    )


class Problem(_Response):
    """An error: what was seen, what was expected, what to do next."""

    kind: Literal[
        "bad-request",
        "bad-photo",
        "photo-expired",
        "not-found",
        "not-allowed",
        "too-large",
        "too-slow",
        "busy",
        "internal-error",
    ]
    message: str
    retry_after: int | None = None


class Limits(_Response):
    upload_bytes: int
    pixels: int
    seconds: float
    passes: int
    heic: bool = Field(description="HEIC photos are read: pillow-heif is installed")


class ModelCard(_Response):
    name: str
    labels: list[str] = Field(description="a name for each class; none: the output is an embedding")
    size: tuple[int, int] = Field(description="rows and columns of pixels of its input")
    grid: tuple[int, int] = Field(description="rows and columns of patches")
    prefix: int = Field(description="tokens before the patches")
    layers: int
    heads: int = Field(description="0: it has no attention between tokens")
    activation: ActivationName = Field(description="what scores mean; raw: there are no probabilities")
    reads_prompts: bool = Field(description="it has a text tower: `text` may be asked for")
    default_method: str = Field(description="the method that fits this model where none is named")
    seconds: float = Field(description="of one forward pass of one photo on this machine")


class ModelsResponse(_Response):
    version: str
    models: list[ModelCard]
    limits: Limits


class OptionCard(_Response):
    name: str
    default: str
    allowed: str = Field(description="the values that it takes")
    meaning: str


class MethodCard(_Response):
    name: str
    title: str = Field(description="its name in plain language")
    sentence: str = Field(description="what it does, without formulas")
    also: list[str] = Field(description="other names that people search for")
    control: bool = Field(description="a baseline that looks at no model")
    family: str
    summary: str = Field(description="its formula")
    paper: str
    signed: bool
    class_specific: bool
    one_trace: bool = Field(description="read off one forward and backward, so it is in the grid of all methods")
    slow: bool
    forwards: int
    backwards: int
    options: list[OptionCard]
    combinators: list[str]


class RecommendationCard(_Response):
    purpose: str
    method: str
    title: str
    sentence: str
    reason: str
    evidence: str


class MethodsResponse(_Response):
    recommended: list[RecommendationCard] = Field(description="one method per purpose; the first is the default")
    families: list[str]
    methods: list[MethodCard]


class ExplainRequest(_Request):
    """A photo (a file, or the id of one that was sent before), methods, targets and the format of the response."""

    image: UploadFile | None = Field(default=None, description="a new photo; wins over `photo`")
    photo: PhotoId = Field(default="demo", description="'demo', or the id in an earlier response")
    model: ModelName | None = Field(default=None, description="one of /api/models; the first by default")
    method: list[MethodText] = Field(
        default=[DEFAULT],
        min_length=1,
        max_length=64,
        description="method strings; 'all' are all one-trace methods, 'default' is the model's default method",
    )
    target: list[ClassText] = Field(
        default=[], max_length=4, description="class names or numbers; none: the predicted class"
    )
    text: list[PromptText] = Field(
        default=[], max_length=4, description="prompts, after the classes; for models with `reads_prompts`"
    )
    other: UploadFile | None = Field(default=None, description="a second photo: what makes the two alike")
    similar_to: PhotoId | None = Field(default=None, description="the same, by the id of an earlier photo")
    score: ScoreKind | None = None
    seed: Seed = 0
    layers: bool = Field(default=False, description="also the map of each layer (one method only)")
    heads: bool = Field(default=False, description="also the map of each head (one method only)")
    picture: bool = Field(default=False, description="also the photo as the model sees it")
    reply: Literal["maps", "record", "npz"] = Field(
        default="maps",
        description="maps: ExplainResponse; record: JSON of one method; npz: its arrays; in a stream as base64",
    )
    stream: bool = Field(default=False, description="JSON lines: progress, then the response")


class ClassScore(_Response):
    index: int
    name: str
    probability: float | None = Field(description="null where the model's scores are raw")
    score: float = Field(description="the model's own output for the class, before any activation")


class HeadMaps(_Response):
    method: str = Field(description="the method of the heads: the method itself, or raw-attention if it has none")
    maps: EncodedArray = Field(description="[layers, heads, targets, rows, columns]")


class MethodMaps(_Response):
    method: str = Field(description="canonical")
    title: str = Field(description="its name in plain language")
    family: str
    signed: bool
    class_specific: bool
    score: str
    maps: EncodedArray = Field(description="[targets, rows, columns], raw and signed")
    standard_error: EncodedArray | None
    refinement: list[str] | None  # what the passes of a refined map showed, a sentence per map
    layers: EncodedArray | None = Field(description="[layers, targets, rows, columns]")
    heads: HeadMaps | None
    forwards: int
    backwards: int
    seconds: float
    notes: list[str]


class ExplainResponse(_Response):
    photo: str
    model: str
    targets: list[str]
    classes: list[int | None]
    activation: ActivationName
    probabilities: list[float | None] = Field(description="of each target; null where there is none")
    class_scores: list[float | None] = Field(description="the model's own output for each target class")
    target_scores: list[float | None] = Field(description="the value that is explained, of the kind `score`")
    other: str | None = Field(description="the id of the photo that this one is compared with")
    top: list[ClassScore]
    explanations: list[MethodMaps]
    skipped: dict[str, str] = Field(description="methods that do not fit the model, and why")
    cautions: list[str] = Field(description="why the answer may mean little: a flat or tiny photo, low confidence")
    picture: str | None = Field(description="a PNG in base64")
    size: tuple[int, int]


class ExplanationRecord(BaseModel):
    """The reply `record`: the JSON file that `clairvit explain` writes."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    method: str
    model: str
    score: str
    names: list[str]
    targets: list[str]


class TraceRequest(_Request):
    photo: PhotoId = "demo"
    model: ModelName | None = None
    head: int | Literal["mean", "min", "max"] = Field(default="mean", description="one head, or all of them fused")
    patch: int | None = Field(default=None, ge=0, le=1_000_000, description="one row only, counted without prefix")


class TraceResponse(_Response):
    photo: str
    model: str
    layer: int
    head: str
    grid: tuple[int, int]
    prefix: int
    attention: EncodedArray = Field(description="[queries, keys], prefix tokens first; one query if `patch` was given")


class FeaturesRequest(_Request):
    photo: PhotoId = "demo"
    other: PhotoId | None = Field(default=None, description="a second photo, in the same basis")
    model: ModelName | None = None
    y: float | None = Field(default=None, ge=0, lt=1, description="with x: the patch at this place only, from the top")
    x: float | None = Field(default=None, ge=0, lt=1, description="from the left, 1 is the width of the photo")
    of_other: bool = Field(default=False, description="y and x are in the second photo")


class FeaturesResponse(_Response):
    """Patch tokens of a layer's output: three principal components, norms and cosines, of one or two photos."""

    photo: str
    other: str | None
    model: str
    layer: int
    layer_name: str
    grid: tuple[int, int] = Field(description="of this layer's patches")
    pca: EncodedArray = Field(description="[photos, rows, columns, 3]")
    limits: EncodedArray = Field(description="[2, 3], the ends of the colour scale of each component")
    explained_variance_ratio: list[float]
    norms: EncodedArray = Field(description="[photos, rows, columns]")
    outliers: int | None = Field(description="patches of more than 5 median norms; null: norms cannot be compared")
    patch: int | None = Field(description="the patch at y, x, row by row from 0, those of the second photo last")
    cosine: EncodedArray = Field(description="[all patches, all patches]; one row if y and x were given")
    notes: list[str]


class CurveRequest(_Request):
    photo: PhotoId = "demo"
    model: ModelName | None = None
    method: MethodText = DEFAULT
    target: ClassText | None = None
    text: PromptText | None = None
    similar_to: PhotoId | None = None
    seed: Seed = 0
    steps: int = Field(default=13, ge=1, le=48)
    removal: Removal = "token"
    stream: bool = False


class Band(_Response):
    """The curve of one order of the patches, or mean, minimum and maximum of several random ones; null: undefined."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    area: float | None
    areas: list[float | None] = Field(description="of each order")


class CurveBands(_Response):
    x: list[float] = Field(description="fraction of the patches that are removed, or inserted")
    counts: list[int] = Field(description="number of patches that are removed, or inserted")
    method: Band
    random: Band


class CurveResponse(_Response):
    photo: str
    model: str
    method: str
    target: str
    meaning: str = Field(description="of the values: prob, or normalised score where the model has no probabilities")
    rank: list[int] = Field(description="the rank of each patch, 0 the best, row by row")
    grid: tuple[int, int]
    deletion: CurveBands
    insertion: CurveBands
    notes: list[str]


class CheckRequest(_Request):
    photo: PhotoId = "demo"
    model: ModelName | None = None
    method: MethodText = DEFAULT
    target: ClassText | None = None
    text: PromptText | None = None
    similar_to: PhotoId | None = None
    score: ScoreKind | None = None
    seed: Seed = 0
    stream: bool = False


class CheckedRemoval(_Response):
    """The values without the patches that the map marks most, and without as many random ones; null: undefined."""

    fraction: float
    patches: int
    top: float | None
    random: list[float | None]
    random_mean: float | None
    random_spread: float | None
    effect: float | None = Field(description="in standard deviations of a random removal")


class CheckedAnswer(_Response):
    """Whether the answer means anything; none of it says that the answer is right."""

    status: Literal["no objection", "take care", "nothing to explain"]
    reasons: list[str]
    sentence: str


class CheckResponse(_Response):
    """How far to trust the map of a method, and whether the answer means anything: in words and numbers."""

    photo: str
    model: str
    method: str
    target: str
    verdict: Literal["supported", "weak", "not better than chance"] | None = Field(description="null: not judged")
    badge: str = Field(description="the verdict in the words of the page")
    badge_style: Literal["supported", "weak", "chance", "unknown"] = Field(description="what gives it its colour")
    sentence: str = Field(description="about the map")
    answer: CheckedAnswer
    remarks: list[str]
    quantity: Literal["probability", "score", "similarity"] = Field(description="what the values are")
    full: float | None = Field(description="the value of the whole photo")
    removals: list[CheckedRemoval]
    effect: float | None = Field(description="the mean effect of the removals")
    prediction: float | None = Field(description="correlation of what the map predicts with what hiding parts does")
    partial: float | None = Field(description="the same, freed of what the middle and the edges predict")
    yardstick: float | None = Field(description="the same of the best of the target's own default and GenAtt maps")
    share: float = Field(description="the share of what hiding parts does that the map predicts")
    specific: float | None = Field(description="correlation with the difference of the class and the runner-up")
    is_specific: bool | None = Field(description="null: not asked")
    rival: str | None = Field(description="the runner-up")
    grid: list[int] = Field(description="rows and columns of the patches")
    brightest: list[int] = Field(description="numbers of the patches that the map marks most, the first first")
    marked: list[int] = Field(description="those that the sentence is about")
    stability: float | None = Field(description="rank correlation with the map of a noisy copy; null: not measured")
    agreement: dict[str, float | None] = Field(description="rank correlation with methods of other families")
    outliers: int | None
    outlier_share: float | None
    notes: list[str]
