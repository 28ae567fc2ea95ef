"""LoRA adapters in the engine: a mixed batch equals solo runs, whoever drafts, and names come and go beside what runs."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from benchmarks.lora import write_adapter
from outrider import LLM
from outrider.cache import root_key
from outrider.config import EngineConfig
from outrider.core import Adapter, Request
from outrider.engine.adapters import Adapters, check_adapters
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Decoder, Runner
from outrider.sampling import SamplingParams
from tests.draft.test_resuming import DRAFTERS
from tests.support import VOCAB, make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.engines import assert_same_bits, random_params, run_recorded
from tests.support.lora import merged, random_parts

KINDS = ["ngram", "draft_model tree", "eagle tree", "medusa", "early_exit", "early_exit tail", "cascade"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("models") / "base", "llama3"))


def adapted(engine: Engine) -> list[Adapter | None]:
    """None, and two adapters that the engine may use from now on."""
    decoder, loaded = engine.runner.decoder, [None]
    for seed in (0, 1):
        parts = random_parts(decoder.spec, seed, 6, engine.runner.adapters.dtype)
        loaded.append(engine.adapters.add(f"adapter {seed}", parts))
    return loaded


def requests_of(adapters: list[Adapter | None], seed: str) -> list[Request]:
    """Prompts that share their first pages, with and without adapters."""
    rng = random.Random(seed)
    shared = [rng.randrange(7) for _ in range(40)]
    made = []
    for i in range(6):
        prompt = shared[: rng.choice([33, 40])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        request = make_request(prompt, replace(random_params(rng, 24), logprobs=None), f"r{i}")
        made.append(replace(request, adapter=adapters[i % 3]))
    return made


@lru_cache(maxsize=4)
def solo(decoder: Decoder, seed: str, path: str):  # type: ignore[no-untyped-def]
    """Plain runs of one request each, every one in an engine of its own, on a path of the ops."""
    writers, bits = [], {}
    for i in range(6):
        engine = make_engine(decoder)
        made, seen = run_recorded(engine, [requests_of(adapted(engine), seed)[i]])
        writers += made
        bits |= seen
    return writers, bits


@pytest.mark.parametrize("pages", [160, 14], ids=["room for all", "preemption"])
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_mixed_batch_equals_solo_runs(decoder: Decoder, both_paths: str, kind: str, pages: int) -> None:
    plain = solo(decoder, "mixed", both_paths)
    engine = make_engine(decoder, None, 6 if kind != "none" else 0, pages=pages, max_num_seqs=6)
    if kind != "none":
        draft = random_decoder_of(decoder)
        drafter = DRAFTERS[kind](engine, draft)
        engine.drafter = type(engine.drafter)(drafter, decoder.spec.vocab)
    fast = run_recorded(engine, requests_of(adapted(engine), "mixed"))
    assert_same_bits(plain, fast)
    assert pages == 160 or engine.scheduler.preemptions
    if kind not in ("none", "medusa"):
        assert sum(writer.seq.stats.drafted for writer in fast[0])


def random_decoder_of(decoder: Decoder) -> Decoder:
    """Another model of the same shape, which drafts badly."""
    other = Decoder(decoder.spec).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(9)
    for name, parameter in other.named_parameters():
        parameter.copy_(decoder.get_parameter(name) + 0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.mark.usefixtures("both_paths")
def test_early_exit_drafts_with_the_adapter(decoder: Decoder) -> None:
    """With all layers but the last, whose adapters are empty, drafts are those of a model with the adapter merged."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    counts = []
    for is_merged in (False, True):
        engine = make_engine(decoder, None, 3)
        parts = random_parts(decoder.spec, 1, 6)
        adapter = None if is_merged else engine.adapters.add("a", parts)
        if is_merged:
            own = Decoder(decoder.spec).requires_grad_(False).eval()
            own.load_state_dict(decoder.state_dict())
            engine = make_engine(merged(own, parts), None, 3)
        engine.drafter = type(engine.drafter)(DRAFTERS["early_exit"](engine, decoder), decoder.spec.vocab)
        (writer,) = run(engine, [replace(make_request([1, 2, 3], params), adapter=adapter)])
        counts.append((writer.seq.tokens, writer.seq.stats.drafted, writer.seq.stats.accepted))
    assert counts[0] == counts[1]
    assert counts[0][2] > 0


def test_adapters_never_share_pages(decoder: Decoder) -> None:
    """The prefix cache finds a text's pages under its adapter alone, and not under an adapter loaded anew."""
    engine = make_engine(decoder)
    _, first, second = adapted(engine)
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def hits(adapter: Adapter | None) -> int:
        before = engine.scheduler.prefix_hits
        run(engine, [replace(make_request(list(range(40)), params), adapter=adapter)])
        return engine.scheduler.prefix_hits - before

    assert [hits(adapter) for adapter in (None, first, second, first, None, second)] == [0, 0, 0, 32, 32, 32]
    assert first is not None
    engine.adapters.unload(first.name)
    again = engine.adapters.add(first.name, random_parts(decoder.spec, 0, 6, engine.runner.adapters.dtype))
    assert again.number == first.number
    assert [hits(again), hits(again)] == [0, 32]


def test_keys_of_pages_are_unambiguous() -> None:
    keys = [
        root_key(*one) for one in [(None,), (None, 5), (None, 0, 5), (None, 5, 5), ("t",), ("t", 5), ("t", 0, 5), ("t", 5, 5)]
    ]
    assert len(set(keys)) == len(keys)


def test_what_runs_with_an_unloaded_adapter_ends_first(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    _, first, second = adapted(engine)
    assert first is not None
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    request = make_request(list(range(20)), params)
    alone = run(engine, [replace(request, adapter=first)])[0].seq.tokens
    running = engine.submit(replace(request, adapter=first), "none")
    other = engine.submit(replace(request, adapter=second), "none")
    for _ in range(4):
        engine.round()
    engine.adapters.unload(first.name)
    assert first.name not in engine.adapters.folders()
    with pytest.raises(InvalidParameter, match="was unloaded"):
        engine.submit(replace(request, adapter=first), "none")
    replacement = engine.adapters.add(first.name, random_parts(decoder.spec, 7, 6, engine.runner.adapters.dtype))
    assert replacement.number not in (first.number, second.number if second else 0), "the old one is still in use"
    late = engine.submit(replace(request, adapter=replacement), "none")
    while engine.has_work:
        engine.round()
    assert running.seq.tokens == alone
    assert late.seq.tokens != alone
    assert other.seq.finish_reason == late.seq.finish_reason == "length"
    reused = engine.adapters.add("another", random_parts(decoder.spec, 8, 6, engine.runner.adapters.dtype))
    assert reused.number == first.number, "its number and memory are free"


def test_an_aborted_sequence_releases_its_adapter(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    _, first, _ = adapted(engine)
    assert first is not None
    writer = engine.submit(replace(make_request([1, 2, 3], SamplingParams(max_tokens=9)), adapter=first), "none")
    engine.round()
    engine.adapters.unload(first.name)
    engine.abort(writer)
    assert engine.adapters.add("next", random_parts(decoder.spec, 3, 6, engine.runner.adapters.dtype)).number == first.number


# The library, with the bundled model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculation="ngram:4:adaptive=false", max_num_seqs=4, max_loras=3, max_lora_rank=32)


@pytest.fixture(scope="module")
def folders(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{i}", llm.config, 8, i) for i in range(4)]


def test_generate_by_name(llm: LLM, folders: list[Path]) -> None:
    for name, folder in zip("ab", folders, strict=False):
        llm.load_lora(name, folder)
    assert llm.loras == {"a": folders[0], "b": folders[1]}
    prompts, params = ["def main("] * 3, {"max_tokens": 12, "temperature": 0.0}
    texts = [out.outputs[0].token_ids for out in llm.generate(prompts, lora=[None, "a", "b"], **params)]
    assert len({tuple(text) for text in texts}) == 3
    assert texts[1] == llm.generate(prompts[0], lora="a", speculation=False, **params)[0].outputs[0].token_ids
    streamed = [token for piece in llm.stream(prompts[0], lora="b", **params) for token in piece.token_ids]
    assert streamed == list(texts[2])
    beside = llm.beside("none")
    assert beside.generate(prompts[0], lora="a", **params)[0].outputs[0].token_ids == texts[1]
    for wrong in ({"lora": "c"}, {"lora": ["a", "b"]}, {"lora": 3}):
        with pytest.raises(InvalidParameter, match="lora"):
            llm.generate(prompts[0], **wrong)  # type: ignore[arg-type]
    for name in "ab":
        llm.unload_lora(name)
    with pytest.raises(InvalidParameter, match="no adapter 'a'; none is loaded"):
        llm.generate(prompts[0], lora="a")


def test_limits_and_bad_folders(llm: LLM, folders: list[Path], tmp_path: Path) -> None:
    for name, folder in zip("abc", folders, strict=False):
        llm.load_lora(name, folder)
    with pytest.raises(InvalidParameter, match="max_loras"):
        llm.load_lora("d", folders[3])
    with pytest.raises(InvalidParameter, match="'a' is loaded already"):
        llm.load_lora("a", folders[3])
    llm.load_lora("a", folders[3], replace=True)
    assert llm.loras["a"] == folders[3], "the one that it replaces leaves"
    for name in "abc":
        llm.unload_lora(name)
    with pytest.raises(ModelError, match="rank 33; ranks from 1 to 32"):
        llm.load_lora("wide", write_adapter(tmp_path / "wide", llm.config, 33))
    for path, words in ((tmp_path / "none", "no folder"), ("", "folder"), (3, "folder"), ("a\0b", "folder")):
        with pytest.raises(InvalidParameter, match=words):
            llm.load_lora("x", path)  # type: ignore[arg-type]
    for name in ("", " ", 3, "x" * 300):
        with pytest.raises(InvalidParameter):
            llm.load_lora(name, folders[0])  # type: ignore[arg-type]
    assert llm.loras == {}


def test_adapters_at_the_start(folders: list[Path], tmp_path: Path) -> None:
    with LLM(speculation="none", lora={"a": folders[0]}, max_num_seqs=2) as llm:
        assert llm.generate("x = ", lora="a", max_tokens=3)[0].outputs[0].token_ids
    with pytest.raises(InvalidParameter, match="folders by name"):
        LLM(lora=[folders[0]])  # type: ignore[arg-type]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ModelError, match="IA3"):
        LLM(speculation="none", lora={"a": tmp_path})


def test_a_gpu_refuses_adapters_by_name(folders: list[Path]) -> None:
    with pytest.raises(InvalidParameter, match="no LoRA adapters on cuda yet"):
        check_adapters({"a": folders[0]}, "cuda")


@pytest.mark.slow
def test_loading_and_unloading_beside_requests(llm: LLM, folders: list[Path]) -> None:
    """Requests of one adapter have the same tokens while another comes and goes."""
    llm.load_lora("a", folders[0])
    want = llm.generate("import os\n", lora="a", max_tokens=24, temperature=0.0)[0].outputs[0].token_ids
    errors: list[BaseException] = []

    def churn() -> None:
        try:
            for i in range(6):
                llm.load_lora("b", folders[1 + i % 2])
                llm.generate("y = ", lora="b", max_tokens=4)
                llm.unload_lora("b")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    while thread.is_alive():
        assert llm.generate("import os\n", lora="a", max_tokens=24, temperature=0.0)[0].outputs[0].token_ids == want
    thread.join()
    assert not errors
    llm.unload_lora("a")


def test_a_registry_has_its_own_runner(decoder: Decoder) -> None:
    """Names of one model mean nothing to another."""
    runner = Runner(decoder, make_pool(decoder))
    with pytest.raises(InvalidParameter, match="none is loaded"):
        Adapters(runner, EngineConfig()).get("a")
