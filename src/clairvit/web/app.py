"""The endpoints: each validates its request, submits a job to a queue, and waits for it without blocking."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Form, Query, Request, UploadFile
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRouter
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from clairvit._version import __version__
from clairvit.errors import BadInput, ClairError
from clairvit.web import handlers
from clairvit.web.job_queue import Job, JobCancelled, QueueFull, TimeLimitExceeded
from clairvit.web.middleware import INTERNAL_ERROR, AccessRules, RequestLimits
from clairvit.web.schemas import (
    CheckRequest,
    CheckResponse,
    CurveRequest,
    CurveResponse,
    ExplainRequest,
    ExplainResponse,
    ExplanationRecord,
    FeaturesRequest,
    FeaturesResponse,
    MethodsResponse,
    ModelsResponse,
    Problem,
    TraceRequest,
    TraceResponse,
)
from clairvit.web.state import AppState, methods_response
from clairvit.web.uploads import MAX_BYTES, InvalidUpload, Upload, UploadExpired

STATIC = Path(__file__).parent / "static"
DESCRIBED_ERRORS = (InvalidUpload, UploadExpired, QueueFull, TimeLimitExceeded, JobCancelled)
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "the body cannot be parsed"},
    401: {"model": Problem, "description": "no token, or a wrong one"},
    403: {"model": Problem, "description": "a page of another site"},
    404: {"model": Problem, "description": "the photo is no longer in memory"},
    408: {"model": Problem, "description": "the request did not arrive in time"},
    413: {"model": Problem, "description": "the photo or the request is too large"},
    415: {"model": Problem, "description": "the file is not a photo"},
    421: {"model": Problem, "description": "the server does not answer to this host name"},
    422: {"model": Problem, "description": "the request cannot be fulfilled, or takes too long"},
    429: {"model": Problem, "description": "the server is busy; Retry-After says when to try again"},
    503: {"model": Problem, "description": "the server is stopping"},
}
router = APIRouter(prefix="/api", responses=_PROBLEMS)


def _state(request: Request) -> AppState:
    state: AppState = request.app.state.state
    return state


State = Annotated[AppState, Depends(_state)]
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


async def _require_form(http: Request) -> None:
    """Refuse parameters that would be ignored: a body that is no form, a query, or several photos."""
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
    if http.url.query or (media_type and media_type not in FORMS) or (has_body and not media_type):
        seen = "parameters in the address" if http.url.query else f"a body of type '{media_type or 'unknown'}'"
        raise HTTPException(415, f"The request has {seen}; expected a form: send multipart/form-data.")
    form = await http.form()
    if len(form.getlist("image")) > 1 or len(form.getlist("other")) > 1:
        raise HTTPException(422, "The request has several photos; expected one in each request.")


@router.get("/models", summary="The models on this server, and its limits")
async def models(state: State) -> ModelsResponse:
    return state.models_response()


@router.get("/methods", summary="Every method, family by family")
async def methods(state: State) -> MethodsResponse:
    return methods_response(state.recipes)


@router.post(
    "/explain",
    response_model=ExplainResponse | ExplanationRecord,
    summary="Explain a photo by one or several methods",
    responses={200: {"content": {"application/x-ndjson": {}, "application/x-npz": {}}}},
    dependencies=[Depends(_require_form)],
)
async def explain(http: Request, state: State, request: Annotated[ExplainRequest, Form()]) -> Response:
    name = state.model_name(request.model)
    has_other = request.other is not None or request.similar_to is not None
    targets = len(request.target) + len(request.text) + has_other
    specs, queue = state.resolve(request.method, name, targets)
    if len(specs) > 1 and (request.reply != "maps" or request.layers or request.heads):
        raise BadInput(f"{len(specs)} methods were named; layers, heads, record and npz are of one: name one method.")
    photo = await _upload(http, state, request.image, request.photo)
    other = await _upload(http, state, request.other, request.similar_to or "") if has_other else None
    request = request.model_copy(update={"similar_to": None if other is None else other.id})
    results = handlers.cached_results(state.results, photo, name, specs, request)
    queue = "quick" if results is not None else queue  # nothing is computed
    model = state.models[queue][name]

    def work() -> Response:
        comparison = results or handlers.explain_photo(state.results, model, photo, specs, request, other)
        if request.reply == "maps":
            return _json(handlers.explain_response(comparison, photo, model, specs, request))
        content = handlers.explain_file(comparison, request.reply)
        if request.stream:
            return Response(handlers.json_line({"base64": base64.b64encode(content).decode()}).rstrip())
        media_type = {"record": "application/json", "npz": "application/x-npz"}[request.reply]
        return Response(content, media_type=media_type)

    return await _respond(http, state.queues[queue].submit(work), request.stream)


@router.get("/trace/{layer}", response_model=TraceResponse, summary="Where each patch attends in one layer")
async def trace(
    http: Request,
    state: State,
    layer: Annotated[int, PathParameter(ge=0, le=10_000)],
    request: Annotated[TraceRequest, Query()],
) -> Response:
    state.uploads.find(request.photo)  # an expired photo is reported before the job is queued
    model = state.models["quick"][state.model_name(request.model)]
    job = state.queues["quick"].submit(lambda: _json(handlers.trace_response(model, state.uploads, layer, request)))
    return await _respond(http, job, stream=False)


@router.get("/features/{layer}", response_model=FeaturesResponse, summary="What patches have in common in one layer")
async def features(
    http: Request,
    state: State,
    layer: Annotated[int, PathParameter(ge=0, le=10_000)],
    request: Annotated[FeaturesRequest, Query()],
) -> Response:
    state.uploads.find(request.photo)  # an expired photo is reported before the job is queued
    _earlier_photo(state, request.other)
    model = state.models["quick"][state.model_name(request.model)]
    job = state.queues["quick"].submit(lambda: _json(handlers.features_response(model, state.uploads, layer, request)))
    return await _respond(http, job, stream=False)


@router.post(
    "/curve",
    response_model=CurveResponse,
    summary="Deletion and insertion curves in the order of a map, and in random orders",
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def curve(http: Request, state: State, request: CurveRequest) -> Response:
    name = state.model_name(request.model)
    (spec, *others), queue = state.resolve([request.method], name)
    if others:
        raise BadInput("A curve is of one method; name one, such as attnlrp+plus.")
    photo = state.uploads.find(request.photo)
    other = _earlier_photo(state, request.similar_to)
    cached = state.results.find(handlers.result_key(photo, name, spec, request)) is not None
    queue = "long" if queue == "quick" or cached else queue  # the curve of a slow method needs its map first
    model = state.models[queue][name]

    def work() -> Response:
        explanation = handlers.explain_once(state.results, model, photo, spec, request, other)
        return _json(handlers.curve_response(model, photo, spec, explanation, request, other))

    return await _respond(http, state.queues[queue].submit(work), request.stream)


@router.post(
    "/check",
    response_model=CheckResponse,
    summary="How far to trust a map: the fall without its brightest patches against random ones",
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def check(http: Request, state: State, request: CheckRequest) -> Response:
    name = state.model_name(request.model)
    (spec, *others), queue = state.resolve([request.method], name)
    if others:
        raise BadInput("A check is of one map; name one method, such as attnlrp+plus.")
    photo = state.uploads.find(request.photo)
    other = _earlier_photo(state, request.similar_to)
    cached = state.results.find(handlers.result_key(photo, name, spec, request)) is not None
    queue = "long" if queue == "quick" or cached else queue  # a dozen passes of the model
    model = state.models[queue][name]

    def work() -> Response:
        explanation = handlers.explain_once(state.results, model, photo, spec, request, other)
        return _json(handlers.check_response(model, photo, explanation))

    return await _respond(http, state.queues[queue].submit(work), request.stream)


def _earlier_photo(state: AppState, photo: str | None) -> Upload | None:
    """Return an earlier photo by its id; None if none is named."""
    return None if photo is None else state.uploads.find(photo)


async def _upload(http: Request, state: AppState, upload: UploadFile | None, photo: str) -> Upload:
    """Return the uploaded photo, or an earlier one."""
    if upload is None:
        return state.uploads.find(photo)
    file = upload.file  # on disk if it is large; the queue reads one at a time into memory
    job = state.queues["uploads"].submit(lambda: state.uploads.add(file.read(MAX_BYTES + 1)))
    return await job.wait(http.is_disconnected)


def _json(content: BaseModel) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


async def _respond(http: Request, job: Job[Response], stream: bool) -> Response:
    if not stream:
        return await job.wait(http.is_disconnected)
    return StreamingResponse(_json_lines(job), media_type="application/x-ndjson")


async def _json_lines(job: Job[Response]) -> AsyncIterator[bytes]:
    """Yield the progress whenever it changes, then the response or the problem; a disconnect cancels the job."""
    sent: tuple[str, int, int] | None = None
    try:
        async for progress in job.progress_updates():
            if progress != sent:
                sent = progress
                task, done, steps = progress
                yield handlers.json_line({"progress": {"task": task, "done": done, "steps": steps}})
        yield b'{"reply": ' + bytes(job.result().body) + b"}\n"
    except Exception as error:  # the response has begun: every error becomes its last line, a bug is raised again
        _, problem = _problem(error) or (500, Problem(kind="internal-error", message=INTERNAL_ERROR))
        yield handlers.json_line({"problem": problem.model_dump()})
        if problem.kind == "internal-error":
            raise  # to the log
    finally:
        job.cancel()  # starlette closes this generator when the client disconnects


def _problem(error: Exception) -> tuple[int, Problem] | None:
    """Return the status and description of an error of the client or the time limit; None for a bug."""
    if isinstance(error, InvalidUpload):
        kind = "too-large" if error.status == 413 else "bad-photo"
        return error.status, Problem.model_validate({"kind": kind, "message": str(error)})
    if isinstance(error, UploadExpired):
        return 404, Problem(kind="photo-expired", message=str(error))
    if isinstance(error, QueueFull):
        return 429, Problem(kind="busy", message=str(error), retry_after=error.retry_after)
    if isinstance(error, TimeLimitExceeded):
        message = "This took longer than the server allows; lower samples= or steps=, or choose a quicker method."
        return 422, Problem(kind="too-slow", message=message)
    if isinstance(error, JobCancelled):
        return 503, Problem(kind="busy", message="The server is stopping.")  # or the client is gone and reads nothing
    if isinstance(error, ClairError):
        return 422, Problem(kind="bad-request", message=str(error))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        location = ".".join(str(part) for part in first.get("loc", ()))
        return 422, Problem(kind="bad-request", message=f"{location}: {first.get('msg', 'not valid')}"[:400])
    if isinstance(error, HTTPException):
        kind = "not-found" if error.status_code == 404 else "bad-request"
        return error.status_code, Problem.model_validate({"kind": kind, "message": str(error.detail)})
    return None


async def _handle_error(_: Request, error: Exception) -> Response:
    described = _problem(error)
    assert described is not None, "only errors that _problem describes are registered"
    status, problem = described
    headers = {"Retry-After": str(problem.retry_after)} if problem.retry_after is not None else {}
    if isinstance(error, HTTPException) and error.headers:
        headers |= dict(error.headers)
    return JSONResponse(problem.model_dump(), status, headers)


def create_app(state: AppState, rules: AccessRules | None = None) -> FastAPI:
    """Return the app with its endpoints, static files, error handlers and middleware."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    app = FastAPI(
        title="ClairViT",
        version=__version__,
        summary="Why did my Vision Transformer say that?",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.state = state
    app.include_router(router)
    for error_type in (*DESCRIBED_ERRORS, ClairError, RequestValidationError, HTTPException):
        app.add_exception_handler(error_type, _handle_error)
    app.mount("/", StaticFiles(directory=STATIC, html=True), name="page")
    app.add_middleware(RequestLimits, rules=rules or AccessRules())
    return app
