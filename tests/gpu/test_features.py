"""Every feature of a spec on the GPU: rows keep their bits, agree with the plain decoder, and requests keep their rotary table.

These run in Triton's interpreter too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS, keeps_bits, random_decoder
from outrider.cache import KVPool, SequenceState
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.draft import Drafter
from outrider.draft.draft_model import DraftModel
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter
from outrider.model import Feed, ModelSpec, Runner
from outrider.model.backends import CUDA
from outrider.model.spec import FeedForward
from outrider.ops import Plain
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, make_request, run

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE, ROWS = ("cuda", 40) if ON_GPU else ("cpu", 12)
PAGES = 8
SPECS = {name: spec for name, spec in FEATURE_SPECS.items() if not CUDA.missing(spec)}
REFUSED = {name: spec for name, spec in FEATURE_SPECS.items() if CUDA.missing(spec)}
# heads, KV heads, head width: ratios and widths that no other test has
RATIOS = [(6, 6, 80), (9, 3, 96), (14, 2, 64), (71, 1, 64), (8, 1, 256), (10, 2, 34)]


def cuda_runner(spec: ModelSpec, dtype: str = "float32", page_size: int = 16, **options: Any) -> Any:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    return CudaRunner(random_decoder(spec, dtype), PAGES + 1, page_size, DEVICE, CudaOptions(graphs=False), **options)


def plain_runner(spec: ModelSpec) -> Runner:
    return Runner(random_decoder(spec), KVPool(spec.depth, PAGES + 1, spec.kv_heads, 16, spec.head_dim), Plain())


def assert_agrees(spec: ModelSpec, rows: int = ROWS, fed: int = ROWS) -> None:
    """A prompt and a tree after it have the logits of the plain decoder. Rows past the first `fed` are draft nodes."""
    text = [i * 11 % spec.vocab for i in range(rows)]
    made, want = [], []
    for logits, runner in ((made, cuda_runner(spec)), (want, plain_runner(spec))):
        start, state = runner.decoder.rotary_start(spec.context), SequenceState()
        prompt = Feed([2, 0, 3, 5], 0, text[:fed], text[fed:], range(-1, rows - fed - 1), rotary_start=start, state=state)
        tree = Feed([2, 0, 3, 5], rows, [7], [1, 2, 3], [-1, -1, 0], rotary_start=start, state=state)
        for feed, count in ((prompt, rows), (tree, 4)):
            logits.append(runner.logits(runner.forward([feed]).last, range(count)))
            state.accept(range(rows - fed))
    torch.testing.assert_close(torch.cat(made), torch.cat(want), atol=1e-4, rtol=0)


@pytest.mark.skipif(not ON_GPU, reason="numpy sums products of other sizes otherwise")
@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 16), ("bfloat16", 64)])
@pytest.mark.parametrize("name", SPECS)
def test_rows_keep_their_bits(name: str, dtype: str, page_size: int) -> None:
    assert keeps_bits(cuda_runner(FEATURE_SPECS[name], dtype, page_size), PAGES, page_size)


@pytest.mark.parametrize("name", SPECS)
def test_the_gpu_agrees_with_the_plain_decoder(name: str) -> None:
    assert_agrees(FEATURE_SPECS[name])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RATIOS if ON_GPU else RATIOS[-1:])
def test_ratios_of_heads_and_widths(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = FEATURE_SPECS["Llama"].with_layers(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    assert_agrees(spec, 12, fed=1)  # float32 chunks of wide heads take long to compile
    if ON_GPU:
        assert keeps_bits(cuda_runner(spec, "bfloat16", 64), PAGES, 64)


def test_every_activation_gated_and_not() -> None:
    spec = FEATURE_SPECS["Llama"]
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        for gated in (True, False):
            mlp = FeedForward(72, activation, gated, bias=True)
            assert_agrees(replace(spec, layers=tuple(replace(layer, mlp=mlp) for layer in spec.layers[:1])), 12, fed=1)


def test_requests_keep_their_rotary_table() -> None:
    """Decoding by rounds, and by chains of a draft model: a request's table is that of its maximum length throughout."""
    spec = FEATURE_SPECS["rotary tables by length"]
    target = cuda_runner(spec)
    draft = cuda_runner(spec, target=target)
    tokens = (6, 60) if ON_GPU else (3, 30)
    prompts = [[5, 9, 2], [4, 8, 1, 3]]
    requests = [
        make_request(prompt, SamplingParams(temperature=0.0, max_tokens=n), f"r{n}")
        for prompt, n in zip(prompts, tokens, strict=True)
    ]

    def texts(drafter: Drafter, length: int) -> list[list[int]]:
        config = EngineConfig(page_size=16, max_num_seqs=2, max_batch_rows=24, prefix_cache=False)
        return [writer.seq.tokens for writer in run(Engine(target, None, drafter, FixedLength(length), config), requests)]

    plain, wanted = plain_runner(spec), []
    for prompt, n in zip(prompts, tokens, strict=True):
        text, start = list(prompt), plain.decoder.rotary_start(len(prompt) + n)
        assert (start > 0) == (n == tokens[1])
        while len(text) < len(prompt) + n:
            row = plain.logits(plain.forward([Feed([0, 1, 2, 3, 4], 0, text, rotary_start=start)]).last, [len(text) - 1])
            text.append(int(row.argmax()))
        wanted.append(text)
    assert texts(NoDrafter(), 0) == wanted
    assert texts(DraftModel(draft), 3) == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_gpu_lacks_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match="an NVIDIA GPU has no .* yet; pass device=cpu"):
        cuda_runner(REFUSED[name])


def test_heads_wider_than_the_gpu_takes_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="even head widths up to 256, not 320"):
        cuda_runner(FEATURE_SPECS["Llama"].with_layers(head_dim=320))
