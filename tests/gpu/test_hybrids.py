"""Hybrid models on the GPU: tokens and bits with drafts of every shape, prefixes, preemption, and rounds that fail.

These run in Triton's interpreter too, with less of everything.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.cache import KVPool, SequenceState
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request, Verdict
from outrider.draft import Drafter
from outrider.draft.eagle import EagleDrafter
from outrider.engine import engine as rounds
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter
from outrider.heads import MTP, Borrowed, EagleConfig, EagleHead, EagleRunner
from outrider.model import Decoder, Feed
from outrider.model.memory import StateSizes
from outrider.ops import Blocked
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, Oracle, make_request, run, write_family
from tests.support.engines import assert_same_bits, run_recorded

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE, SIZE = "cuda" if ON_GPU else "cpu", 16
TOKENS = 40 if ON_GPU else 5

pytestmark = pytest.mark.usefixtures("products_of_fixed_order")


def small_decoder() -> Decoder:
    spec = FEATURE_SPECS["gated delta rule, gated attention"]
    layers = spec.layers if ON_GPU else spec.layers[:2]
    return random_decoder(replace(spec, layers=layers, vocab=96), "bfloat16" if ON_GPU else "float32")


def engine_of(drafter: Drafter, length: int, pages: int = 60, batch: int = 4, states: int = 12, chunk: int = 40) -> Engine:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    sizes = StateSizes(4 * batch + 2, states, 16 * batch)
    runner = CudaRunner(small_decoder(), pages + 1, SIZE, DEVICE, CudaOptions(graphs=ON_GPU), None, sizes)
    config = EngineConfig(page_size=SIZE, max_num_seqs=batch, max_batch_rows=chunk, prefix_cache=states > 0)
    return Engine(runner, None, drafter, FixedLength(length), config)


def requests_of(count: int, logprobs: int | None = None) -> list[Request]:
    """Half greedy, with a beginning that some share. With log probabilities rounds do not overlap, and logits stay."""
    stem = [i * 5 % 90 for i in range(35 if ON_GPU else 17)]
    return [
        make_request(
            [*stem[: 35 * (i % 2)], *(j * 7 % 90 for j in range(3 + 9 * i))],
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=TOKENS, logprobs=logprobs),
            f"r{i}",
        )
        for i in range(count)
    ]


def test_drafts_prefixes_and_preemption_change_no_bit() -> None:
    requests = requests_of(6 if ON_GPU else 2, logprobs=0)
    alone = [run_recorded(engine_of(NoDrafter(), 0, batch=1, states=0), [request]) for request in requests]
    plain = [result[0][0] for result in alone], {name: bits for result in alone for name, bits in result[1].items()}
    answers = {writer.seq.request.id: writer.seq.tokens for writer in plain[0]}
    chain, tree = Oracle(answers, 3, vocab=90), Oracle(answers, 3, branches=2, seed=1, vocab=90)
    for engine in (
        engine_of(chain, 3, chunk=24),
        engine_of(tree, 5, pages=9 if ON_GPU else 5),
        *((engine_of(chain, 7, batch=6, states=3),) if ON_GPU else ()),
    ):
        for _ in range(2 if ON_GPU else 1):  # the second time prefixes are found
            assert_same_bits(plain, run_recorded(engine, requests))
        assert [writer.seq.tokens for writer in run(engine, requests_of(len(requests)))] == list(answers.values()), "overlapped"
        states = engine.runner._recurrent.states
        assert states.count - states.free == engine.runner.states.kept, "states go with their sequences"
    assert {0, 1, 2, 3} <= chain.accepted if ON_GPU else len(chain.accepted) > 1


def test_a_prompt_in_chunks_of_every_size_has_the_same_bits() -> None:
    runner, longest = engine_of(NoDrafter(), 0).runner, 130 if ON_GPU else 19
    text = [i * 37 % 96 for i in range(longest)]

    def read(size: int) -> torch.Tensor:
        state, rows = SequenceState(), []
        for start in range(0, longest, size):
            tokens = text[start : start + size]
            last = runner.forward([Feed([3, 9, 1, 7, 4, 2, 0, 5, 8], start, tokens, state=state)]).last
            rows.append(runner.logits(last, range(len(tokens))))
        return torch.cat(rows)

    whole = read(longest)
    for size in range(1, longest) if ON_GPU else (8,):
        assert torch.equal(read(size), whole), size


def test_a_prefix_is_found_at_page_borders_alone() -> None:
    engine, params = engine_of(NoDrafter(), 0), SamplingParams(temperature=0.0, max_tokens=2)
    text = [i * 7 % 90 for i in range(50)]
    texts = ((text, 0), ([*text, 3], 48), (text[:37], 32), ([*text[:44], 5, 6, 7], 32))
    for tokens, hits in texts if ON_GPU else (texts[0], texts[3]):
        request = make_request(tokens, params, f"{len(tokens)}")
        writer = run(engine, [request])[0]
        assert writer.cached_tokens == hits
        assert writer.seq.tokens == run(engine_of(NoDrafter(), 0, states=0), [request])[0].seq.tokens


@pytest.mark.parametrize("failing", [1, 2, 4] if ON_GPU else [2])
@pytest.mark.parametrize("late", [False, True] if ON_GPU else [True])
def test_a_round_that_fails_or_gives_nothing_is_run_again(monkeypatch: pytest.MonkeyPatch, failing: int, late: bool) -> None:
    request = requests_of(2)[1]
    want = run(engine_of(NoDrafter(), 0), [request])[0].seq.tokens
    verify, calls = rounds.verify, iter(range(1, 1000))

    def once(*arguments):  # type: ignore[no-untyped-def]
        if next(calls) != failing:
            return verify(*arguments)
        if not late:
            raise RuntimeError("planted")
        return [Verdict([], []) for _ in verify(*arguments)]

    monkeypatch.setattr(rounds, "verify", once)
    drafter = Oracle({request.id: want}, 3, vocab=90)
    # a sequence that may get no token, because a grammar is late, is not overlapped: those that draft are not either
    for engine in (engine_of(drafter, 3), *((engine_of(NoDrafter(), 0),) if ON_GPU and not late else ())):
        calls = iter(range(1, 1000))
        writer = run(engine, [request])[0]
        assert writer.seq.tokens == want
        assert next(calls) > failing


def test_more_drafts_than_there_are_places_for_are_cut() -> None:
    request = requests_of(1)[0]
    want = run(engine_of(NoDrafter(), 0), [request])[0].seq.tokens
    engine = engine_of(Oracle({request.id: want}, 12, branches=20, vocab=90), 30, batch=1)
    assert run(engine, [request])[0].seq.tokens == want


def test_a_module_of_the_checkpoint_drafts_beside_it() -> None:
    """MTP: a layer like the target's last, with its output gate, and features from prompts, plain rounds and accepted chains."""
    from outrider.heads.cuda_runners import CudaEagleRunner

    requests = requests_of(2)
    engine = engine_of(NoDrafter(), 0)
    plain = [writer.seq.tokens for writer in run(engine, requests)]
    target = engine.runner
    c = target.decoder.spec
    shape = replace(c, layers=c.layers[1:2])
    head = EagleHead(EagleConfig(shape, c.hidden, (c.depth,), MTP, norm_output=True), Borrowed.of(target.decoder))
    generator = torch.Generator().manual_seed(7)
    for parameter in head.requires_grad_(False).parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.1))
    pool = KVPool(1, target.pool.pages, c.kv_heads, SIZE, c.head_dim)
    host = EagleRunner(deepcopy(head), pool, Blocked())
    device = CudaEagleRunner(head, target)
    taps = torch.randn(5, c.hidden, generator=generator)
    feeds = [Feed([3], 1, [5, 6, 7, 8, 9])]
    made, want = (runner.forward(feeds, runner.fuse(taps)).float().cpu() for runner in (device, host))
    assert float((made - want).norm() / want.norm()) < (2e-2 if ON_GPU else 1e-4)
    drafter = EagleDrafter(head, pool, Blocked(), runner=device)
    fast = run(Engine(target, None, drafter, FixedLength(3), EngineConfig(page_size=SIZE, max_num_seqs=4)), requests)
    assert [writer.seq.tokens for writer in fast] == plain
    assert all(writer.seq.stats.drafted > 0 and writer.seq.stats.fallback_reason is None for writer in fast)


@pytest.mark.skipif(not ON_GPU, reason="loads a model onto a GPU")
def test_a_loaded_hybrid_drafts_and_finds_prefixes(tmp_path: Path) -> None:
    """Loading, the plan of memory, graphs and calibration, as a user has them."""
    from outrider import LLM

    write_family(tmp_path, "qwen3.5", dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [i % 7 for i in range(90)]
    sizes: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "max_num_seqs": 4, "max_model_len": 256, "memory": 2**31}
    with LLM(tmp_path, speculation="none", **sizes) as llm:
        plain = llm.generate(prompt, params)[0].outputs[0].token_ids
    with LLM(tmp_path, speculation="ngram:6", **sizes) as llm:
        for cached in (0, 64):
            request = llm.generate(prompt, params)[0]
            assert request.outputs[0].token_ids == plain
            assert request.outputs[0].speculation["fallback_reason"] is None
            assert request.outputs[0].cached_tokens == cached


def test_rows_without_a_state_are_not_computed() -> None:
    runner = engine_of(NoDrafter(), 0).runner
    with pytest.raises(ValueError, match="no recurrent state"):
        runner.forward([Feed([0], 5, [1], state=SequenceState())])


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    from outrider.model.cuda_runner import CudaRunner

    with pytest.raises(InvalidParameter, match="draft model .*recurrent layers"):
        CudaRunner(small_decoder(), 4, SIZE, DEVICE, target=engine_of(NoDrafter(), 0).runner)  # type: ignore[arg-type]
