"""Programs and commands as vLLM's documentation has them: nothing is changed but the import and the models."""

from __future__ import annotations

import re
import signal
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from tests.support.server import Process

pytestmark = pytest.mark.slow
SNIPPET = """
from vllm import LLM, SamplingParams

prompts = [
    "def add(a, b):",
    "class Stack:",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    SPECULATION,
    gpu_memory_utilization=0.8,
)
outputs = llm.generate(prompts, CALL)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
OLDER = """speculative_model="facebook/opt-125m",
    num_speculative_tokens=5,
    use_v2_block_manager=True"""
NEWER = """speculative_config={
        "model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
        "method": "draft_model",
    }"""


def with_small_models(text: str) -> str:
    model = bundled_model()
    return text.replace("facebook/opt-6.7b", str(model)).replace("facebook/opt-125m", str(model / "draft"))


@pytest.mark.parametrize(
    ("speculation", "call"), [(OLDER, "sampling_params"), (NEWER, "sampling_params=sampling_params, use_tqdm=False")]
)
def test_a_draft_model_in_a_program(speculation: str, call: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = with_small_models(SNIPPET.replace("SPECULATION", speculation).replace("CALL", call))
    names: dict[str, Any] = {}
    exec(program.replace("from vllm import", "from outrider import"), names)
    assert len(re.findall("^Prompt: '.*', Generated text: '.+'$", capsys.readouterr().out, re.MULTILINE)) == 2
    llm, outputs = names["llm"], names["outputs"]
    assert (llm.speculation.method, llm.speculation.draft_tokens) == ("draft_model", 5)
    assert llm.speculation.model == str(bundled_model() / "draft")
    assert all(output.outputs[0].speculation["method"] == "draft_model" for output in outputs)


def test_a_draft_model_in_a_command() -> None:
    command = (
        "--model facebook/opt-6.7b --speculative-model facebook/opt-125m --num_speculative_tokens 5 --tensor-parallel-size 1 "
        "--gpu_memory_utilization 0.8 --max-model-len 512 --enforce-eager --disable_log_requests --trust-remote-code"
    )
    process = Process(*with_small_models(command).split())
    try:
        process.hear("ready on")
        assert "on: draft_model, up to 5 tokens a round" in process.stderr
        body = {"model": "pyrite", "prompt": "def add(a, b):", "max_tokens": 8}
        answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
        assert answer["metrics"]["speculative_decoding"]["method"] == "draft_model"
    finally:
        assert process.end(signal.SIGTERM) == 0, process.stderr
        assert process.popen.stderr is not None
        process.popen.stderr.close()


def test_one_device_alone() -> None:
    instead = {
        "pipeline_parallel_size": "a model is shared by",
        "data_parallel_size": "`outrider serve --data-parallel-size N` runs",
    }
    for name, hint in instead.items():
        with pytest.raises(InvalidParameter, match=f"{name}: must be 1: {hint} .*; got 2"):
            LLM(**{name: 2})
    with pytest.raises(InvalidParameter, match="tensor_parallel_size: 5 ranks cannot share 8 attention heads"):
        CliRunner().invoke(app, ["serve", "-tp", "5", "--port", "0"], catch_exceptions=False)


def test_keywords_that_contradict_are_refused() -> None:
    llm = LLM(speculation="none", enforce_eager=True, trust_remote_code=False, enable_prefix_caching=False)
    assert llm.generate("x", max_tokens=1)[0].outputs[0].token_ids
    with pytest.raises(InvalidParameter, match="given beside params"):
        llm.generate("x", llm.default_params(), sampling_params=llm.default_params())
    with pytest.raises(InvalidParameter, match="enforce_eager"):
        LLM(enforce_eager="yes")
    with pytest.raises(InvalidParameter, match="memory"):
        LLM(gpu_memory_utilization=2.0)
