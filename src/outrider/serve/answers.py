"""From what the engine wrote to what a client reads: whole answers and the chunks of a stream.

Chunks are plain dictionaries written by `json.dumps`; no schema is involved in a token's way out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.engine.outputs import CompletionOutput, Run, StreamPiece, sources_of
from outrider.sampling import Logprob
from outrider.serve.errors import ApiError, body_of
from outrider.serve.requests import Prepared
from outrider.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from outrider.serve.tools import ToolStream, parse_tool_calls
from outrider.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.service import Ticket

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "metrics_of"]

_FLOOR = -9999.0  # log probabilities in JSON are finite
Found = Mapping[int, Logprob]  # log probabilities at one position


class Answer:
    """What completions and chats have in common."""

    kinds = ("", "")  # the `object` of a whole answer and of a chunk

    def __init__(self, llm: LLM, body: GenerationRequest, prepared: Prepared, name: str, model: str) -> None:
        self.id = name
        self.ticket: Ticket
        self._llm = llm
        self._body = body
        self._prepared = prepared
        self._created = int(time.time())
        self._model = model
        self._n = len(prepared.jobs[0][0])
        self._left = prepared.sequences  # not yet told to their end
        self._counts = [0] * prepared.sequences  # tokens told
        self._texts: dict[int, TextStream] = {}
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    def whole(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        for output in outputs:
            if output.finish_reason == "error":
                raise _failed(output)
        return self._head(self.kinds[0]) | {
            "choices": [self.whole_choice(index, output) for index, output in enumerate(outputs)],
            "usage": self._usage(outputs),
            "metrics": self._metrics(outputs),
        }

    def events(self, pieces: Sequence[tuple[int, StreamPiece]]) -> bytes:
        """The chunks that some pieces make."""
        out: list[str] = []
        for index, piece in pieces:
            self._counts[index] += len(piece.token_ids)
            self._left -= piece.output is not None
            if piece.output is not None and piece.output.finish_reason == "error":
                out.append(json.dumps(body_of(_failed(piece.output))))
                continue
            for choice in self.chunk_choices(index, piece):
                chunk = self._head(self.kinds[1])
                chunk["choices"] = [choice]
                if self._usage_always:
                    chunk["usage"] = self._usage_of(sum(self._counts))
                elif self._usage_at_end:
                    chunk["usage"] = None
                if not self._left and choice["finish_reason"] is not None:
                    chunk["metrics"] = self._metrics(self._outputs())
                out.append(json.dumps(chunk))
        return "".join([f"data: {own}\n\n" for own in out]).encode()

    def closing(self) -> bytes:
        """What ends a stream."""
        if not self._usage_at_end:
            return b"data: [DONE]\n\n"
        outputs = self._outputs()
        chunk = {"choices": [], "usage": self._usage(outputs), "metrics": self._metrics(outputs)}
        return f"data: {json.dumps(self._head(self.kinds[1]) | chunk)}\n\ndata: [DONE]\n\n".encode()

    def whole_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, index: int, piece: StreamPiece) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def top(self) -> int:
        """How many of the most probable tokens were asked for."""
        raise NotImplementedError

    def extras(self, index: int, tokens: Sequence[int], runs: Sequence[Run], found: Sequence[Found]) -> dict[str, Any]:
        """Token ids and where each came from, where asked for."""
        out: dict[str, Any] = {}
        if self._body.return_token_ids:
            out["token_ids"] = list(tokens)
        if self._body.return_token_details:
            rows = zip(tokens, sources_of(runs), found or [{}] * len(tokens), strict=True)
            out["token_details"] = [self._detail(index, token, source, own) for token, source, own in rows]
        return out

    def likeliest(self, found: Found) -> dict[int, Logprob]:
        """The most probable tokens, as many as were asked for."""
        return {token: own for token, own in found.items() if own.rank <= self.top}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"outrider-{__version__}",
        }

    def _detail(self, index: int, token: int, source: tuple[str, int | None], found: Found) -> dict[str, Any]:
        top = [{"id": i, "text": p.decoded_token or "", "logprob": _finite(p)} for i, p in self.likeliest(found).items()]
        return {
            "id": token,
            "text": self._text_of(index, token),
            "source": source[0],
            "accepted": source[1] is not None,
            "position": source[1],
            "logprob": _finite(found[token]) if token in found else None,
            "top": top,
        }

    def _text_of(self, index: int, token: int) -> str:
        """The text a token completes, which is empty in the middle of a character."""
        if self._llm.tokenizer is None:
            return ""
        if index not in self._texts:
            prompt = self._prepared.jobs[index // self._n][0][0].prompt_ids
            self._texts[index] = TextStream(self._llm.tokenizer, prompt, self._body.skip_special_tokens is not False)
        return self._texts[index].push(token)

    def _outputs(self) -> list[CompletionOutput]:
        return [self.ticket.outputs[i] for i in sorted(self.ticket.outputs)]

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

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._offsets = [0] * self._prepared.sequences  # characters told, by the tokens' own texts

    @property
    def top(self) -> int:
        return self._body.logprobs or 0

    def whole_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        text, tokens, found, runs = output.text, output.token_ids, output.logprobs or [], output.runs
        if self._prepared.cut:
            text, tokens, found, runs = "", [], [], []
        choice = {
            "index": index,
            "text": self._echo(index) + text,
            "logprobs": self._logprobs(index, tokens, found, True),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._request(index).prompt_ids)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [_by_id(own) for own in self._prompt_logprobs(index)]
        return choice | self.extras(index, tokens, runs, found)

    def chunk_choices(self, index: int, piece: StreamPiece) -> list[dict[str, Any]]:
        first = self._counts[index] == len(piece.token_ids)
        if self._prepared.cut:
            piece = StreamPiece(piece.index, "", [], [], piece.output)
        output = piece.output
        choice = {
            "index": index,
            "text": (self._echo(index) if first else "") + piece.text,
            "logprobs": self._logprobs(index, piece.token_ids, piece.logprobs, first),
            "finish_reason": None if output is None else output.finish_reason,
        }
        if output is not None:
            choice["stop_reason"] = output.stop_reason
        return [choice | self.extras(index, piece.token_ids, piece.runs, piece.logprobs)]

    def _request(self, index: int) -> Any:
        return self._prepared.jobs[index // self._n][0][0]

    def _echo(self, index: int) -> str:
        return self._prepared.texts[index // self._n] if self._prepared.texts else ""

    def _prompt_logprobs(self, index: int) -> list[dict[int, Logprob] | None]:
        return self.ticket.jobs[index // self._n].writers[0].prompt_logprobs

    def _logprobs(self, index: int, tokens: Sequence[int], found: Sequence[Found], first: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        rows: list[tuple[int, Found | None]] = list(zip(tokens, found, strict=True))
        if first and self._prepared.texts:
            rows = [*zip(self._request(index).prompt_ids, self._prompt_logprobs(index), strict=True), *rows]
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, own in rows:
            text = self._spelled(token) if own is None else own[token].decoded_token or ""
            out["tokens"].append(text)
            out["token_logprobs"].append(None if own is None else _finite(own[token]))
            out["top_logprobs"].append(None if own is None else self._named(own))
            out["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return out

    def _named(self, found: Found) -> dict[str, float]:
        """The likeliest by their texts; where two spell alike the likelier stays."""
        out: dict[str, float] = {}
        for own in self.likeliest(found).values():
            out.setdefault(own.decoded_token or "", _finite(own))
        return out

    def _spelled(self, token: int) -> str:
        tokenizer = self._llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    kinds = ("chat.completion", "chat.completion.chunk")
    _body: ChatRequest

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._greeted: set[int] = set()
        self._calls: dict[int, ToolStream] = {}

    @property
    def top(self) -> int:
        return self._body.top_logprobs or 0

    def whole_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        reason = output.finish_reason
        if self._prepared.family:
            content, calls = parse_tool_calls(output.text, self._prepared.tools, self._prepared.family)
            message["content"] = content
            if calls:
                message["tool_calls"] = [_call(own.id, own.name, own.arguments) for own in calls]
                reason = "tool_calls" if reason == "stop" else reason
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs or []),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        return choice | self.extras(index, output.token_ids, output.runs, output.logprobs or [])

    def chunk_choices(self, index: int, piece: StreamPiece) -> list[dict[str, Any]]:
        output = piece.output
        deltas = self._deltas(index, piece)
        if (
            not deltas
            and piece.token_ids
            and (self._body.logprobs or self._body.return_token_ids or self._body.return_token_details)
        ):
            deltas = [{"content": ""}]  # tokens whose text is still held back
        if index not in self._greeted:
            self._greeted.add(index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices and piece.token_ids:  # the tokens of all that is told go with the last of it
            choices[-1]["logprobs"] = self._logprobs(piece.token_ids, piece.logprobs)
            choices[-1] |= self.extras(index, piece.token_ids, piece.runs, piece.logprobs)
        if output is not None:
            calls = index in self._calls and self._calls[index].called and output.finish_reason == "stop"
            reason = "tool_calls" if calls else output.finish_reason
            choices.append(
                {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason, "stop_reason": output.stop_reason}
            )
        return choices

    def _deltas(self, index: int, piece: StreamPiece) -> list[dict[str, Any]]:
        if not self._prepared.family:
            return [{"content": piece.text}] if piece.text else []
        if index not in self._calls:
            self._calls[index] = ToolStream(self._prepared.tools, self._prepared.family)
        reader = self._calls[index]
        found = [*(reader.push(piece.text) if piece.text else ()), *(reader.finish() if piece.output is not None else ())]
        return [
            {"content": own.content}
            if own.index is None
            else {"tool_calls": [{"index": own.index} | _call(own.id, own.name, own.arguments)]}
            for own in found
        ]

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Found]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for token, own in zip(tokens, found, strict=True):
            top = [self._spelled(i, p) for i, p in self.likeliest(own).items()]
            content.append(self._spelled(token, own[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _spelled(self, token: int, own: Logprob) -> dict[str, Any]:
        known = _spellings(self._llm.tokenizer).get(token)
        text = own.decoded_token or ""
        return {"token": text, "logprob": _finite(own), "bytes": list(text.encode() if known is None else known[1])}


def metrics_of(outputs: Sequence[CompletionOutput], draft_tokens: int) -> dict[str, Any]:
    """What speculation did, in the field's names and some of our own, and how long it took; over all outputs."""
    stats = [output.speculation for output in outputs]
    drafted_at, accepted_at = (_sum([own[f"{kind}_by_position"] for own in stats]) for kind in ("drafted", "accepted"))
    drafted, accepted = sum(own["drafted"] for own in stats), sum(own["accepted"] for own in stats)
    steps = drafted_at[0] if drafted_at else 0
    rounds, tokens = sum(own["rounds"] for own in stats), sum(len(output.token_ids) for output in outputs)
    reached = [steps, *accepted_at, 0]
    first = stats[0] if stats else {}
    total = max((output.timings.total_s for output in outputs), default=0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(1 + accepted / steps, 4) if steps else 0.0,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "acceptance_histogram": [a - b for a, b in pairwise(reached)] if steps else [],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": draft_tokens,
            "method": first.get("method", "none"),
            "rounds": rounds,
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_by_position": [round(a / d, 4) for a, d in zip(accepted_at, drafted_at, strict=False)],
            "off_reason": first.get("off_reason"),
            "fallback_reason": first.get("fallback_reason"),
        },
        "timings": {
            "first_token_ms": round(1000 * min((output.timings.first_token_s for output in outputs), default=0.0), 3),
            "queue_ms": round(1000 * max((output.timings.queued_s for output in outputs), default=0.0), 3),
            "total_ms": round(1000 * total, 3),
            "tokens_per_s": round(tokens / total, 3) if total > 0 else 0.0,
            "draft_n": drafted,
            "draft_n_accepted": accepted,
        },
    }


def _failed(output: CompletionOutput) -> ApiError:
    """Why a sequence could not go on; what the forward said stays in the server's log."""
    reason = str(output.stop_reason)
    if reason.startswith("the model's forward failed"):
        return ApiError(500, "the model's forward failed; the server's log says how", code="corrupted")
    return ApiError(400 if "no token can follow" in reason else 500, reason, code="corrupted")


def _call(name: str | None, function: str | None, arguments: str) -> dict[str, Any]:
    """A tool call; in a stream, id and name come once."""
    if name is None:
        return {"function": {"arguments": arguments}}
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    out = [0] * max(map(len, rows), default=0)
    for row in rows:
        for i, value in enumerate(row):
            out[i] += value
    return out


@lru_cache(maxsize=4)
def _spellings(tokenizer: Tokenizer | None) -> dict[int, tuple[bool, bytes]]:
    return {} if tokenizer is None else tokenizer.spellings()


def _finite(own: Logprob) -> float:
    return max(own.logprob, _FLOOR)


def _by_id(found: Found | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {str(i): {"logprob": _finite(p), "rank": p.rank, "decoded_token": p.decoded_token} for i, p in found.items()}
