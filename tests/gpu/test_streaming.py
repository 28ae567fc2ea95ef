"""Promise one where weights are streamed from host memory: the same bits as with all of them on the device.

Most of these run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter
from outrider.model import Decoder, Feed, open_decoder
from outrider.model.cuda_streaming import PinnedMemory, WeightStream
from outrider.model.load import served_spec
from outrider.model.placement import Placement, sizes_of
from tests.gpu.test_quantised_models import written
from tests.support import NoDrafter, make_request, random_decoder, write_family
from tests.support.engines import assert_same_bits, run_recorded
from tests.support.oracle import Shapes

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU")
TOKENS = 40 if ON_GPU else 4  # the interpreter is slow
GRAPH_ROWS = 16 if ON_GPU else 4
NODES = 60 if ON_GPU else 7
ALL = (0, 1, 2, 3)
SPLITS: dict[str, list[tuple[int, ...]]] = {
    "all": [ALL] * 5,
    "mixed": [(2,), (), (0, 1, 3), ALL, (3,)],
    "fewer than buffers": [(), ALL, (), (), (1,)],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@lru_cache(maxsize=4)
def decoder_of(root: Path, dtype: str = "bfloat16") -> Decoder:
    folder = write_family(root / dtype, "llama2", dtype, hidden_size=64, num_hidden_layers=5)
    return random_decoder(folder, 3)


def runner_of(decoder: Decoder, streamed: Sequence[tuple[int, ...]] | None) -> Any:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    placement = None if streamed is None else Placement(tuple(streamed), (1,) * len(streamed), decoder.output is not None)
    options = CudaOptions(max_graph_rows=GRAPH_ROWS, placement=placement)
    return CudaRunner(decoder, 81, 16, DEVICE, options)


def engine_of(runner: Any, drafter: Any, length: int) -> Engine:
    config = EngineConfig(page_size=16, max_num_seqs=4, max_batch_rows=64, prefix_cache=False)
    return Engine(runner, None, drafter, FixedLength(length), config)


def requests() -> list[Any]:
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=TOKENS) for heat in (0.0, 0.9)]
    return [make_request([(7 * j + i) % 90 for j in range(9 + 20 * i)], p, f"r{i}") for i, p in enumerate(params)]


@lru_cache(maxsize=4)
def resident_run(root: Path, dtype: str) -> Any:
    return run_recorded(engine_of(runner_of(decoder_of(root, dtype), None), NoDrafter(), 0), requests())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"] if ON_GPU else ["bfloat16"])
@pytest.mark.parametrize("split", SPLITS)
def test_streamed_weights_give_the_bits_of_resident_ones(
    root: Path, split: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds, then bushy trees of more rows than a graph or one part of the logits holds."""
    from outrider.model import cuda_logits, cuda_runner

    for module in (cuda_logits, cuda_runner):
        monkeypatch.setattr(module, "LOGIT_ROWS", 5)
    plain = resident_run(root, dtype)
    runner = runner_of(decoder_of(root, dtype), SPLITS[split])
    assert_same_bits(plain, run_recorded(engine_of(runner, NoDrafter(), 0), requests()))
    answers = {writer.seq.request.id: writer.seq.tokens for writer in plain[0]}
    oracle = Shapes(answers, NODES)
    oracle.shape = "bushy"
    assert_same_bits(plain, run_recorded(engine_of(runner, oracle, NODES), requests()))
    crossed = runner.cuda.streaming.crossed
    assert (crossed > 0) == (split != "fewer than buffers")
    runner.close()


def test_many_rows_cross_the_bus_once(root: Path) -> None:
    """Trees of more rows than the largest graph are verified in one pass over the weights."""
    runner = runner_of(decoder_of(root), SPLITS["all"])
    answers = {writer.seq.request.id: writer.seq.tokens for writer in resident_run(root, "bfloat16")[0]}
    oracle = Shapes(answers, NODES)
    oracle.shape = "bushy"
    engine = engine_of(runner, oracle, NODES)
    writers = [engine.submit(request, "test") for request in requests()]
    rounds = 0
    while engine.has_work:
        engine.round()
        rounds += 1
    passes = runner.cuda.streaming.crossed // runner.cuda.streaming.placement.pass_bytes
    assert passes <= rounds + 1, "and one where a graph is captured"
    assert [writer.seq.tokens for writer in writers] == [answers[request.id] for request in requests()]
    runner.close()


@pytest.mark.parametrize("kind", ["gptq", "fp8_channel", "fp8_128", "w8a8"] if ON_GPU else ["gptq", "fp8_channel"])
def test_quantised_weights_are_streamed_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """The bits of a prompt's logits, and how many bytes the plan reckons with."""
    path, _ = written(tmp_path, kind)
    decoder = open_decoder(path)
    depth, tokens = decoder.spec.depth, [(7 * i) % 50 for i in range(9)]
    logits = []
    for streamed in (None, [ALL] * depth):
        runner = runner_of(open_decoder(path), streamed)
        logits.append(runner.logits(runner.forward([Feed(list(range(4)), 0, tokens)]).last, range(len(tokens))))
    assert torch.equal(*logits)
    held = sum(tensor.nbytes for layer in runner.cuda.layers for matrix in layer.matrices for tensor in matrix.tensors)
    planned = sum(map(sum, sizes_of(served_spec(path)).layers))
    assert planned == pytest.approx(held, rel=0.05)
    runner.close()


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3-moe", "qwen3.5"])
def test_plans_know_the_size_of_every_matrix(tmp_path: Path, family: str) -> None:
    decoder = random_decoder(write_family(tmp_path / family, family, "bfloat16"))
    runner = runner_of(decoder, None)
    sizes = sizes_of(decoder.spec)
    for layer, planned in zip(runner.cuda.layers, sizes.layers, strict=True):
        assert [sum(tensor.nbytes for tensor in matrix.tensors) for matrix in layer.matrices] == list(planned)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5"])
def test_experts_and_recurrent_layers_are_streamed_too(tmp_path: Path, family: str) -> None:
    decoder = random_decoder(write_family(tmp_path / family, family, "bfloat16"), 3)
    count, tokens = len(runner_of(decoder, None).cuda.layers[0].matrices), TOKENS // 2
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=tokens)
    request = make_request([(7 * j) % 90 for j in range(9)], params)
    runs = [
        run_recorded(engine_of(runner_of(decoder, streamed), NoDrafter(), 0), [request])
        for streamed in (None, [tuple(range(count))] * decoder.spec.depth)
    ]
    assert_same_bits(*runs)


def pinned_memories() -> list[PinnedMemory]:
    return [thing for thing in gc.get_objects() if isinstance(thing, PinnedMemory) and thing.is_pinned]


@needs_gpu
@pytest.mark.parametrize("limit", ["1500MiB", "1800MiB"])
def test_the_limit_is_never_exceeded_and_nothing_stays_pinned(tmp_path: Path, limit: str) -> None:
    """A model of 1.2 GB; a forward, drafts and prompts, and the tokens of the same model in all of the memory."""
    folder = write_family(
        tmp_path / "large", "llama2", "bfloat16", hidden_size=2048, intermediate_size=8192, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, vocab_size=32000, max_position_embeddings=1024,
    )  # fmt: skip
    prompts = [[(11 * i + j) % 1000 for i in range(70)] for j in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    common: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "max_num_seqs": 4,
        "speculation": "ngram:4:adaptive=false",
    }
    with LLM(folder, memory=0.5, **common) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with LLM(folder, memory=limit, **common) as llm:
        streaming = llm._target.runner.cuda.streaming  # type: ignore[attr-defined]
        assert streaming is not None
        assert pinned_memories()
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected
        assert streaming.crossed > 0
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= int(limit.removesuffix("MiB")) * 2**20
    assert not pinned_memories()


@needs_gpu
def test_an_interrupted_start_leaves_nothing_pinned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = WeightStream.take

    def interrupted(self: WeightStream, index: int, layer: Any) -> None:
        take(self, index, layer)
        if index == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(WeightStream, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner_of(decoder_of(root), SPLITS["all"])
    assert not pinned_memories()


@needs_gpu
def test_limits_that_are_too_small_are_refused_before_loading(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "small", "llama2", "bfloat16")
    with pytest.raises(InvalidParameter, match="the smallest limit that works is"):
        LLM(folder, load_format="dummy", device="cuda", memory="64MiB")
