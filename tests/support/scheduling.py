"""A scheduler without a model: sequences for it, and rounds played by hand."""

from __future__ import annotations

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.core import Sequence
from outrider.engine.scheduler import Scheduler, Turn
from outrider.sampling import SamplingParams
from tests.support.engines import make_request, renamed

SIZE = 4


def sequence(prompt: int | list[int], output: int = 4, name: str = "r", **fields: object) -> Sequence:
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    return Sequence(renamed(make_request(tokens, SamplingParams(max_tokens=output), name), **fields))


def scheduler(pages: int = 10, seqs: int = 4, rows: int = 16, **settings: object) -> Scheduler:
    config = EngineConfig(max_num_seqs=seqs, max_batch_rows=rows, page_size=SIZE, **settings)  # type: ignore[arg-type]
    return Scheduler(PageTable(pages, SIZE), config)


def submit(work: Scheduler, *sequences: Sequence) -> None:
    for seq in sequences:
        work.submit(seq)


def play(work: Scheduler, token: int = 7) -> Turn:
    """One round: every sequence that has read its tokens emits one, and finished sequences are removed."""
    turn = work.next()
    for seq, fed in zip(turn.batch.sequences, turn.batch.feeds, strict=True):
        seq.cached += fed
        if seq.cached == len(seq.tokens):
            seq.tokens.append(token)
        work.settle(seq)
        if seq.output_len >= seq.request.max_tokens:
            seq.finish_reason = "length"
            work.remove(seq)
    return turn
