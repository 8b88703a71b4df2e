"""The addresses. Each reads what was asked, hands the work to a lane, and waits for it without blocking others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Form, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRouter
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from clairvit._version import __version__
from clairvit.errors import BadInput, ClairError
from clairvit.web import handlers as work
from clairvit.web.job_queue import Busy, Job, Stopped, TooSlow
from clairvit.web.middleware import STUMBLED, RequestLimits, Rules
from clairvit.web.schemas import (
    CurveAsked,
    CurveReply,
    ExplainAsked,
    ExplainReply,
    MethodsReply,
    ModelsReply,
    Problem,
    TraceAsked,
    TraceReply,
)
from clairvit.web.state import AppState, methods_reply, settle
from clairvit.web.uploads import MOST_BYTES, InvalidUpload, Upload, UploadExpired

STATIC = Path(__file__).parent / "static"
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "the body cannot be parsed"},
    401: {"model": Problem, "description": "no token, or a wrong one"},
    403: {"model": Problem, "description": "a page of another site"},
    404: {"model": Problem, "description": "the photo is not in memory"},
    408: {"model": Problem, "description": "the request never ended"},
    413: {"model": Problem, "description": "the photo or the request is too large"},
    415: {"model": Problem, "description": "the file is no photo"},
    421: {"model": Problem, "description": "the server does not go by this name"},
    422: {"model": Problem, "description": "what was asked cannot be done, or takes too long"},
    429: {"model": Problem, "description": "all places are taken; Retry-After says when to come again"},
    503: {"model": Problem, "description": "the server is stopping"},
}
router = APIRouter(prefix="/api", responses=_PROBLEMS)


def _desk(request: Request) -> AppState:
    state: AppState = request.app.state.state
    return state


AtDesk = Annotated[AppState, Depends(_desk)]


@router.get("/models", summary="The models on this server, and its limits")
async def models(state: AtDesk) -> ModelsReply:
    return state.about()


@router.get("/methods", summary="Every method, family by family")
async def methods() -> MethodsReply:
    return methods_reply()


@router.post(
    "/explain",
    response_model=ExplainReply,
    summary="Explain a photo by one or several methods",
    responses={200: {"content": {"application/x-ndjson": {}, "application/x-npz": {}}}},
)
async def explain(request: Request, state: AtDesk, asked: Annotated[ExplainAsked, Form()]) -> Response:
    name = state.model_name(asked.model)
    bounds, lane = settle(asked.method, _patches(state, name), len(asked.target))
    if len(bounds) > 1 and (asked.reply != "maps" or asked.layers or asked.heads):
        raise BadInput(f"{len(bounds)} methods were named; layers, heads, record and npz are of one: name one method.")
    photo = await _photo(request, state, asked)
    model = state.models[lane][name]

    def do() -> Response:
        found = work.explain_photo(model, photo, bounds, asked)
        if asked.reply == "maps":
            return _json(work.as_reply(found, photo, model, asked))
        kind = {"record": "application/json", "npz": "application/x-npz"}[asked.reply]
        return Response(work.as_file(found, asked.reply), media_type=kind)

    return await _answered(request, state.lanes[lane].submit(do), asked.stream and asked.reply == "maps")


@router.get("/trace/{layer}", response_model=TraceReply, summary="Where each patch attends in one layer")
async def trace(
    request: Request,
    state: AtDesk,
    layer: Annotated[int, InPath(ge=0, le=10_000)],
    asked: Annotated[TraceAsked, Query()],
) -> Response:
    state.photos.find(asked.photo)  # a forgotten photo is told before a place is taken
    model = state.models["quick"][state.model_name(asked.model)]
    job = state.lanes["quick"].submit(lambda: _json(work.attention_of(model, state.photos, layer, asked)))
    return await _answered(request, job, stream=False)


@router.post(
    "/curve",
    response_model=CurveReply,
    summary="Deletion and insertion in the order of a map, beside orders by lot",
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def curve(request: Request, state: AtDesk, asked: CurveAsked) -> Response:
    name = state.model_name(asked.model)
    (bound, *more), lane = settle([asked.method], _patches(state, name))
    if more:
        raise BadInput("A curve is of one method; name one, such as legrad.")
    photo = state.photos.find(asked.photo)
    lane = "longer" if lane == "quick" else lane  # a slow method is explained first, so it waits with its like
    model = state.models[lane][name]
    job = state.lanes[lane].submit(lambda: _json(work.curve_of(model, photo, bound, asked)))
    return await _answered(request, job, asked.stream)


def _patches(state: AppState, model: str) -> int:
    rows, columns = state.card(model).grid
    return rows * columns


async def _photo(request: Request, state: AppState, asked: ExplainAsked) -> Upload:
    if asked.image is None:
        return state.photos.find(asked.photo)
    file = asked.image.file  # on disk if it is large; read when its turn comes, so that one at a time is in memory
    return (
        await state.lanes["photos"]
        .submit(lambda: state.photos.add(file.read(MOST_BYTES + 1)))
        .wait(request.is_disconnected)
    )


def _json(content: BaseModel) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


async def _answered(request: Request, job: Job[Response], stream: bool) -> Response:
    if not stream:
        return await job.wait(request.is_disconnected)
    return StreamingResponse(_lines(job), media_type="application/x-ndjson")


async def _lines(job: Job[Response]) -> AsyncIterator[bytes]:
    """Progress whenever there is some, then the reply or the problem. The client cancels by going away."""
    told: tuple[str, int, int] | None = None
    try:
        async for progress in job.looks():
            if progress != told:
                told = progress
                yield work.line({"progress": {"what": told[0], "done": told[1], "steps": told[2]}})
        yield b'{"reply": ' + bytes(job.result().body) + b"}\n"
    except Exception as error:
        _, problem = _problem(error) or (500, Problem(kind="broken", message=STUMBLED))
        yield work.line({"problem": problem.model_dump()})
        if problem.kind == "broken":
            raise  # to the log
    finally:
        job.leave()  # starlette ends this generator when the client goes away


def _problem(error: Exception) -> tuple[int, Problem] | None:
    """Everything that is the client's or the clock's doing; None: a bug of ours."""
    if isinstance(error, InvalidUpload):
        kind = "too-large" if error.status == 413 else "bad-photo"
        return error.status, Problem.model_validate({"kind": kind, "message": str(error)})
    if isinstance(error, UploadExpired):
        return 404, Problem(kind="forgotten-photo", message=str(error))
    if isinstance(error, Busy):
        return 429, Problem(kind="busy", message=str(error), retry_after=error.retry_after)
    if isinstance(error, TooSlow):
        message = "This took longer than the server allows; lower samples= or steps=, or raise --time-limit."
        return 422, Problem(kind="too-slow", message=message)
    if isinstance(error, Stopped):
        return 503, Problem(kind="busy", message="The server is stopping.")  # or the client is gone and reads nothing
    if isinstance(error, ClairError):
        return 422, Problem(kind="bad-request", message=str(error))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first.get("loc", ()))
        return 422, Problem(kind="bad-request", message=f"{place}: {first.get('msg', 'not valid')}"[:400])
    if isinstance(error, HTTPException):
        kind = "not-found" if error.status_code == 404 else "bad-request"
        return error.status_code, Problem.model_validate({"kind": kind, "message": str(error.detail)})
    return None


async def _tell(_: Request, error: Exception) -> Response:
    found = _problem(error)
    assert found is not None, "only errors with a meaning are registered"
    status, problem = found
    headers = {"Retry-After": str(problem.retry_after)} if problem.retry_after is not None else {}
    if isinstance(error, HTTPException) and error.headers:
        headers |= dict(error.headers)
    return JSONResponse(problem.model_dump(), status, headers)


def create_app(state: AppState, rules: Rules | None = None) -> FastAPI:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    app = FastAPI(
        title="ClairViT",
        version=__version__,
        summary="Why did my Vision Transformer say that?",
        lifespan=life,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.state = state
    app.include_router(router)
    for kind in (
        InvalidUpload,
        UploadExpired,
        Busy,
        TooSlow,
        Stopped,
        ClairError,
        RequestValidationError,
        HTTPException,
    ):
        app.add_exception_handler(kind, _tell)
    app.mount("/", StaticFiles(directory=STATIC, html=True), name="page")
    app.add_middleware(RequestLimits, rules=rules or Rules())
    return app
