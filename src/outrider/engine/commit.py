"""Commit: a round's verdicts become tokens, text, stop conditions and settled KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter

import torch

from outrider.cache import KVPool
from outrider.core import Batch, Scores, Sequence, Verdict
from outrider.engine.outputs import CompletionOutput, Run, StreamPiece, Timings
from outrider.sampling import CORRUPTED, Logprob, logprobs_of
from outrider.text import StopStrings, TextStream, Tokenizer

__all__ = ["Settled", "Writer", "advance", "settle_kv"]


@dataclass(slots=True)
class Settled:
    """What one sequence kept of a round."""

    kept: int = 0  # tokens emitted
    accepted: int = 0  # of them, guessed
    drafted: int = 0  # nodes judged


@dataclass(slots=True)
class Writer:
    """The growing output of one sequence: text, log probabilities, where it ends."""

    seq: Sequence
    tokenizer: Tokenizer | None
    _text: str = ""
    _unread: list[int] = field(default_factory=list)  # tokens not yet turned into text
    shown: int = 0  # characters already streamed
    sent: int = 0  # tokens already streamed
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # one for each round that emitted
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the start
    submitted: float = field(default_factory=perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    _runs_sent: int = 0
    _stream: TextStream | None = None
    _stops: StopStrings = field(default_factory=lambda: StopStrings(()))

    def __post_init__(self) -> None:
        params = self.seq.request.params
        if self.tokenizer is not None:
            self._stream = TextStream(self.tokenizer, self.seq.request.prompt_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings)

    @property
    def text(self) -> str:
        """The text so far. Tokens become text when someone looks, or at once where stop strings do."""
        if self._stream is not None:
            self._text += "".join(map(self._stream.push, self._unread))
            if self.seq.finish_reason is not None and not isinstance(self.seq.stop_reason, str):
                self._text += self._stream.flush()
        self._unread.clear()
        return self._text

    def push(self, token: int, guessed: bool) -> bool:
        """Take one token; whether the sequence ends with it."""
        seq = self.seq
        seq.tokens.append(token)
        self.from_draft.append(guessed)
        request = seq.request
        params, length = request.params, len(seq.tokens) - len(request.prompt_ids)
        ends = token in request.stop_ids and length >= params.min_tokens
        if not ends or params.include_stop_str_in_output:
            self._unread.append(token)
        if ends:
            own = token in (params.stop_token_ids or ())
            seq.finish_reason, seq.stop_reason = "stop", token if own else None
        elif not (params.stop and self._hit_stop_string()) and length >= request.max_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def _hit_stop_string(self) -> bool:
        params = self.seq.request.params
        checked, text = len(self._text), self.text
        if self.seq.output_len <= params.min_tokens:
            return False
        found = self._stops.find(text, checked)
        if found is None:
            return False
        start, stop = found
        self._text = text[: start + len(stop) if params.include_stop_str_in_output else start]
        self.seq.finish_reason, self.seq.stop_reason = "stop", stop
        return True

    @property
    def has_news(self) -> bool:
        """Whether something happened since the last piece."""
        return self.sent < len(self.from_draft) or self.seq.finish_reason is not None

    def start(self) -> None:
        """Note when it was first admitted, and what the prefix cache held of it."""
        if not self.started:
            self.started, self.cached_tokens = perf_counter(), self.seq.cached

    def piece(self) -> StreamPiece:
        """What is new since the last piece, held back where a stop string may still begin."""
        done, whole = self.seq.finish_reason is not None, self.text
        safe = len(whole) if done else max(self._stops.safe(whole), self.shown)
        text, self.shown = whole[self.shown : safe], safe
        tokens = self.seq.tokens[self.seq.prompt_len + self.sent :]
        guessed, logprobs = self.from_draft[self.sent :], self.logprobs[self.sent :]
        self.sent = len(self.from_draft)
        runs, self._runs_sent = self.runs[self._runs_sent :], len(self.runs)
        return StreamPiece(self.seq.request.index, text, tokens, guessed, self.output() if done else None, runs, logprobs)

    def output(self) -> CompletionOutput:
        """The finished output."""
        seq, request = self.seq, self.seq.request
        tokens = seq.tokens[seq.prompt_len :]
        wanted = request.params.logprobs is not None
        decode = self.last_token - self.first_token
        return CompletionOutput(
            index=request.index,
            text=self.text,
            token_ids=tokens,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            seed=request.seed,
            logprobs=self.logprobs if wanted else None,
            cumulative_logprob=sum(p[t].logprob for p, t in zip(self.logprobs, tokens, strict=True)) if wanted else None,
            from_draft=self.from_draft,
            speculation=seq.stats.as_dict(),
            timings=Timings(
                first_token_s=self.first_token - self.submitted,
                total_s=self.last_token - self.submitted,
                decode_tokens_per_s=(len(tokens) - 1) / decode if decode > 0 else 0.0,
                queued_s=max(self.started - self.submitted, 0.0),
            ),
            runs=self.runs,
            cached_tokens=self.cached_tokens,
        )


def advance(writer: Writer, emitted: list[int], rows: Seq[int], scores: Scores) -> Settled:
    """Give a sequence its emitted tokens until it ends; all but the last of them were guessed."""
    seq, settled = writer.seq, Settled()
    top = seq.request.params.logprobs
    seq.cached = len(seq.tokens)
    last = len(emitted) - 1
    for i, (token, row) in enumerate(zip(emitted, rows, strict=True)):
        guessed = i < last
        if token == CORRUPTED:
            seq.finish_reason, seq.stop_reason = _without_choice(seq, scores.logits[row])
            break
        ended = writer.push(token, guessed)
        if top is not None:
            writer.logprobs.append(_named(logprobs_of(scores.logits[row], token, top), writer.tokenizer))
        settled.kept += 1
        settled.accepted += guessed
        if ended:
            break
    if settled.kept > 1:
        seq.cached += settled.kept - 1
    return settled


def _without_choice(seq: Sequence, logits: torch.Tensor) -> tuple[str, str | None]:
    """How a sequence ends where there was nothing to choose from."""
    if seq.guide is None or not bool(logits.isfinite().all()):
        return "error", "the model's logits are not finite"
    if seq.guide.complete(seq.tokens, seq.prompt_len):
        return "stop", None
    return "error", f"no token can follow: {seq.guide.fault or 'the grammar and the other parameters forbid them all'}"


def note_prompt(writer: Writer, start: int, logits: torch.Tensor) -> None:
    """Log probabilities of the prompt tokens that follow the rows just read, the first of them at `start`."""
    seq, top = writer.seq, writer.seq.request.params.prompt_logprobs
    assert top is not None
    if not writer.prompt_logprobs:
        writer.prompt_logprobs.append(None)  # the first token has no past
    for position, row in enumerate(logits, start + 1):
        if len(writer.prompt_logprobs) <= position < seq.prompt_len:  # rows read again after preemption are known
            writer.prompt_logprobs.append(_named(logprobs_of(row, seq.tokens[position], top), writer.tokenizer))


def settle_kv(pool: KVPool, batch: Batch, verdicts: list[Verdict], settled: list[Settled]) -> None:
    """Move accepted nodes' KV from their draft slots to their positions; chains lie there already."""
    if not any(verdict.path for verdict in verdicts):
        return
    source: list[int] = []
    target: list[int] = []
    for seq, verdict, kept in zip(batch.sequences, verdicts, settled, strict=True):
        if not verdict.path or verdict.path[-1] == len(verdict.path) - 1:  # nodes rise: it is a chain's beginning
            continue
        base = len(seq.tokens) - kept.kept
        moves = [(base + node, base + i) for i, node in enumerate(verdict.path[: kept.accepted]) if node != i]
        source += pool.slots(seq.pages, [a for a, _ in moves])
        target += pool.slots(seq.pages, [b for _, b in moves])
    if source:
        pool.move(source, target)


def _named(found: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return found
    return {t: Logprob(p.logprob, p.rank, tokenizer.decode([t], skip_special_tokens=False)) for t, p in found.items()}
