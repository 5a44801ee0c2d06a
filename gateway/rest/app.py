"""Which paths does the HTTP face have, and what does every answer look like, errors included?

Builds the FastAPI application around a dispatcher; owns nothing. Every error leaves in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.dispatcher import GatewayStatus
from gateway.error_map import Problem, describe
from gateway.errors import GatewayError
from gateway.generation import Generation
from gateway.rest import chat, completions, openapi
from gateway.rest.answers import Answer
from gateway.rest.docs_page import docs_page
from gateway.rest.problems import ApiError, http_problem, unknown_model
from gateway.rest.running import Event, Submitter, run_generations
from gateway.rest.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.rest.served import ServedModel
from gateway.rest.sse import DONE, ClientLeft, EventStream, event_bytes, until_disconnect
from gateway.rest.validation import parse_request, read_body

DEFAULT_MAX_BODY_BYTES = 4 * 2**20
DEFAULT_BODY_DEADLINE_S = 60.0
INLINE_BYTES = 64 * 1024  # longer bodies are checked on a thread, so that they do not hold up everybody's steps
CLIENT_LEFT_STATUS = 499  # nginx's word for it; nobody reads the answer

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Prepare = Callable[[RequestT, ServedModel], Coroutine[Any, Any, tuple[list[Generation], Answer]]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Deps:
    dispatcher: Submitter
    served: ServedModel
    max_draft_len: int
    status: Callable[[], GatewayStatus]
    registry: CollectorRegistry
    max_body_bytes: int
    body_deadline_s: float
    long_body: asyncio.Semaphore  # held while a long body is checked: one thread takes half of the event loop's time


def create_app(
    *,
    dispatcher: Submitter,
    served: ServedModel,
    max_draft_len: int,
    status: Callable[[], GatewayStatus],
    registry: CollectorRegistry,
    version: str,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_deadline_s: float = DEFAULT_BODY_DEADLINE_S,
) -> FastAPI:
    """The application. max_draft_len: of a request; the dispatcher checks it. status: called for each `GET /health`.
    registry: what `GET /metrics` tells.
    """
    deps = _Deps(
        dispatcher, served, max_draft_len, status, registry, max_body_bytes, body_deadline_s, asyncio.Semaphore(1)
    )
    app = FastAPI(title="Outrider", version=version, description=openapi.DESCRIPTION, docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(GatewayError, _on_gateway_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)  # in the middle of its own request
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_any_error)
    _add_generation_routes(app, deps)
    _add_status_routes(app, deps)
    _add_docs(app)
    openapi.install(app)
    return app


def _add_generation_routes(app: FastAPI, deps: _Deps) -> None:
    @app.post(
        "/v1/completions", tags=["generation"], openapi_extra=openapi.body(CompletionRequest), responses=openapi.ERRORS
    )
    async def complete(request: Request) -> Response:
        """Continue a text."""
        return await _generate(deps, request, CompletionRequest, completions.prepare)

    @app.post(
        "/v1/chat/completions",
        tags=["generation"],
        openapi_extra=openapi.body(ChatCompletionRequest),
        responses=openapi.ERRORS,
    )
    async def chat_complete(request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(deps, request, ChatCompletionRequest, chat.prepare)


def _add_status_routes(app: FastAPI, deps: _Deps) -> None:
    model = {
        "id": deps.served.name,
        "object": "model",
        "created": deps.served.created,
        "owned_by": "outrider",
        "max_model_len": deps.served.max_model_len,
        "max_draft_len": deps.max_draft_len,
    }

    @app.get("/v1/models", tags=["models"])
    async def list_models() -> JSONResponse:
        """The model served."""
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}", tags=["models"], responses=openapi.ERRORS)
    async def get_model(name: str) -> JSONResponse:
        """One model by name."""
        if name != deps.served.name:
            raise unknown_model(name, deps.served.name)
        return JSONResponse(model)

    @app.get("/health", tags=["status"])
    async def get_health() -> JSONResponse:
        """200 while requests are served, 503 while they would have to wait for the target."""
        report = deps.status()
        services = [
            {"role": service.role, "address": service.address, "state": service.state, "detail": service.detail}
            for service in report.services
        ]
        content = {
            "status": "ok" if report.ready else "unavailable",
            "services": services,
            "running": report.running,
            "waiting": report.waiting,
        }
        return JSONResponse(content, status_code=200 if report.ready else 503)

    @app.get("/metrics", tags=["status"])
    async def get_metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(deps.registry), media_type=CONTENT_TYPE_LATEST)


async def _generate(deps: _Deps, request: Request, schema: type[RequestT], prepare: Prepare[RequestT]) -> Response:
    body = await read_body(request, deps.max_body_bytes, deps.body_deadline_s)
    if len(body) <= INLINE_BYTES:
        asked = parse_request(body, schema)
    else:
        async with deps.long_body:
            asked = await asyncio.to_thread(parse_request, body, schema)
    generations, answer = await prepare(asked, deps.served)
    if not asked.stream:
        return JSONResponse(await until_disconnect(request.receive, _whole(deps, generations, answer)))
    events = run_generations(deps.dispatcher, generations)
    # Until the first event an error still gets its own HTTP status; after it, only an event of its own.
    first = await until_disconnect(request.receive, _first(events))
    usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    return EventStream(_stream(first, events, answer, usage), events.aclose)


async def _whole(deps: _Deps, generations: Sequence[Generation], answer: Answer) -> dict[str, Any]:
    async with aclosing(run_generations(deps.dispatcher, generations)) as events:
        async for event in events:
            answer.add(event)
    return answer.whole()


async def _first(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _stream(
    first: Event | None, events: AsyncGenerator[Event, None], answer: Answer, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield event_bytes(answer.chunk(first))
        async for event in events:
            yield event_bytes(answer.chunk(event))
    except Exception as error:  # the status line is gone: the stream itself has to say it, whatever it was
        problem = describe(error)
        if problem.http_status == 500:
            logger.exception("a streamed request failed")
        yield event_bytes(problem.body())
        return
    finally:
        await events.aclose()
    if include_usage:
        yield event_bytes(answer.usage_chunk())
    yield DONE


def _add_docs(app: FastAPI) -> None:
    page: list[str] = []

    @app.get("/docs", include_in_schema=False)
    async def get_docs() -> HTMLResponse:
        """The description, for people. FastAPI's own page is blank where the browser has no internet."""
        if not page:
            page.append(docs_page(app.openapi()))
        return HTMLResponse(page[0])


def _problem_response(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), status_code=problem.http_status, headers=problem.headers())


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _problem_response(error.problem)


async def _on_gateway_error(_request: Request, error: Exception) -> Response:
    problem = describe(error)
    if problem.http_status == 500:
        logger.error("a request failed", exc_info=error)
    return _problem_response(problem)


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = _problem_response(http_problem(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _on_any_error(_request: Request, error: Exception) -> Response:
    return _problem_response(describe(error))
