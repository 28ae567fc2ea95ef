"""Quantised models on the GPU: logits of the dequantised model, and the same bits with speculation on and off.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.engine.engine import Engine
from outrider.model import Feed, LoadOptions, open_decoder
from outrider.sampling import SamplingParams
from tests.support import VOCAB, NoDrafter, make_request
from tests.support.engines import assert_same_bits, run_recorded
from tests.support.families import build_reference
from tests.support.gguf_files import write_gguf
from tests.support.oracle import Shapes
from tests.support.packing import FOLDERS, write_quantised

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "num_hidden_layers": 2 if ON_GPU else 1, "head_dim": 64,
}  # fmt: skip
# What each matrix becomes on the device, and how far its logits may lie from the dequantised model's.
FORMS = {
    "gptq": ("int4", 0.01), "awq": ("int4", 0.01), "w4a16": ("int4", 0.01), "w8a8": ("int8", 0.06), "fp8_channel": ("fp8", 0.2),
    "fp8_128": ("fp8_blocks", 0.15), "fp8": ("", 0.02), "nf4": ("", 0.02), "Q4_0": ("int4", 0.01), "Q4_K": ("int4", 0.01),
    "Q8_0": ("bytes", 0.01), "Q6_K": ("bytes", 0.01),
}  # fmt: skip
KINDS = tuple(FORMS) if ON_GPU else ("gptq", "fp8_channel", "fp8_128")
TOKENS = 24 if ON_GPU else 3
pytestmark = pytest.mark.usefixtures("products_of_fixed_order")


def written(directory: Path, kind: str) -> tuple[Path, Any]:
    """A quantised model's folder or file, and the model that it stands for."""
    reference = build_reference("llama", None, **SIZES)
    if kind in FOLDERS:
        write_quantised(directory / kind, reference, kind)
        config = directory / kind / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
        return directory / kind, reference
    pytest.importorskip("gguf", reason="the gguf package writes the files")
    write_gguf(directory / "model.gguf", reference, kind)
    return directory / "model.gguf", reference


def runner_of(path: Path, dtype: str = "auto", **options: Any) -> Any:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    return CudaRunner(open_decoder(path, LoadOptions(dtype)), 41, 16, DEVICE, CudaOptions(graphs=ON_GPU, **options))


def kinds_of(runner: Any) -> set[str]:
    return {matrix.kind for layer in runner.cuda.layers for matrix in layer.matrices}


def engine_of(runner: Any, drafter: Any, length: int) -> Engine:
    config = EngineConfig(page_size=16, max_num_seqs=4, max_batch_rows=64, prefix_cache=False)
    return Engine(runner, None, drafter, FixedLength(length), config)


def assert_drafts_change_nothing(runner: Any) -> None:
    """Plain decoding alone against trees of drafts in one batch."""
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=TOKENS, ignore_eos=True) for heat in (0.0, 0.9)]
    requests = [make_request([(7 * j + i) % VOCAB for j in range(9 + 12 * i)], p, f"r{i}") for i, p in enumerate(params)]
    alone = [run_recorded(engine_of(runner, NoDrafter(), 0), [request]) for request in requests]
    plain = [run[0][0] for run in alone], {name: rows for run in alone for name, rows in run[1].items()}
    answers = {writer.seq.request.id: writer.seq.tokens for writer in plain[0]}
    for shape in ("chain", "comb") if ON_GPU else ("comb",):
        oracle = Shapes(answers, 5)
        oracle.shape = shape
        assert_same_bits(plain, run_recorded(engine_of(runner, oracle, 5), requests))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    path, reference = written(tmp_path, kind)
    runner = runner_of(path)
    assert kinds_of(runner) == {FORMS[kind][0]}
    taken = sum(tensor.nbytes for layer in runner.cuda.layers for matrix in layer.matrices for tensor in matrix.tensors)
    weights = sum(layer.parameters(SIZES["hidden_size"]) for layer in runner.decoder.spec.layers)
    assert taken / weights == pytest.approx(runner.decoder.spec.layer_bytes or 2.0, rel=0.1), "what is planned"
    text = [i * 37 % VOCAB for i in range(40 if ON_GPU else 6)]
    logits = runner.logits(runner.forward([Feed(range(3), 0, text)]).last, range(len(text)))
    with torch.no_grad():
        want = reference(torch.tensor([text])).logits[0]
    assert float((logits - want).norm() / want.norm()) < FORMS[kind][1]


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ("fp8_128",))
def test_drafts_change_no_bit(tmp_path: Path, kind: str) -> None:
    assert_drafts_change_nothing(runner_of(written(tmp_path, kind)[0]))


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"] if ON_GPU else ["int4"])
def test_a_model_may_be_rounded_at_load(tmp_path: Path, dtype: str) -> None:
    reference = build_reference("llama", tmp_path, **SIZES)
    runner = runner_of(tmp_path, dtype)
    assert kinds_of(runner) == {dtype}
    text = [i * 37 % VOCAB for i in range(6)]
    logits = runner.logits(runner.forward([Feed(range(3), 0, text)]).last, range(len(text)))
    with torch.no_grad():
        want = reference(torch.tensor([text])).logits[0]
    assert float((logits - want).norm() / want.norm()) < {"int8": 0.06, "int4": 0.3, "fp8": 0.2}[dtype]
    assert_drafts_change_nothing(runner)


@pytest.mark.skipif(not ON_GPU, reason="the bundled model is too large for the interpreter")
def test_target_and_draft_model_have_their_own_precision() -> None:
    from outrider import LLM

    prompts = ["def fibonacci(n):\n", "class Stack:\n"]
    params = [SamplingParams(temperature=heat, seed=3, max_tokens=64, ignore_eos=True) for heat in (0.0, 0.8)]
    plain = LLM(device="cuda", dtype="int8", speculation="none", max_num_seqs=8).generate(prompts, params)
    for dtype in ("int4", "bfloat16"):
        settings = {"method": "draft_model", "dtype": dtype, "draft_tokens": 4}
        drafted = LLM(device="cuda", dtype="int8", speculation=settings, max_num_seqs=8).generate(prompts, params)
        assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
        assert all(out.outputs[0].speculation["fallback_reason"] is None for out in drafted)


def test_activations_stay_in_bfloat16_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = written(tmp_path, "fp8_channel")
    with caplog.at_level(logging.INFO, "outrider"):
        runner = runner_of(path, fp8_rows=False)
    assert kinds_of(runner) == {"fp8_weights"}
    assert "decoded in products" in caplog.text
    assert_drafts_change_nothing(runner)
