"""Many threads on one LLM, and LLMs that share pages: the same tokens as alone, and no deadlock."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.core import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.errors import EngineDead, QueueFull
from tests.support import make_request, write_family, write_tokenizer

VOCAB = 300
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("threads")
    write_tokenizer(root, VOCAB)
    return write_family(root, "llama2", dtype="bfloat16", vocab_size=VOCAB, max_position_embeddings=256)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, load_format="dummy", speculation="ngram", page_size=16)


def params(seed: int, tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True, **changes)


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls in parallel. Returns the result or the exception of each."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


def tokens(results: Any) -> list[list[int]]:
    if isinstance(results, BaseException):
        raise results
    return [output.token_ids for result in results for output in result.outputs]


def streamed(llm: LLM, prompt: list[int], sampling: SamplingParams) -> list[int]:
    return [token for chunk in llm.stream(prompt, sampling) for token in chunk.token_ids]


def test_concurrent_threads_get_the_tokens_each_gets_alone(llm: LLM) -> None:
    prompts = [[i + 1, 5, 9] for i in range(9)]
    wanted = [tokens(llm.generate([prompt], params(i))) for i, prompt in enumerate(prompts)]
    chat = tokens(llm.chat(MESSAGES, params(3)))
    calls: list[Callable[[], Any]] = []
    for i, prompt in enumerate(prompts):
        calls.append(lambda i=i, prompt=prompt: tokens(llm.generate([prompt], params(i))))
        calls.append(lambda i=i, prompt=prompt: [streamed(llm, prompt, params(i))])
    calls.append(lambda: tokens(llm.chat(MESSAGES, params(3))))
    assert in_threads(calls) == [expected for expected in wanted for _ in range(2)] + [chat]
    assert llm.engine.pages.used == 0
    assert not llm.engine.has_work


def test_a_half_read_stream_blocks_no_other_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], params(1, 200))
    next(stream)
    wanted = tokens(llm.generate([[4, 5]], params(2)))
    assert in_threads([lambda: tokens(llm.generate([[4, 5]], params(2)))] * 3) == [wanted] * 3
    for chunk in llm.stream([7, 8], params(3)):  # one request for each chunk of another, in one thread
        assert tokens(llm.generate([[4, 5]], params(2))) == wanted
        assert chunk.token_ids or chunk.output
    stream.close()
    assert llm.engine.pages.used == 0


def test_a_refused_batch_leaves_nothing_behind(model: Path) -> None:
    llm = LLM(model, load_format="dummy", max_queue=2)
    wanted = tokens(llm.generate([[1, 2], [3, 4]], params(1)))
    for refused in ({"prompts": [[i + 1] for i in range(4)], "params": params(1)}, {"prompts": [[1]], "params": params(1, n=4)}):
        with pytest.raises(QueueFull, match="max_queue=2"):
            llm.generate(**refused)
        assert not llm.engine.has_work
    with pytest.raises(QueueFull):
        next(iter(llm.stream([1], params(1, n=4))))
    assert tokens(llm.generate([[1, 2], [3, 4]], params(1))) == wanted
    assert llm.engine.pages.used == 0


@pytest.fixture
def small(model: Path) -> LLM:
    """KV memory for one long sequence and a little more."""
    return LLM(model, load_format="dummy", page_size=16, kv_bytes=20 * 16 * 2 * 4 * 2 * 4 * 16, prefix_cache=False)


def test_two_engines_on_the_same_pages_both_finish(small: LLM) -> None:
    """The two requests do not fit into memory together, and the first stream is not read while the second runs."""
    other = small.beside("ngram")
    wanted = tokens(small.generate([[1, 2, 3]], params(1, 200)))[0]
    stream = small.stream([1, 2, 3], params(1, 200))
    first = next(stream)
    assert tokens(other.generate([[1, 2, 3]], params(1, 200)))[0] == wanted
    assert [token for chunk in (first, *stream) for token in chunk.token_ids] == wanted
    calls = [lambda llm=llm: tokens(llm.generate([[1, 2, 3], [4, 5, 6]], params(1, 200))) for llm in (small, other) * 2]
    assert [result[0] for result in in_threads(calls)] == [wanted] * 4
    assert small.engine.pages.used == 0


def overcommitted(rng: random.Random) -> list[Scheduler]:
    """Two schedulers on one small page table, each with sequences that fit it alone."""
    size, count = rng.choice([4, 16]), rng.randint(4, 12)
    pages, room = PageTable(count, size), size * count
    out = []
    for name in "ab":
        sizes = {"max_num_seqs": rng.choice([1, 4]), "max_batch_rows": rng.choice([4, 8, 16, 40])}
        out.append(Scheduler(pages, EngineConfig(page_size=size, prefix_cache=rng.random() < 0.5, **sizes)))
        for i in range(rng.randint(1, 3)):
            prompt = rng.randint(1, room - 2)
            sampling = SamplingParams(max_tokens=rng.randint(1, room - prompt))
            out[-1].submit(Sequence(make_request([rng.randrange(5)] * prompt, sampling, f"{name}{i}")))
    return out


def play(work: Scheduler) -> None:
    """A round of a scheduler without a model."""
    turn = work.next()
    for seq, fed in zip(turn.batch.sequences, turn.batch.feeds, strict=True):
        seq.cached += fed
        if seq.cached == len(seq.tokens):
            seq.tokens.append(1)
            seq.finish_reason = "length" if seq.output_len >= seq.request.max_tokens else None
        work.settle(seq)
        if seq.finish_reason is not None:
            work.remove(seq)


@pytest.mark.parametrize("seed", [*range(60), 261, 268])
def test_schedulers_that_share_pages_do_not_preempt_in_a_loop(seed: int) -> None:
    both = overcommitted(random.Random(seed))
    for _ in range(3000):
        for work in both:
            if work.has_work:
                play(work)
    assert not any(work.has_work for work in both)
    assert both[0].pages.used == 0


def test_closing_ends_every_use_and_frees_memory(model: Path) -> None:
    with LLM(model, load_format="dummy", speculation="ngram") as llm:
        assert "speculation='ngram'" in repr(llm)
        assert str(model) in repr(llm)
        beside = llm.beside("none")
        llm.generate([[1, 2]], params(1))
        stream = llm.stream([1, 2], params(1, 200))
        next(stream)
        runner, pool = weakref.ref(llm.engine.runner), weakref.ref(llm.engine.runner.pool)
        thread = llm.thread
    assert not thread.alive
    del thread
    llm.close()
    assert "closed" in repr(llm)
    for use in (
        lambda: llm.generate([[1]]),
        lambda: llm.chat(MESSAGES),
        lambda: next(llm.stream([1])),
        lambda: llm.beside("none"),
        lambda: beside.generate([[1]]),
        lambda: llm.intake.prepare([1], params(1)),
        llm.measure_costs,
        lambda: next(stream) and list(stream),
    ):
        with pytest.raises(EngineDead, match="closed"):
            use()
    stream = beside = use = None  # type: ignore[assignment]
    gc.collect()
    assert runner() is None
    assert pool() is None


def test_costs_are_saved_on_closing(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with LLM(model, load_format="dummy", speculation="auto") as llm:
        llm.generate([[1, 2, 3]], params(1))
        for kept in tmp_path.rglob("*.json"):
            kept.unlink()
    assert list(tmp_path.rglob("*.json"))


def test_a_garbage_collected_llm_ends_its_thread(model: Path) -> None:
    llm = LLM(model, load_format="dummy")
    llm.generate([[1]], params(1, 2))
    thread = llm.thread
    assert thread.alive
    del llm
    gc.collect()
    assert not thread.alive


class Bar:
    def __init__(self, total: int, desc: str, **_: Any) -> None:
        self.total, self.done, self.closed = total, 0, False

    def update(self, n: int) -> None:
        self.done += n

    def close(self) -> None:
        self.closed = True


def test_the_progress_bar_counts_outputs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def make(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[-1]

    llm.generate([[1], [2], [3]], params(1, 2), use_tqdm=make)
    llm.chat([MESSAGES, MESSAGES], params(1, 2), use_tqdm=make)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True), (2, 2, True)]
    llm.generate([[1], [2]], params(1, 2))
    llm.generate([[1], [2]], params(1, 2), use_tqdm=False)
    assert capsys.readouterr().err == "", "standard error is no terminal"
    llm.generate([[1], [2]], params(1, 2), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
