"""Who runs when. No model needed."""

from __future__ import annotations

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.core import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.sampling import SamplingParams
from tests.support import make_request


def sequence(prompt: int, output: int) -> Sequence:
    return Sequence(make_request([1] * prompt, SamplingParams(max_tokens=output)))


def scheduler(pages: int = 10, seqs: int = 4, rows: int = 16) -> Scheduler:
    return Scheduler(PageTable(pages, 4), EngineConfig(max_num_seqs=seqs, max_batch_rows=rows, page_size=4))


def test_admission_is_in_order_and_within_pages() -> None:
    work = scheduler(pages=10)
    first, large, small = sequence(4, 4), sequence(20, 16), sequence(4, 4)
    for seq in (first, large, small):
        work.submit(seq)
    assert work.admit() == [first]  # large needs 9 of the 8 left; small waits behind it
    work.remove(first)
    assert work.admit() == [large]
    assert work.admit() == []
    work.remove(large)
    assert work.admit() == [small]


def test_admission_is_within_sequences() -> None:
    work = scheduler(pages=100, seqs=2)
    queue = [sequence(1, 1) for _ in range(3)]
    for seq in queue:
        work.submit(seq)
    assert work.admit() == queue[:2]


def test_prompt_rows_are_shared_and_decode_rows_always_run() -> None:
    work = scheduler(pages=100, rows=16)
    decoding, long, longer = sequence(3, 9), sequence(12, 4), sequence(40, 4)
    for seq in (decoding, long, longer):
        work.submit(seq)
    work.admit()
    decoding.cached = 2
    batch = work.next()
    assert batch.sequences == [decoding, long, longer]
    assert batch.feeds == [1, 12, 4]
    assert [batch.samples(b) for b in range(3)] == [True, True, False]


def test_a_sequence_without_budget_waits_a_round() -> None:
    work = scheduler(pages=100, rows=12)
    long, longer = sequence(12, 4), sequence(40, 4)
    for seq in (long, longer):
        work.submit(seq)
    work.admit()
    assert work.next().sequences == [long]


def test_waiting_sequences_can_be_removed() -> None:
    work = scheduler()
    seq = sequence(4, 4)
    work.submit(seq)
    assert not work.remove(seq)
    assert not work.has_work
