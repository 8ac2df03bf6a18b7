"""Routes of the server."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from moesaic.serve.http import page
from moesaic.serve.http.api_model import ApiModel
from moesaic.serve.http.errors import ApiError
from moesaic.serve.http.experts import ExpertFacts, experts_content
from moesaic.serve.http.generation import Engine, Generation, Update
from moesaic.serve.http.metrics import MEDIA_TYPE, Metrics
from moesaic.serve.http.relay import EventRelay
from moesaic.serve.http.responses import DONE, Answer, ChatAnswer, CompletionAnswer, sse
from moesaic.serve.http.schemas import ChatRequest, CompletionRequest, parse_request

MAX_BODY_BYTES = 16 << 20
"""Most bytes of a request's body."""
BODY_TIMEOUT_S = 60.0
"""Time for a body to arrive."""
_LARGE_BODY_BYTES = 64 << 10
"""Bodies from this size on are parsed on another thread."""
_CLIENT_GONE = 499
"""Status for logs alone: nobody reads the answer."""

T = TypeVar("T")
R = TypeVar("R", CompletionRequest, ChatRequest)


@dataclass(frozen=True)
class Service:
    """All that the routes serve."""

    model: ApiModel
    engine: Engine
    metrics: Metrics
    experts: Callable[[], ExpertFacts] | None = None
    """Function that returns where the experts are; None: all of them are in memory."""
    api_key: str | None = None


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application. No route reads a file."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.relay = EventRelay(asyncio.get_running_loop())
        yield

    app = FastAPI(
        title="moesaic", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.include_router(_open_routes(service))
    app.include_router(_model_routes(service))
    app.include_router(_completion_routes(service))
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_bug)
    return app


def _open_routes(service: Service) -> APIRouter:
    """Return the routes that need no key."""
    router = APIRouter()
    html = page.render(service.model, needs_key=service.api_key is not None)

    @router.get("/")
    async def show_page() -> Response:
        return Response(html, media_type="text/html", headers=page.HEADERS)

    @router.get("/health")
    async def report_health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    def report_metrics() -> Response:
        return Response(service.metrics.render(), media_type=MEDIA_TYPE)

    return router


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_key_check(service.api_key))])
    model = service.model
    content = {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "moesaic",
        "max_model_len": model.context,
    }  # fmt: skip

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [content]}

    @router.get("/v1/models/{name:path}")
    async def describe_model(name: str) -> dict[str, Any]:
        model.check_name(name)
        return content

    @router.get("/experts")
    def report_experts() -> dict[str, Any]:
        return experts_content(model, service.experts)

    return router


def _completion_routes(service: Service) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_key_check(service.api_key))])

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _respond(service, request, CompletionRequest, CompletionAnswer)

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _respond(service, request, ChatRequest, ChatAnswer)

    return router


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are bytes, which the framework reads as Latin-1.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'",
                status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    return check


async def _respond(
    service: Service, request: Request, kind: type[R], answer_kind: type[Answer]
) -> Response:
    """Answer one request, whole or as a stream."""
    body = await _read(request, kind)
    # Tokenizing a long prompt takes a while, and a template is foreign code.
    generation = await asyncio.to_thread(_start, service, body, request.app.state.relay)
    answer = answer_kind(service.model, body.top_candidates is not None, body.includes_usage)
    if body.stream:
        return _EventStream(generation, answer, body.includes_usage)
    try:
        updates = await _unless_disconnected(request, _collect(generation))
    finally:
        generation.close()
    if updates is None:
        return Response(status_code=_CLIENT_GONE)
    return JSONResponse(answer.whole(updates, generation.usage()))


def _start(
    service: Service, body: CompletionRequest | ChatRequest, relay: EventRelay
) -> Generation:
    """Submit the requests of a body to the engine."""
    requests = service.model.requests(body)
    generation = Generation(
        service.engine, relay, service.model, service.metrics, requests, body.stop
    )
    generation.submit()
    return generation


async def _read(request: Request, kind: type[R]) -> R:
    """Return the body of a request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # Web pages of other sites cannot send this one.
        raise ApiError(
            f"the content type is '{media_type[:80]}': send the header "
            "'Content-Type: application/json'",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
    text = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                text += part
                if len(text) > MAX_BODY_BYTES:
                    raise ApiError(
                        f"the body has more than {MAX_BODY_BYTES >> 20} MiB: shorten it",
                        status=413, code="request_too_large",
                    )  # fmt: skip
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s: send it faster"
        raise ApiError(message, status=408, code="request_timeout") from None
    if len(text) < _LARGE_BODY_BYTES:
        return parse_request(kind, bytes(text))
    return await asyncio.to_thread(parse_request, kind, bytes(text))


async def _collect(generation: Generation) -> list[Update]:
    return [update async for updates in generation.updates() for update in updates]


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None as soon as the client has gone."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events of one generation, which ends with the connection."""

    def __init__(self, generation: Generation, answer: Answer, includes_usage: bool) -> None:
        self._generation = generation
        super().__init__(
            _events(generation, answer, includes_usage), media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _events(
    generation: Generation, answer: Answer, includes_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a stream."""
    openings = [answer.opening(index) for index in range(generation.num_choices)]
    opening = b"".join(sse(chunk) for chunk in openings if chunk is not None)
    if opening:
        yield opening
    try:
        async for updates in generation.updates():
            yield b"".join(sse(answer.chunk(update)) for update in updates)
        if includes_usage:
            yield sse(answer.usage_chunk(generation.usage()))
    except ApiError as error:
        yield sse(error.body)
    yield DONE


async def _answer_api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 405:
        message += f"; use {(error.headers or {}).get('Allow', 'another method')}"
    if error.status_code == 404:
        message += "; the routes are /v1/completions, /v1/chat/completions, /v1/models, /health, "
        message += "/metrics, /experts and /"
    body = ApiError(message, code=error.detail.lower().replace(" ", "_")).body
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_bug(request: Request, error: Exception) -> Response:
    del request
    message = f"the server failed ({type(error).__name__}): see its log"
    body = ApiError(message, kind="server_error", code="internal_error").body
    return JSONResponse(body, 500)
