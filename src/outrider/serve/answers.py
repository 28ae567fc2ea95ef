"""From the engine's output to the API's JSON: complete answers and the events of a stream.

A complete answer is made of one chunk with all of an output, like the event of a stream. Events are plain dictionaries
written as JSON; no schema checks them. Long lists are `LazyRows`, whose items are created while they are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.engine.outputs import CompletionOutput, Run, StreamPiece, sources_of
from outrider.sampling import Logprob
from outrider.serve.errors import ApiError, body_of
from outrider.serve.memory import prediction_details
from outrider.serve.message import MessageStream, open_message
from outrider.serve.metrics import metrics_of
from outrider.serve.requests import PreparedRequest
from outrider.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from outrider.serve.streaming import LazyRows, dumps, json_parts, rows
from outrider.serve.tool_calls import CallDelta, collect
from outrider.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.service import RequestHandle

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer"]

_FLOOR = -9999.0  # log probabilities in JSON are finite
_LARGE = 1024  # entries (log probabilities and token details); larger answers are not written on the event loop
_TOKENS_PER_ENTRY = 16  # plain token ids or text that take as long to write as one entry
_CHARS_PER_ENTRY = 64  # characters of an echoed prompt that take as long to write as one entry
LogprobsAt = Mapping[int, Logprob]  # log probabilities at one position


class Answer:
    """The common part of completion and chat answers."""

    kinds = ("", "")  # the `object` field of a complete answer and of a stream event

    def __init__(self, llm: LLM, body: GenerationRequest, prepared: PreparedRequest, name: str, model: str) -> None:
        self.id = name
        self.handle: RequestHandle
        self._llm = llm
        self._body = body
        self._prepared = prepared
        self._created = int(time.time())
        self._model = model
        self._n = len(prepared.jobs[0][0])
        self._unfinished = prepared.sequences  # sequences whose last chunk has not been written
        self._counts = [0] * prepared.sequences  # tokens written so far, by sequence
        self._prompt_entries = _prompt_entries(body, prepared)  # entries written with the first token of each sequence
        self._texts: dict[int, TextStream] = {}
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    def check(self, outputs: Sequence[CompletionOutput]) -> None:
        """Raise the API error of a sequence that failed."""
        for output in outputs:
            if output.finish_reason == "error":
                raise _failed(output)

    def whole(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        return self._head(self.kinds[0]) | {
            "choices": [self.whole_choice(index, _as_chunk(output)) for index, output in enumerate(outputs)],
            "usage": self._usage(outputs),
            "metrics": self._metrics(outputs),
        }

    def is_large(self, tokens: int) -> bool:
        """Whether the JSON for this many tokens takes long to write."""
        with_logprobs = self._prepared.jobs[0][0][0].params.logprobs is not None
        entries = tokens * (self.top + 1) if with_logprobs else 0
        details = tokens + entries if self._body.return_token_details else 0
        prompts = 0 if all(self._counts) else self._prompt_entries
        return prompts + entries + details + tokens // _TOKENS_PER_ENTRY > _LARGE

    def events(self, chunks: Sequence[tuple[int, StreamPiece]]) -> bytes:
        """The server-sent events of these chunks, as bytes."""
        return self.framed(self._events(chunks))

    def framed(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Events as they are sent."""
        return "".join([f"{self.lead(event)}{dumps(event)}\n\n" for event in events]).encode()

    def lead(self, event: dict[str, Any]) -> str:  # noqa: ARG002 (other APIs name their events)
        """What stands before an event's JSON."""
        return "data: "

    def ping(self) -> bytes:
        """What is sent while there is no output."""
        return b": keep-alive\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that has failed."""
        return self.framed([body_of(error)]) + b"data: [DONE]\n\n"

    def event_parts(self, chunks: Sequence[tuple[int, StreamPiece]]) -> Iterator[str]:
        """The server-sent events of these chunks, as small parts that are made one at a time."""
        for event in self._events(chunks):
            yield self.lead(event)
            yield from json_parts(event)
            yield "\n\n"

    def _events(self, chunks: Sequence[tuple[int, StreamPiece]]) -> Iterator[dict[str, Any]]:
        for index, chunk in chunks:
            self._counts[index] += len(chunk.token_ids)
            self._unfinished -= chunk.output is not None
            if chunk.output is not None and chunk.output.finish_reason == "error":
                yield body_of(_failed(chunk.output))
                continue
            for choice in self.chunk_choices(index, chunk):
                event = self._head(self.kinds[1])
                event["choices"] = [choice]
                if self._usage_always:
                    event["usage"] = self._usage_of(sum(self._counts))
                elif self._usage_at_end:
                    event["usage"] = None
                if not self._unfinished and choice["finish_reason"] is not None:
                    event["metrics"] = self._metrics(self.handle.finished_outputs())
                yield event

    def closing(self) -> bytes:
        """The last events of a stream: usage, if the request wants it, and [DONE]."""
        if not self._usage_at_end:
            return b"data: [DONE]\n\n"
        outputs = self.handle.finished_outputs()
        chunk = {"choices": [], "usage": self._usage(outputs), "metrics": self._metrics(outputs)}
        return f"data: {dumps(self._head(self.kinds[1]) | chunk)}\n\ndata: [DONE]\n\n".encode()

    def whole_choice(self, index: int, chunk: StreamPiece) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, index: int, chunk: StreamPiece) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def top(self) -> int:
        """How many of the most probable tokens the request wants at each position."""
        raise NotImplementedError

    def extras(self, index: int, chunk: StreamPiece) -> dict[str, Any]:
        """Token ids and token details, if the request wants them."""
        out: dict[str, Any] = {}
        if self._body.return_token_ids:
            out["token_ids"] = list(chunk.token_ids)
        if self._body.return_token_details:
            out["token_details"] = rows(self._details(index, chunk), len(chunk.token_ids))
        return out

    def _details(self, index: int, chunk: StreamPiece) -> Iterator[dict[str, Any]]:
        """The details of each token. The rejected draft tokens of a round are added to its last token, which the target chose."""
        last: dict[int, Run] = {}  # by the index of a round's last token
        kept = 0
        for run in chunk.runs:
            kept += run.kept
            if run.rejected and run.kept:
                last[kept - 1] = run
        logprobs = chunk.logprobs or [{}] * len(chunk.token_ids)
        for number, token in enumerate(zip(chunk.token_ids, sources_of(chunk.runs), logprobs, strict=True)):
            detail = self._detail(index, *token)
            if number in last:
                detail["drafter"] = last[number].source
                detail["rejected"] = [
                    {"id": node.token, "text": self._decoded(node.token), "position": node.position, "parent": node.parent}
                    for node in last[number].rejected
                ]
            yield detail

    def _decoded(self, token: int) -> str:
        tokenizer = self._llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    def likeliest(self, logprobs: LogprobsAt) -> dict[int, Logprob]:
        """The most probable tokens, as many as the request wants."""
        return {token: logprob for token, logprob in logprobs.items() if logprob.rank <= self.top}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"outrider-{__version__}-{self._llm.fingerprint.digest}",
        }

    def _detail(self, index: int, token: int, source: tuple[str, int | None], logprobs: LogprobsAt) -> dict[str, Any]:
        top = [{"id": i, "text": p.decoded_token or "", "logprob": _finite(p)} for i, p in self.likeliest(logprobs).items()]
        return {
            "id": token,
            "text": self._text_of(index, token),
            "source": source[0],
            "accepted": source[1] is not None,
            "position": source[1],
            "logprob": _finite(logprobs[token]) if token in logprobs else None,
            "top": top,
        }

    def _text_of(self, index: int, token: int) -> str:
        """The text that a token completes. It is empty in the middle of a character."""
        if self._llm.tokenizer is None:
            return ""
        if index not in self._texts:
            prompt = self._prepared.jobs[index // self._n][0][0].prompt_ids
            self._texts[index] = TextStream(self._llm.tokenizer, prompt, self._body.skip_special_tokens is not False)
        return self._texts[index].push(token)

    def _metrics(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        return metrics_of(outputs, self._llm.speculation.draft_tokens)

    def _usage(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        usage = self._usage_of(0 if self._prepared.cut else sum(len(output.token_ids) for output in outputs))
        cached = sum(output.cached_tokens for output in outputs if output.index == 0)
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _usage_of(self, written: int) -> dict[str, Any]:
        prompt = sum(len(requests[0].prompt_ids) for requests, _ in self._prepared.jobs)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    kinds = ("text_completion", "text_completion")
    _body: CompletionRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets = [0] * self._prepared.sequences  # characters written so far, summed over the texts of single tokens

    @property
    def top(self) -> int:
        return self._body.logprobs or 0

    def whole_choice(self, index: int, chunk: StreamPiece) -> dict[str, Any]:
        choice = self._choice(index, chunk, is_first=True)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._request(index).prompt_ids)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = LazyRows(map(_by_id, self._prompt_logprobs(index)))
        return choice

    def chunk_choices(self, index: int, chunk: StreamPiece) -> list[dict[str, Any]]:
        return [self._choice(index, chunk, is_first=self._counts[index] == len(chunk.token_ids))]

    def _choice(self, index: int, chunk: StreamPiece, is_first: bool) -> dict[str, Any]:
        if self._prepared.cut:
            chunk = StreamPiece(chunk.index, "", [], [], chunk.output)
        choice = {
            "index": index,
            "text": (self._echo(index) if is_first else "") + chunk.text,
            "logprobs": self._logprobs(index, chunk, is_first),
            "finish_reason": None if chunk.output is None else chunk.output.finish_reason,
        }
        if chunk.output is not None:
            choice["stop_reason"] = chunk.output.stop_reason
        return choice | self.extras(index, chunk)

    def _request(self, index: int) -> Any:
        return self._prepared.jobs[index // self._n][0][0]

    def _echo(self, index: int) -> str:
        return self._prepared.texts[index // self._n] if self._prepared.texts else ""

    def _prompt_logprobs(self, index: int) -> list[dict[int, Logprob] | None]:
        return self.handle.jobs[index // self._n].processors[0].prompt_logprobs

    def _logprobs(self, index: int, chunk: StreamPiece, is_first: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        positions: list[tuple[int, LogprobsAt | None]] = list(zip(chunk.token_ids, chunk.logprobs, strict=True))
        if is_first and self._prepared.texts:
            positions = [*zip(self._request(index).prompt_ids, self._prompt_logprobs(index), strict=True), *positions]
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, chances in positions:
            text = self._decoded(token) if chances is None else chances[token].decoded_token or ""
            out["tokens"].append(text)
            out["token_logprobs"].append(None if chances is None else _finite(chances[token]))
            out["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        named = (None if chances is None else self._named(chances) for _, chances in positions)
        out["top_logprobs"] = rows(named, len(positions))
        return out

    def _named(self, logprobs: LogprobsAt) -> dict[str, float]:
        """The most probable tokens by their texts. Of two tokens with the same text, the more probable one is kept."""
        out: dict[str, float] = {}
        for logprob in self.likeliest(logprobs).values():
            out.setdefault(logprob.decoded_token or "", _finite(logprob))
        return out


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    kinds = ("chat.completion", "chat.completion.chunk")
    _body: ChatRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._greeted: set[int] = set()
        self._messages: dict[int, MessageStream] = {}

    @property
    def top(self) -> int:
        return self._body.top_logprobs or 0

    def whole_choice(self, index: int, chunk: StreamPiece) -> dict[str, Any]:
        output = chunk.output
        assert output is not None
        stream = self._open()
        deltas = [*stream.push(output.text), *stream.finish(_was_cut(output))]
        reasoning = "".join(delta.reasoning for delta in deltas)
        content, calls = collect(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not reasoning else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in calls]
        choice = {"index": index, "message": message, "logprobs": self._logprobs(chunk)}
        return choice | _ending(output, bool(calls)) | self.extras(index, chunk)

    def chunk_choices(self, index: int, chunk: StreamPiece) -> list[dict[str, Any]]:
        deltas = self._deltas(index, chunk)
        wants_tokens = self._body.logprobs or self._body.return_token_ids or self._body.return_token_details
        if not deltas and chunk.token_ids and wants_tokens:
            deltas = [{"content": ""}]  # tokens whose text is still held back
        if index not in self._greeted:
            self._greeted.add(index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices and chunk.token_ids:  # the tokens of all deltas are listed with the last one
            choices[-1] |= {"logprobs": self._logprobs(chunk)} | self.extras(index, chunk)
        if chunk.output is not None:
            called = index in self._messages and self._messages[index].called
            choices.append({"index": index, "delta": {}, "logprobs": None} | _ending(chunk.output, called))
        return choices

    def _deltas(self, index: int, chunk: StreamPiece) -> list[dict[str, Any]]:
        if index not in self._messages:
            self._messages[index] = self._open()
        stream = self._messages[index]
        deltas = stream.push(chunk.text) if chunk.text else []
        if chunk.output is not None:
            deltas += stream.finish(_was_cut(chunk.output))
        return [_delta(delta) for delta in deltas]

    def _open(self) -> MessageStream:
        prepared = self._prepared
        return open_message(prepared.tools, prepared.family, prepared.reasoning, prepared.channels)

    def _usage(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        markers = self._prepared.markers
        reasoned = 0 if markers is None else sum(markers.count(output.token_ids) for output in outputs)
        details = {"reasoning_tokens": reasoned} | prediction_details(self._prepared.jobs[0][0][0].prediction, outputs)
        return super()._usage(outputs) | {"completion_tokens_details": details}

    def _logprobs(self, chunk: StreamPiece) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = (self._position(*token) for token in zip(chunk.token_ids, chunk.logprobs, strict=True))
        return {"content": rows(content, len(chunk.token_ids)), "refusal": None}

    def _position(self, token: int, chances: LogprobsAt) -> dict[str, Any]:
        top = [self._spelled(i, chance) for i, chance in self.likeliest(chances).items()]
        return self._spelled(token, chances[token]) | {"top_logprobs": top}

    def _spelled(self, token: int, logprob: Logprob) -> dict[str, Any]:
        known = _spellings(self._llm.tokenizer).get(token)
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode() if known is None else known[1])}


def _prompt_entries(body: GenerationRequest, prepared: PreparedRequest) -> int:
    """The size of the prompts' part of an answer, in entries that take as long to write as one log probability."""
    requests = [request for job, _ in prepared.jobs for request in job]
    ids = sum(len(request.prompt_ids) for request in requests) if body.return_token_ids else 0
    echoed = sum(map(len, prepared.texts)) * len(prepared.jobs[0][0])
    return prepared.logprob_entries + ids // _TOKENS_PER_ENTRY + echoed // _CHARS_PER_ENTRY


def _as_chunk(output: CompletionOutput) -> StreamPiece:
    """An output as one chunk."""
    return StreamPiece(output.index, output.text, output.token_ids, output.from_draft, output, output.runs, output.logprobs or [])


def _ending(output: CompletionOutput, called: bool) -> dict[str, Any]:
    """The end of a chat choice. `called`: the answer calls a tool."""
    reason = "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason
    return {"finish_reason": reason, "stop_reason": output.stop_reason}


def _was_cut(output: CompletionOutput) -> bool:
    """Whether the text was cut off: by length, by a stop string, or by an abort."""
    return output.finish_reason != "stop" or isinstance(output.stop_reason, str)


def _failed(output: CompletionOutput) -> ApiError:
    """The API error of a failed sequence. Details of a failed forward are only in the server's log."""
    reason = str(output.stop_reason)
    if reason.startswith("the grammar takes too long"):
        return ApiError(400, reason, "response_format", "grammar_too_slow")
    if reason.startswith("the request's round failed"):
        return ApiError(500, "the engine failed on this request; the server's log says how", code="corrupted")
    return ApiError(400 if "no token can follow" in reason else 500, reason, code="corrupted")


def _delta(delta: CallDelta) -> dict[str, Any]:
    """The JSON of a delta: of reasoning, of text or of a tool call."""
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    if delta.index is None:
        return {"content": delta.content}
    return {"tool_calls": [{"index": delta.index} | _call(delta.id, delta.name, delta.arguments)]}


def _call(name: str | None, function: str | None, arguments: str) -> dict[str, Any]:
    """The JSON of a tool call. In a stream, id and name are sent once."""
    if name is None:
        return {"function": {"arguments": arguments}}
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


@lru_cache(maxsize=4)
def _spellings(tokenizer: Tokenizer | None) -> dict[int, tuple[bool, bytes]]:
    return {} if tokenizer is None else tokenizer.spellings()


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _FLOOR)


def _by_id(logprobs: LogprobsAt | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {str(i): {"logprob": _finite(p), "rank": p.rank, "decoded_token": p.decoded_token} for i, p in logprobs.items()}
