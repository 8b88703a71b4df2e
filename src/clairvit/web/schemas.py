"""What is asked and answered over HTTP, typed: the OpenAPI document is made from this."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
import torch
from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from torch import Tensor

# Letters that method strings are made of; what they mean is settled by the registry.
MethodText = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.,=+:() \-]+$")]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
PhotoMark = Annotated[str, StringConstraints(pattern=r"^(demo|[0-9a-f]{32})$")]
ClassText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
ActivationName = Literal["softmax", "sigmoid", "raw"]
ScoreKind = Literal["logit", "prob", "logprob"]
Removal = Literal["token", "mean", "black", "blur"]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Numbers(_Told):
    """An array: little-endian float32, row by row, in base64. Exact, and a tenth of the same as text."""

    shape: list[int]
    float32: str


def numbers(tensor: Tensor) -> Numbers:
    array = tensor.detach().to("cpu", torch.float32).numpy()
    return Numbers(
        shape=list(array.shape), float32=base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()
    )


class Problem(_Told):
    """Why something was not done: what was seen, what was expected, what to do next."""

    kind: Literal[
        "bad-request",
        "bad-photo",
        "forgotten-photo",
        "not-found",
        "not-allowed",
        "too-large",
        "too-slow",
        "busy",
        "broken",
    ]
    message: str
    retry_after: int | None = None


class Limits(_Told):
    upload_bytes: int
    pixels: int
    seconds: float
    passes: int


class ModelCard(_Told):
    name: str
    labels: list[str] = Field(description="a name for each class; none: the output is an embedding")
    size: tuple[int, int] = Field(description="rows and columns of pixels that it sees")
    grid: tuple[int, int] = Field(description="rows and columns of patches")
    prefix: int = Field(description="tokens before the patches")
    layers: int
    heads: int = Field(description="0: it has no attention between tokens")
    activation: ActivationName = Field(description="what scores mean; raw: there are no probabilities")


class ModelsReply(_Told):
    version: str
    models: list[ModelCard]
    limits: Limits


class MethodCard(_Told):
    name: str
    family: str
    summary: str
    paper: str
    signed: bool
    class_specific: bool
    one_trace: bool = Field(description="read off one forward and backward, so it is in the grid of all methods")
    slow: bool
    forwards: int
    backwards: int
    combinators: list[str]


class MethodsReply(_Told):
    families: list[str]
    methods: list[MethodCard]


class ExplainAsked(_Asked):
    """A photo (a file, or the mark of one that was sent before) and what to know of it."""

    image: UploadFile | None = Field(default=None, description="a new photo; wins over `photo`")
    photo: PhotoMark = Field(default="demo", description="'demo', or the mark in an earlier reply")
    model: ModelName | None = Field(default=None, description="one of /api/models; the first by default")
    method: list[MethodText] = Field(
        default=["legrad"], min_length=1, max_length=64, description="method strings; 'all' are all one-trace methods"
    )
    target: list[ClassText] = Field(
        default=[], max_length=4, description="class names or numbers; none: the predicted class"
    )
    score: ScoreKind | None = None
    seed: Seed = 0
    layers: bool = Field(default=False, description="what each layer says, too (one method only)")
    heads: bool = Field(default=False, description="what each head says, too (one method only)")
    picture: bool = Field(default=False, description="the photo as the model saw it, too")
    reply: Literal["maps", "record", "npz"] = Field(
        default="maps", description="maps: ExplainReply; record: the JSON record of one method; npz: its arrays"
    )
    stream: bool = Field(default=False, description="lines of JSON: progress, then the reply")


class Guess(_Told):
    index: int
    name: str
    probability: float | None = Field(description="null where the model's scores are raw")
    score: float = Field(description="the model's own output for the class, before any activation")


class HeadMaps(_Told):
    method: str = Field(description="whose heads these are: the method itself, or raw-attention if it has none")
    maps: Numbers = Field(description="[layers, heads, targets, rows, columns]")


class MapReply(_Told):
    method: str = Field(description="canonical")
    family: str
    signed: bool
    class_specific: bool
    score: str
    maps: Numbers = Field(description="[targets, rows, columns], raw and signed")
    standard_error: Numbers | None
    layers: Numbers | None = Field(description="[layers, targets, rows, columns]")
    heads: HeadMaps | None
    forwards: int
    backwards: int
    seconds: float
    notes: list[str]


class ExplainReply(_Told):
    photo: str
    model: str
    targets: list[str]
    classes: list[int | None]
    activation: ActivationName
    probabilities: list[float | None] = Field(description="of each target; null where there is none")
    class_scores: list[float | None] = Field(description="the model's own output for each target class")
    top: list[Guess]
    explanations: list[MapReply]
    skipped: dict[str, str] = Field(description="methods that do not fit the model, and why")
    picture: str | None = Field(description="a PNG in base64")
    size: tuple[int, int]


class TraceAsked(_Asked):
    photo: PhotoMark = "demo"
    model: ModelName | None = None
    head: int | Literal["mean", "min", "max"] = Field(default="mean", description="one head, or all of them fused")
    patch: int | None = Field(default=None, ge=0, le=1_000_000, description="one row only, counted without prefix")


class TraceReply(_Told):
    photo: str
    model: str
    layer: int
    head: str
    grid: tuple[int, int]
    prefix: int
    attention: Numbers = Field(description="[queries, keys], prefix tokens first; one query if `patch` was given")


class CurveAsked(_Asked):
    photo: PhotoMark = "demo"
    model: ModelName | None = None
    method: MethodText = "legrad"
    target: ClassText | None = None
    seed: Seed = 0
    steps: int = Field(default=13, ge=1, le=48)
    removal: Removal = "token"
    stream: bool = False


class Band(_Told):
    """One order of the patches, or the mean of several by lot with the lowest and highest; null: undefined."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    area: float | None


class Walked(_Told):
    x: list[float] = Field(description="part of the patches that has gone, or come")
    counts: list[int] = Field(description="patches that have gone, or come")
    method: Band
    random: Band


class CurveReply(_Told):
    photo: str
    model: str
    method: str
    target: str
    meaning: str = Field(description="of the curves: prob, or normalised score where the model has no probabilities")
    rank: list[int] = Field(description="the place of each patch, 0 the best, row by row")
    grid: tuple[int, int]
    deletion: Walked
    insertion: Walked
    notes: list[str]
