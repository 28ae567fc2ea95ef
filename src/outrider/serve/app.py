"""The FastAPI app, its routes, and the schemas of their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ConfigDict, create_model

from outrider._version import __version__
from outrider.errors import InvalidParameter
from outrider.serve import loras
from outrider.serve.answers import Answer, ChatAnswer, CompletionAnswer
from outrider.serve.body import BodyChecker, StrictRoute
from outrider.serve.errors import ApiError, install_handlers
from outrider.serve.exchange import TOKENS, Exchange
from outrider.serve.fairness import client_of, in_daemon_thread
from outrider.serve.guard import AccessGuard, Keys
from outrider.serve.logs import adopt, request_id
from outrider.serve.memory import memory_of
from outrider.serve.messages import MessageAnswer
from outrider.serve.messages_chat import NAMES as MESSAGE_NAMES
from outrider.serve.messages_chat import as_chat, as_counted_chat
from outrider.serve.messages_schema import (
    CountRequest,
    MessageAnswerObject,
    MessageErrorBody,
    MessagesRequest,
    TokenCount,
)
from outrider.serve.reasoning import reasoning_of
from outrider.serve.requests import (
    PreparedRequest,
    count_sequences,
    grammar_of,
    may_name_grammar,
    prepare_chat,
    prepare_completion,
    prepare_message,
    renamed,
)
from outrider.serve.requests import tokenize as ids_of
from outrider.serve.response_store import Owner, ResponseStore, StoredResponse
from outrider.serve.responses import ResponseAnswer
from outrider.serve.responses_chat import NAMES as RESPONSE_NAMES
from outrider.serve.responses_chat import open_turn
from outrider.serve.responses_schema import DeletedResponse, ResponseObject, ResponsesRequest
from outrider.serve.rules import Rules
from outrider.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ForgetRequest,
    GenerationRequest,
    RememberRequest,
    TokenizeRequest,
)
from outrider.serve.service import RequestHandle, Service
from outrider.serve.settings import Limits, ServerSettings
from outrider.serve.streaming import ClientGone, LiveAnswer, dumps, unless_gone
from outrider.serve.tags import HEADER as TAG_HEADER
from outrider.serve.tags import is_tag
from outrider.serve.translation import named_as

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.trace import Tracer

__all__ = ["create_app"]

_log = logging.getLogger("outrider.serve")
_END_S = 20.0  # limit on the whole shutdown; the waits in it have shorter limits


def _answer(name: str, text: str = "", /, **fields: Any) -> Any:
    """The schema of an answer, for the OpenAPI document. A field is its type, or a tuple of type and default."""
    types = {field: kind if isinstance(kind, tuple) else (kind, ...) for field, kind in fields.items()}
    return create_model(name, __config__=ConfigDict(extra="allow"), __doc__=text or None, **types)  # type: ignore[call-overload]


_ERROR = _answer("ErrorDetail", message=str, type=str, param=str | None, code=str | None)
ErrorBody = _answer("ErrorBody", "The body of every error.", error=_ERROR)
_Common = {"id": str, "created": int, "model": str}
_Usage = _answer("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int)
_Logprobs = dict[str, Any] | None
_Reason = Literal["stop", "length", "abort"]
_Choice = _answer("CompletionChoice", index=int, text=str, logprobs=_Logprobs, finish_reason=_Reason)
_Choices: Any = list[_Choice]  # type: ignore[valid-type]
_Text = Literal["text_completion"]
Completion = _answer("Completion", "The answer of /v1/completions.", **_Common, object=_Text, choices=_Choices, usage=_Usage)
_Message = _answer("ChatMessage", role=Literal["assistant"], content=str | None, tool_calls=(list[dict[str, Any]] | None, None))
_ChatReason = Literal[_Reason, "tool_calls"]
_ChatChoice = _answer("ChatChoice", index=int, message=_Message, logprobs=_Logprobs, finish_reason=_ChatReason)
_ChatChoices: Any = list[_ChatChoice]  # type: ignore[valid-type]
_Chat = Literal["chat.completion"]
ChatCompletion = _answer(
    "ChatCompletion", "The answer of /v1/chat/completions.", **_Common, object=_Chat, choices=_ChatChoices, usage=_Usage
)
ModelCard = _answer(
    "ModelCard", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int, fingerprint=dict[str, Any]
)
ModelList = _answer("ModelList", object=Literal["list"], data=list[ModelCard])  # type: ignore[valid-type]
Tokenized = _answer("Tokenized", tokens=list[int], count=int, max_model_len=int)
Detokenized = _answer("Detokenized", prompt=str)
KeptTexts = _answer("KeptTexts", texts=int, tokens=int)
Health = _answer("Health", status=Literal["ok", "loading", "draining", "dead"], fingerprint=(str | None, None))
Version = _answer("Version", version=str)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503)
}
_MESSAGE_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": MessageErrorBody} for status in _ERRORS}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
_PAGE_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json",
    ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
}  # fmt: skip
router = APIRouter(route_class=StrictRoute, responses=_ERRORS)
router.post("/v1/load_lora_adapter", **loras.PLAIN, summary="Load a LoRA adapter")(loras.load_lora_adapter)
router.post("/v1/unload_lora_adapter", **loras.PLAIN, summary="Unload a LoRA adapter")(loras.unload_lora_adapter)


def create_app(
    settings: ServerSettings,
    load: Callable[[], LLM],
    tracer: Tracer | None = None,
    announce: Callable[[LLM], None] | None = None,
) -> FastAPI:
    """An app that loads its model in the background after startup. `announce` is called when it is ready."""
    service = Service(settings, load, announce)
    checker = BodyChecker(settings.limits)
    keys = Keys(settings.api_key, settings.api_key_file)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        service.begin()
        try:
            yield
        finally:
            async with asyncio.timeout(_END_S):
                await asyncio.gather(service.end(), in_daemon_thread(checker.close, "outrider-close-body"))

    app = FastAPI(title="Outrider", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.checker = checker
    app.state.tracer = tracer
    app.state.keys = keys
    app.state.responses = ResponseStore(settings.limits)
    install_handlers(app)
    app.router.routes += router.routes  # flat, so that a list of the app's routes contains them
    app.add_middleware(AccessGuard, settings=settings, keys=keys)
    if settings.allow_origin:  # outside the guard: a preflight carries no key, and refusals need CORS headers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    paths = [getattr(route, "path", "") for route in app.routes]
    app.add_middleware(Exchange, settings=settings, metrics=service.metrics, paths=paths)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service  # type: ignore[no-any-return]


@router.post("/v1/completions", response_model=Completion, responses={200: {"content": _STREAM}}, summary="Continue prompts")
async def completions(request: Request, body: CompletionRequest) -> Response:
    return await _generate(request, body, prepare_completion, CompletionAnswer, "cmpl")


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"content": _STREAM}},
    summary="Answer a conversation",
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    return await _generate(request, body, prepare_chat, ChatAnswer, "chatcmpl")


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses={200: {"content": _STREAM}},
    summary="Answer a conversation that may be stored",
)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    service = _service(request)
    service.ready()
    with named_as(RESPONSE_NAMES):
        owner, previous = Owner(client_of(request.scope), body.cache_salt or ""), body.previous_response_id
        turns = () if previous is None else _stored(request, owner, previous, "previous_response_id").turns
        work = partial(open_turn, body, request.app.state.responses, owner, turns)
        turn = await service.off_loop(work, owner.client, len(await request.body()))
        return await _generate(request, turn.chat, prepare_chat, partial(ResponseAnswer, turn), "resp")


@router.get("/v1/responses/{name}", response_model=ResponseObject, summary="A stored answer")
async def stored_response(request: Request, name: str, cache_salt: str = "") -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(400, "stream: a stored answer is not streamed", "stream")
    stored = _stored(request, Owner(client_of(request.scope), cache_salt), name, "id")
    return Response(stored.document, media_type="application/json")


@router.delete("/v1/responses/{name}", response_model=DeletedResponse, summary="Delete a stored answer")
async def delete_response(request: Request, name: str, cache_salt: str = "") -> Response:
    owner = Owner(client_of(request.scope), cache_salt)
    _stored(request, owner, name, "id")
    request.app.state.responses.drop(owner, name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


def _stored(request: Request, owner: Owner, name: str, param: str) -> StoredResponse:
    stored: StoredResponse | None = request.app.state.responses.get(owner, name)
    if stored is None:
        reason = "no answer with this id is stored for you: it may be too old, or its request had store: false"
        raise ApiError(404, f"{param}: {reason}; send the conversation as input", param, "response_not_found")
    return stored


@router.post(
    "/v1/messages",
    response_model=MessageAnswerObject,
    responses=_MESSAGE_ERRORS | {200: {"content": _STREAM}},
    summary="Answer a conversation in Anthropic's format",
)
async def messages(request: Request, body: MessagesRequest) -> Response:
    service = _service(request)
    tokenizer = service.ready().tokenizer
    reasons = tokenizer is not None and reasoning_of(tokenizer) is not None
    with named_as(MESSAGE_NAMES):
        chat = await service.off_loop(partial(as_chat, body, reasons), client_of(request.scope), len(await request.body()))
        return await _generate(request, chat, prepare_message, MessageAnswer, "msg")


@router.post(
    "/v1/messages/count_tokens", response_model=TokenCount, responses=_MESSAGE_ERRORS, summary="Count a conversation's tokens"
)
async def count_tokens(request: Request, body: CountRequest) -> Response:
    service = _service(request)
    llm = service.ready()
    _check_model(service, body.model)

    def work() -> int:
        prepared = prepare_chat(llm, as_counted_chat(body), service.settings.limits)
        return len(prepared.jobs[0][0][0].prompt_ids)

    with named_as(MESSAGE_NAMES):
        count = await service.off_loop(work, client_of(request.scope), len(await request.body()))
        return JSONResponse({"input_tokens": count})


async def _generate(
    request: Request,
    body: GenerationRequest,
    prepare: Callable[[LLM, Any, Limits, Rules], PreparedRequest],
    answers: Callable[..., Answer],
    prefix: str,
) -> Response:
    service = _service(request)
    llm = service.ready()
    _check_model(service, body.model)
    _check_priority(service, body.priority)
    adopt(body.request_id)
    body.model, body.tag = body.model or service.settings.model_name, body.tag or _header_tag(request)
    admission = service.admit(client_of(request.scope), count_sequences(body, service.settings.limits))
    try:
        work = partial(prepare, llm, body, service.settings.limits, service.rules)
        with service.metrics.preparation():
            prepared = await unless_gone(request.receive, _prepare(request, service, admission.client, work, body))
        service.hold_logprobs(admission, prepared.logprob_entries)
        shown = loras.check_adapter(service, body.model, prepared)
        answer = answers(llm, body, prepared, f"{prefix}-{body.request_id or request_id.get()}", shown)
        handle = answer.handle = service.submit(prepared.jobs, bool(body.stream), admission)
    except ClientGone:
        admission.abandon()
        return Response(status_code=499)  # the client has left
    except BaseException:
        admission.abandon()
        raise
    _note(request, service, body, answer, prepared)
    return LiveAnswer(service, handle, answer, streams=True) if body.stream else await _whole(request, service, handle, answer)


async def _prepare(
    request: Request, service: Service, client: str, work: Callable[[], PreparedRequest], body: GenerationRequest
) -> PreparedRequest:
    """Compile the request's grammar first, so that no tokeniser thread waits for a compiler. Then tokenise."""
    size = len(await request.body())
    if may_name_grammar(body):
        structured = await service.off_loop(partial(grammar_of, service.ready(), body), client, size)
        if structured is not None:
            try:
                await service.compiled(structured, client)
            except InvalidParameter as error:
                raise renamed(error, body) from None
    return await service.off_loop(work, client, size)


async def _whole(request: Request, service: Service, handle: RequestHandle, answer: Answer) -> Response:
    """The complete answer. A large one is written while it is sent."""
    large = False
    try:
        outputs = await unless_gone(request.receive, handle.whole())
        answer.check(outputs)
        large = answer.is_large(sum(len(output.token_ids) for output in outputs))
        if large:
            return LiveAnswer(service, handle, answer, streams=False)
        return Response(dumps(answer.whole(outputs)), media_type="application/json")
    except ClientGone:
        return Response(status_code=499)  # the client has left
    finally:
        if not large:
            service.abort(handle)
            handle.admission.answered()


def _note(request: Request, service: Service, body: GenerationRequest, answer: Answer, prepared: PreparedRequest) -> None:
    """Register the request's token counts and trace span, and log its body if `log_requests` is set."""
    answer.handle.on_end(partial(_count_tokens, request, prepared))
    tracer: Tracer | None = request.app.state.tracer
    if tracer is not None:
        headers = dict(request.headers) | {"x-request-id": request_id.get()}
        answer.handle.on_end(partial(tracer.finished, headers, service.settings.model_name, answer.id, prepared))
    if service.settings.log_requests:
        _log.info("%s %s", answer.id, body.model_dump_json(exclude_none=True))


def _count_tokens(request: Request, prepared: PreparedRequest, handle: RequestHandle) -> None:
    prompts = sum(len(requests[0].prompt_ids) for requests, _ in prepared.jobs)
    request.scope[TOKENS] = (prompts, sum(len(output.token_ids) for output in handle.outputs.values()))


def _header_tag(request: Request) -> str | None:
    """The tag in the request's header."""
    tag = request.headers.get(TAG_HEADER)
    if tag is not None and not is_tag(tag):
        raise ApiError(400, f"{TAG_HEADER}: must be 1 to 64 letters, digits, '.', '_' or '-'", TAG_HEADER)
    return tag


def _check_model(service: Service, name: str | None) -> None:
    settings, llm = service.settings, service.ready()
    if name is not None and name not in settings.names and name not in llm.loras:
        others = "".join(f", {lora!r}" for lora in llm.loras)
        served = f"this is {settings.model_name!r}{others}"
        raise ApiError(404, f"the model {name!r} is not served here; {served}", "model", "model_not_found")


def _check_priority(service: Service, priority: int | None) -> None:
    if priority and not service.settings.allow_priority:
        raise ApiError(400, "priority: all requests are equal here; start the server with --allow-priority", "priority")


@router.get("/v1/models", response_model=ModelList, summary="The model")
async def models(request: Request) -> Response:
    service = _service(request)
    cards = [_card(service, name) for name in service.settings.names]
    return JSONResponse({"object": "list", "data": cards + loras.adapter_cards(service, cards[0])})


@router.get("/v1/models/{name:path}", response_model=ModelCard, summary="One model")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    _check_model(service, name)
    cards = [_card(service, other) for other in service.settings.names]
    by_name = {card["id"]: card for card in (*cards, *loras.adapter_cards(service, cards[0]))}
    return JSONResponse(by_name[name])


def _card(service: Service, name: str) -> dict[str, Any]:
    llm = service.ready()
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "outrider",
        "root": service.settings.model_name,
        "max_model_len": llm.max_model_len,
        "fingerprint": llm.fingerprint.as_dict(),
    }


@router.post("/tokenize", response_model=Tokenized, summary="Text to token ids")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    service = _service(request)
    llm = service.ready()

    def work() -> bytes:
        ids = ids_of(llm, body)
        return b'{"tokens":[%s],"count":%d,"max_model_len":%d}' % (_written(ids), len(ids), llm.max_model_len)

    written = await service.off_loop(work, client_of(request.scope), len(await request.body()))
    return Response(written, media_type="application/json")


def _written(ids: Sequence[int]) -> bytes:
    """Ids as JSON, written in blocks: a million of them at once would hold the interpreter lock for long."""
    parts = (ids[start : start + 4096] for start in range(0, len(ids), 4096))
    return b",".join(",".join(map(str, part)).encode() for part in parts)


@router.post("/detokenize", response_model=Detokenized, summary="Token ids to text")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    service = _service(request)
    llm = service.ready()
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")

    def work() -> JSONResponse:
        if max(body.tokens, default=0) >= llm.config.vocab:
            raise ApiError(400, f"tokens: ids must be below {llm.config.vocab}", "tokens")
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return await service.off_loop(work, client_of(request.scope), len(await request.body()))


@router.post("/remember", response_model=KeptTexts, summary="Keep texts that this client's outputs are likely to quote")
async def remember(request: Request, body: RememberRequest) -> Response:
    owner, service = _owner_of(request, body.cache_salt), _service(request)
    llm = service.ready()
    work = partial(llm.intake.texts_to_keep, body.texts)
    texts = await service.off_loop(work, client_of(request.scope), len(await request.body()))
    kept = await service.keep_texts(owner, texts)
    return JSONResponse(kept._asdict())


@router.post("/forget", response_model=KeptTexts, summary="Drop the earlier texts of this client")
async def forget(request: Request, body: ForgetRequest) -> Response:
    forgotten = await _service(request).drop_texts(_owner_of(request, body.cache_salt))
    return JSONResponse(forgotten._asdict())


def _owner_of(request: Request, salt: str | None) -> str:
    owner = memory_of(client_of(request.scope), salt)
    if not owner:
        raise ApiError(400, "cache_salt: without an API key, texts are kept for requests with a cache_salt alone", "cache_salt")
    return owner


_HEALTH: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health}}}


@router.get("/health", **_HEALTH, summary="Whether it serves")
@router.get("/readyz", **_HEALTH, summary="Whether it serves")
async def health(request: Request) -> Response:
    service = _service(request)
    if service.status == "ok":
        return JSONResponse({"status": "ok", "fingerprint": service.ready().fingerprint.digest})
    return JSONResponse({"status": service.status}, 503)


@router.get("/livez", **_HEALTH, summary="Whether it lives")
async def livez(request: Request) -> Response:
    status = _service(request).status
    return JSONResponse({"status": status}, 503 if status == "dead" else 200)


@router.get("/version", response_model=Version, summary="The version")
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}, summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    service = _service(request)
    service.metrics.snapshot = await service.refresh_snapshot()
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats", summary="A snapshot for dashboards")
async def stats(request: Request) -> Response:
    service = _service(request)
    await service.refresh_snapshot()
    return JSONResponse(service.stats())


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return RedirectResponse("/openapi.json")


@router.get("/", include_in_schema=False)
@router.get("/page/{name}", include_in_schema=False)
async def page(name: str = "index.html") -> Response:
    """A file of the page. The name is looked up in the folder's listing and never joined to a path."""
    folder = files("outrider.serve") / "page"
    kind = _PAGE_TYPES.get(PurePosixPath(name).suffix)
    page_files = {file.name: file for file in folder.iterdir()} if folder.is_dir() else {}
    if kind is None or name not in page_files:
        raise ApiError(404, "there is no such page")
    return Response(page_files[name].read_bytes(), media_type=kind)
