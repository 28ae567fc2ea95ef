"""Commit: a round's verdicts become tokens, text, stop conditions and settled KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter

import torch

from outrider.cache import KVPool
from outrider.core import Batch, Scores, Sequence, SequenceReport, Tree, Verdict
from outrider.engine.outputs import CompletionOutput, Rejected, Run, StreamPiece, Timings, rejected_of
from outrider.sampling import CORRUPTED, Logprob, logprobs_of
from outrider.text import StopStrings, TextStream, Tokenizer

__all__ = ["OutputProcessor", "advance", "emit", "note_prompt", "settle_kv"]


@dataclass(slots=True)
class OutputProcessor:
    """Turns the tokens of one sequence into its output: text, log probabilities and the finish reason."""

    seq: Sequence
    tokenizer: Tokenizer | None
    _text: str = ""
    _unread: list[int] = field(default_factory=list)  # tokens not yet turned into text
    chars_sent: int = 0  # characters already streamed
    sent: int = 0  # tokens already streamed
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # one for each round that emitted
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache at admission
    submitted: float = field(default_factory=perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    _runs_sent: int = 0
    _kept: tuple[int, int] = (0, 0)  # tokens and runs after the last complete round
    _stream: TextStream | None = None
    _stops: StopStrings = field(default_factory=lambda: StopStrings(()))

    def __post_init__(self) -> None:
        self._reset_text()
        self._stops = StopStrings(self.seq.request.params.stop_strings)

    def _reset_text(self) -> None:
        """Detokenise from the start of the output again."""
        request = self.seq.request
        self._text, self._unread = "", self.seq.tokens[len(request.prompt_ids) :]
        if self.tokenizer is not None:
            self._stream = TextStream(self.tokenizer, request.prompt_ids, request.params.skip_special_tokens)

    def keep(self) -> None:
        """Mark the end of a complete round. `rewind` returns to this point."""
        self._kept = len(self.from_draft), len(self.runs)

    def rewind(self) -> None:
        """Drop everything after the last complete round, and the KV pages, so that the sequence can be scheduled again."""
        seq, (tokens, runs) = self.seq, self._kept
        del seq.tokens[seq.prompt_len + tokens :], self.from_draft[tokens:], self.logprobs[tokens:], self.runs[runs:]
        seq.finish_reason = seq.stop_reason = None
        seq.pages, seq.keys, seq.cached, seq.named, seq.state = [], [], 0, 0, None
        self._reset_text()

    @property
    def text(self) -> str:
        """The text so far. Tokens are detokenised lazily, when the text or a stop string check needs them."""
        if self._stream is not None:
            self._text += "".join(map(self._stream.push, self._unread))
            if self.seq.finish_reason is not None and not isinstance(self.seq.stop_reason, str):
                self._text += self._stream.flush()
        self._unread.clear()
        return self._text

    def push(self, token: int, guessed: bool) -> bool:
        """Append one token. Returns whether the sequence ends with it."""
        seq = self.seq
        seq.tokens.append(token)
        self.from_draft.append(guessed)
        request = seq.request
        params, length = request.params, len(seq.tokens) - len(request.prompt_ids)
        ends = token in request.stop_ids and length >= params.min_tokens
        if not ends or params.include_stop_str_in_output:
            self._unread.append(token)
        if ends:
            requested = token in (params.stop_token_ids or ())
            seq.finish_reason, seq.stop_reason = "stop", token if requested else None
        elif not (params.stop and self._hit_stop_string()) and length >= request.max_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def _hit_stop_string(self) -> bool:
        params = self.seq.request.params
        checked, text = len(self._text), self.text
        if self.seq.output_len <= params.min_tokens:
            return False
        match = self._stops.find(text, checked)
        if match is None:
            return False
        start, stop = match
        self._text = text[: start + len(stop) if params.include_stop_str_in_output else start]
        self.seq.finish_reason, self.seq.stop_reason = "stop", stop
        return True

    def start(self) -> None:
        """Record the first admission: its time, and how many tokens the prefix cache held."""
        if not self.started:
            self.started, self.cached_tokens = perf_counter(), self.seq.cached

    def chunk(self) -> StreamPiece:
        """The output since the last chunk. Text that may be the beginning of a stop string is held back."""
        done, full_text = self.seq.finish_reason is not None, self.text
        safe = len(full_text) if done else max(self._stops.safe(full_text), self.chars_sent)
        text, self.chars_sent = full_text[self.chars_sent : safe], safe
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
                first_token_s=max(self.first_token - self.submitted, 0.0),  # 0 if there was no token
                total_s=max(self.last_token - self.submitted, 0.0),
                decode_tokens_per_s=(len(tokens) - 1) / decode if decode > 0 else 0.0,
                queued_s=max(self.started - self.submitted, 0.0),
            ),
            runs=self.runs,
            cached_tokens=self.cached_tokens,
        )


def advance(processor: OutputProcessor, emitted: list[int], rows: Seq[int], scores: Scores) -> SequenceReport:
    """Give a sequence its emitted tokens until it ends; all but the last of them were guessed."""
    seq, report = processor.seq, SequenceReport(emits=True, last_token=processor.last_token)
    top = seq.request.params.logprobs
    seq.cached = len(seq.tokens)
    last = len(emitted) - 1
    for i, (token, row) in enumerate(zip(emitted, rows, strict=True)):
        guessed = i < last
        if token == CORRUPTED:
            seq.finish_reason, seq.stop_reason = _without_choice(seq, scores.logits[row])
            break
        ended = processor.push(token, guessed)
        if top is not None:
            processor.logprobs.append(_named(logprobs_of(scores.logits[row], token, top), processor.tokenizer))
        report.kept += 1
        report.accepted += guessed
        if ended:
            break
    if report.kept > 1:
        seq.cached += report.kept - 1
    return report


def emit(processor: OutputProcessor, verdict: Verdict, tree: Tree, root: int, scores: Scores, drafter: str) -> SequenceReport:
    """Give a sequence the tokens of its verdict, and note where they came from. Its logits begin at row `root`."""
    seq, path = processor.seq, verdict.path
    report = advance(processor, verdict.tokens, [root, *[root + 1 + node for node in path]] if path else (root,), scores)
    rejected: Seq[Rejected] = ()
    if not tree.parents:
        seq.stats.rounds += 1
        seq.stats.emitted += report.kept
    else:
        report.depths, report.drafter = tree.depths, drafter
        seq.stats.record(report.depths, report.accepted, report.kept)
        if seq.request.return_rejected:
            rejected = rejected_of(tree, report.depths, path[: report.accepted])
    processor.runs.append(Run(drafter, report.accepted, report.kept, rejected))
    return report


def _without_choice(seq: Sequence, logits: torch.Tensor) -> tuple[str, str | None]:
    """How a sequence ends where there was nothing to choose from."""
    nothing_forbids = seq.guide is None and not seq.request.params.adjusts
    if nothing_forbids or not bool(logits.isfinite().all()):
        return "error", "the model's logits are not finite"
    if seq.guide is None:
        return "error", "no token can follow: the parameters forbid them all"
    if seq.guide.complete(seq.tokens, seq.prompt_len):
        return "stop", None
    if seq.guide.too_slow:
        return "error", f"the grammar takes too long to follow: {seq.guide.fault}"
    return "error", f"no token can follow: {seq.guide.fault or 'the grammar and the other parameters forbid them all'}"


def note_prompt(processor: OutputProcessor, start: int, logits: torch.Tensor) -> None:
    """Record log probabilities of the prompt tokens after the rows just read. The first row is at position `start`."""
    seq, top = processor.seq, processor.seq.request.params.prompt_logprobs
    assert top is not None
    if not processor.prompt_logprobs:
        processor.prompt_logprobs.append(None)  # the first token has no preceding context
    for position, row in enumerate(logits, start + 1):
        if len(processor.prompt_logprobs) <= position < seq.prompt_len:  # rows recomputed after preemption are already recorded
            processor.prompt_logprobs.append(_named(logprobs_of(row, seq.tokens[position], top), processor.tokenizer))


def settle_kv(pool: KVPool, batch: Batch, verdicts: list[Verdict], reports: list[SequenceReport]) -> None:
    """Move accepted nodes' KV from their draft slots to their positions, where chains lie already; tell recurrent states."""
    if not any(verdict.path for verdict in verdicts):
        return
    source: list[int] = []
    target: list[int] = []
    for seq, verdict, report in zip(batch.sequences, verdicts, reports, strict=True):
        if seq.state is not None:
            seq.state.accept(verdict.path[: report.accepted])
        if not verdict.path or verdict.path[-1] == len(verdict.path) - 1:  # nodes rise: it is a chain's beginning
            continue
        base = len(seq.tokens) - report.kept
        moves = [(base + node, base + i) for i, node in enumerate(verdict.path[: report.accepted]) if node != i]
        source += pool.slots(seq.pages, [a for a, _ in moves])
        target += pool.slots(seq.pages, [b for _, b in moves])
    if source:
        pool.move(source, target)


def _named(logprobs: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return logprobs
    return {t: Logprob(p.logprob, p.rank, tokenizer.token_text(t)) for t, p in logprobs.items()}
