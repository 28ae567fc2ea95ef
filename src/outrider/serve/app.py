"""The routes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from outrider._version import __version__
from outrider.serve import schemas
from outrider.serve.answers import Answer, ChatAnswer, CompletionAnswer
from outrider.serve.body import StrictRoute
from outrider.serve.errors import ApiError, install_handlers
from outrider.serve.guard import Guard
from outrider.serve.requests import Prepared, as_messages, prepare_chat, prepare_completion
from outrider.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChat,
    TokenizePrompt,
)
from outrider.serve.service import Service
from outrider.serve.settings import Settings
from outrider.serve.streaming import ClientGone, EventStream, unless_gone

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.trace import Tracer

__all__ = ["create_app"]

_log = logging.getLogger("outrider.serve")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503)
}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
_PAGE_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json",
    ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
}  # fmt: skip
router = APIRouter(route_class=StrictRoute, responses=_ERRORS)


def create_app(settings: Settings, load: Callable[[], LLM], tracer: Tracer | None = None) -> FastAPI:
    """An app that loads its model in the background once it is started."""
    service = Service(settings, load)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        service.begin()
        try:
            yield
        finally:
            await service.end()

    app = FastAPI(title="Outrider", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.tracer = tracer
    install_handlers(app)
    app.router.routes += router.routes  # flat, so that everybody who lists the routes sees them
    app.add_middleware(Guard, settings=settings)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service  # type: ignore[no-any-return]


@router.post(
    "/v1/completions", response_model=schemas.Completion, responses={200: {"content": _STREAM}}, summary="Continue prompts"
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    return await _generate(request, body, prepare_completion, partial(CompletionAnswer), "cmpl")


@router.post(
    "/v1/chat/completions",
    response_model=schemas.ChatCompletion,
    responses={200: {"content": _STREAM}},
    summary="Answer a conversation",
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    return await _generate(request, body, prepare_chat, partial(ChatAnswer), "chatcmpl")


async def _generate(
    request: Request,
    body: GenerationRequest,
    prepare: Callable[[LLM, Any], Prepared],
    answers: Callable[..., Answer],
    prefix: str,
) -> Response:
    service = _service(request)
    llm = service.ready()
    _check_model(service, body.model)
    service.admit(body.n or 1)
    prepared = await service.off_loop(partial(prepare, llm, body))
    if prepared.sequences > service.settings.limits.sequences:
        raise ApiError(400, f"n: prompts times n must be at most {service.settings.limits.sequences}", "n")
    answer = answers(llm, body, prepared, f"{prefix}-{body.request_id or secrets.token_hex(12)}", service.settings.model_name)
    ticket = answer.ticket = service.submit(prepared.jobs, bool(body.stream))
    _note(request, service, body, answer, prepared)
    if body.stream:
        return EventStream(service, ticket, answer)
    try:
        outputs = await unless_gone(request, ticket.whole())
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        service.abort(ticket)
    return JSONResponse(await service.off_loop(partial(answer.whole, outputs)))


def _note(request: Request, service: Service, body: GenerationRequest, answer: Answer, prepared: Prepared) -> None:
    """The log, which says nothing of what was asked unless told to; and the trace."""
    tracer: Tracer | None = request.app.state.tracer
    if tracer is not None:
        answer.ticket.on_end(partial(tracer.finished, dict(request.headers), service.settings.model_name, answer.id, prepared))
    if service.settings.log_requests:
        _log.info("%s %s", answer.id, body.model_dump_json(exclude_none=True))


def _check_model(service: Service, name: str | None) -> None:
    settings = service.settings
    if name is not None and name not in (settings.model_name, *settings.aliases):
        raise ApiError(404, f"the model {name!r} is not served here; this is {settings.model_name!r}", "model", "model_not_found")


@router.get("/v1/models", response_model=schemas.ModelList, summary="The model")
async def models(request: Request) -> Response:
    service = _service(request)
    names = (service.settings.model_name, *service.settings.aliases)
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in names]})


@router.get("/v1/models/{name:path}", response_model=schemas.ModelCard, summary="One model")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    _check_model(service, name)
    return JSONResponse(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    llm = service.ready()
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "outrider",
        "root": service.settings.model_name,
        "max_model_len": llm.max_model_len,
    }


@router.post("/tokenize", response_model=schemas.Tokenized, summary="Text to token ids")
async def tokenize(request: Request, body: TokenizePrompt | TokenizeChat) -> Response:
    service = _service(request)
    llm = service.ready()
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")

    def work() -> list[int]:
        if isinstance(body, TokenizeChat):
            return tokenizer.chat(as_messages(body.messages))
        return tokenizer.encode(body.prompt) if body.add_special_tokens else list(tokenizer.encode_bare(body.prompt))

    ids = await service.off_loop(work)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len})


@router.post("/detokenize", response_model=schemas.Detokenized, summary="Token ids to text")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    service = _service(request)
    llm = service.ready()
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    if any(token >= llm.config.vocab for token in body.tokens):
        raise ApiError(400, f"tokens: ids must be below {llm.config.vocab}", "tokens")
    return JSONResponse({"prompt": await service.off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))})


@router.get("/health", response_model=schemas.Health, responses={503: {"model": schemas.Health}}, summary="Whether it serves")
async def health(request: Request) -> Response:
    status = _service(request).status
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/version", response_model=schemas.Version, summary="The version")
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}, summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    service = _service(request)
    service.metrics.snapshot = await service.look()
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats", summary="A snapshot for dashboards")
async def stats(request: Request) -> Response:
    service = _service(request)
    await service.look()
    return JSONResponse(service.stats())


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return _page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    return _page_file(name)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return RedirectResponse("/openapi.json")


def _page_file(name: str) -> Response:
    """A file of the page; names are looked up among those that exist, never joined to a path."""
    folder = files("outrider.serve") / "page"
    kind = _PAGE_TYPES.get(PurePosixPath(name).suffix)
    found = {own.name: own for own in folder.iterdir()} if folder.is_dir() else {}
    if kind is None or name not in found:
        raise ApiError(404, "there is no such page")
    return Response(found[name].read_bytes(), media_type=kind)
