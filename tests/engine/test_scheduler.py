"""The scheduler, without a model."""

from __future__ import annotations

import random

import pytest

from outrider.core import Batch, Sequence
from outrider.errors import QueueFull
from outrider.sampling import SamplingParams
from tests.support import make_request
from tests.support.scheduling import SIZE, play, scheduler, sequence, submit


def test_admission_is_in_order_and_by_the_pages_needed_now() -> None:
    work = scheduler(pages=10, rows=100, prefix_cache=False)
    first, large, small = sequence(12), sequence(24), sequence(4)
    submit(work, first, large, small)
    assert work.next().started == [first]  # it needs 4 pages with its next token, large needs 7, and small waits behind large
    work.remove(first)
    assert work.next().started == [large, small]


def test_lower_priority_numbers_go_first() -> None:
    work = scheduler(seqs=1)
    usual, late, urgent = sequence(4), sequence(4), sequence(4, priority=-1)
    submit(work, usual, late, urgent)
    assert work.next().started == [urgent]
    work.remove(urgent)
    assert work.next().started == [usual]


def test_admission_stops_at_max_num_seqs() -> None:
    work = scheduler(pages=100, seqs=2)
    queue = [sequence(1, 1) for _ in range(3)]
    submit(work, *queue)
    assert work.next().started == queue[:2]


def test_prompt_rows_are_shared_and_decode_rows_always_run() -> None:
    work = scheduler(pages=100, rows=16, prefix_cache=False)
    decoding, long, longer = sequence(3, 9), sequence(12), sequence(40)
    submit(work, decoding)
    play(work)
    submit(work, long, longer)
    batch = work.next().batch
    assert batch.sequences == [decoding, long, longer]
    assert batch.feeds == [1, 12, 4]
    assert [batch.samples(b) for b in range(3)] == [True, True, False]


def test_fewer_prompt_rows_are_read_while_others_decode() -> None:
    work = scheduler(pages=100, rows=16, prefix_cache=False, max_mixed_rows=6)
    first, long = sequence(3, 9), sequence(40)
    submit(work, first)
    play(work)
    submit(work, long)
    assert work.next().batch.feeds == [1, 6]
    work.remove(first)
    assert work.next().batch.feeds == [16]


def test_a_sequence_without_budget_waits_a_round() -> None:
    work = scheduler(pages=100, rows=12, prefix_cache=False)
    long, longer = sequence(12), sequence(40)
    submit(work, long, longer)
    assert work.next().batch.sequences == [long]


def test_the_youngest_sequence_is_preempted_and_resumes_with_its_tokens() -> None:
    work = scheduler(pages=4, rows=100, prefix_cache=False)
    older, younger = sequence(4, 12), sequence(4, 8)
    submit(work, older, younger)
    stopped: list[Sequence] = []
    while not stopped:
        stopped = play(work).stopped
    assert stopped == [younger]
    assert younger.cached == 0
    assert not younger.pages
    kept = list(younger.tokens)
    assert len(kept) > 4
    while older.finish_reason is None:
        play(work)
    turn = play(work)
    assert turn.started == [younger]
    assert turn.batch == Batch([younger], [len(kept)])  # its output is recomputed, but does not become part of the prompt
    assert younger.tokens[: len(kept)] == kept
    assert younger.prompt_len == 4
    assert work.preemptions == 1


def test_drafts_take_only_free_pages() -> None:
    work = scheduler(pages=4, rows=100, prefix_cache=False)
    one, two = sequence(4, 4), sequence(4, 4)
    submit(work, one, two)
    batch = work.next().batch
    assert work.pages.free == 2
    assert work.reserve(batch, (6, 6)) == (6, 0)
    assert work.pages.free == 0
    for seq in batch.sequences:
        work.settle(seq, goes_on=True)
    assert work.pages.free == 0
    for seq in batch.sequences:
        work.settle(seq)
    assert work.pages.free == 2


def test_a_prompt_seen_before_is_not_read_again() -> None:
    work = scheduler(pages=20, rows=100)
    prompt = list(range(11))
    first = sequence(prompt, 6)
    submit(work, first)
    while work.has_work:
        play(work)
    assert work.pages.used == 0
    assert work.pages.cached == 4  # 16 of its 17 tokens were read
    repeat = sequence(prompt)
    submit(work, repeat)
    turn = work.next()
    assert repeat.cached == 8
    assert turn.batch.feeds == [3]
    work.remove(repeat)
    longer = sequence([*first.tokens, 5])
    submit(work, longer)
    assert work.next().batch.feeds == [18 - 16]


def test_tenants_share_no_prefix_cache_entries() -> None:
    work = scheduler(pages=40, rows=100)
    prompt = list(range(9))
    for tenant in (None, "a", "b", ""):
        seq = sequence(prompt, 1, tenant=tenant)
        submit(work, seq)
        assert play(work).batch.feeds == [9], tenant
    repeat = sequence(prompt, 1, tenant="a")
    submit(work, repeat)
    assert play(work).batch.feeds == [1]


def test_prompt_log_probabilities_need_every_row() -> None:
    work = scheduler(pages=20, rows=100)
    submit(work, sequence(9, 1))
    play(work)
    seq = Sequence(make_request([1] * 9, SamplingParams(max_tokens=2, prompt_logprobs=1)))
    submit(work, seq)
    assert work.next().batch.feeds == [9]


def test_samples_of_one_request_share_the_prompt() -> None:
    work = scheduler(pages=40, rows=8)
    samples = [sequence(list(range(13)), 4, "one", index=i) for i in range(3)]
    submit(work, *samples)
    assert play(work).batch.sequences == samples[:1]
    assert play(work).batch.sequences == samples[:1]  # the remaining tokens of its prompt
    turn = play(work)
    assert turn.started == samples[1:]
    assert turn.batch.feeds == [1, 1, 1]
    assert samples[1].pages[:3] == samples[0].pages[:3]
    while work.has_work:
        play(work)
    assert work.pages.used == 0


def test_samples_continue_when_the_first_is_aborted() -> None:
    work = scheduler(pages=40, rows=8)
    samples = [sequence(list(range(13)), 4, "one", index=i) for i in range(3)]
    submit(work, *samples)
    for gone in (samples[2], samples[0]):  # one that waits for the shared prefix, then the one that computes it
        gone.finish_reason = "abort"
        work.remove(gone)
    assert play(work).batch.sequences == [samples[1]]
    while work.has_work:
        play(work)


def test_max_queue_bounds_the_queue() -> None:
    work = scheduler(seqs=1, max_queue=2)
    submit(work, sequence(4), sequence(4))
    with pytest.raises(QueueFull, match="max_queue"):
        work.submit(sequence(4))


def test_waiting_sequences_can_be_removed() -> None:
    work = scheduler()
    seq = sequence(4)
    submit(work, seq)
    seq.finish_reason = "abort"
    assert not work.remove(seq)
    assert not work.has_work
    other = sequence(4)
    submit(work, other)
    assert play(work).batch.sequences == [other]


@pytest.mark.parametrize("seed", range(25))
def test_every_sequence_finishes_and_every_page_is_released(seed: int) -> None:
    """Random arrivals, sizes, drafts and aborts in few pages, with shared prefixes. Page counts are checked every round."""
    rng = random.Random(seed)
    work = scheduler(pages=rng.randint(9, 20), seqs=rng.randint(1, 6), rows=rng.randint(2, 30))
    alive: list[Sequence] = []
    everyone: list[Sequence] = []
    for turn_number in range(600):
        if turn_number < 60 and rng.random() < 0.5:
            prompt = [rng.randrange(2)] * rng.randint(1, 20)
            seq = sequence(prompt, rng.randint(1, 15), f"r{turn_number}", priority=rng.randint(0, 1), tenant=rng.choice("ab"))
            work.submit(seq)
            everyone.append(seq)
            alive.append(seq)
        if not work.has_work:
            continue
        turn = work.next()
        assert turn.batch.sequences, "the batch is never empty"
        work.reserve(turn.batch, tuple(rng.randint(0, 9) for _ in turn.batch.sequences))
        for seq, fed in zip(turn.batch.sequences, turn.batch.feeds, strict=True):
            assert len(seq.pages) * SIZE >= seq.cached + fed
            seq.cached += fed
            if seq.cached == len(seq.tokens):
                seq.tokens.append(7)
            work.settle(seq)
            ended = seq.output_len >= seq.request.max_tokens
            if ended or rng.random() < 0.02:
                seq.finish_reason = "length" if ended else "abort"
                work.remove(seq)
        owners = [page for seq in work.running for page in seq.pages]
        for page in range(work.pages.count):
            assert work.pages.references(page) == owners.count(page)
        alive = [seq for seq in alive if seq.finish_reason is None]
    assert not alive
    assert everyone
    assert work.pages.used == 0
    assert not work.has_work
