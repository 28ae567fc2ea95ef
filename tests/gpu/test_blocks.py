"""Block drafters on the device equal the CPU's runner. These tests run in Triton's interpreter too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.draft import Drafter
from outrider.draft.dflash import BlockDrafter, BlockOptions
from outrider.engine.engine import Engine
from outrider.heads import BlockRunner
from outrider.model import Decoder, Feed
from outrider.ops import Plain
from outrider.sampling import Row, SamplingParams
from tests.support import NoDrafter, make_request, random_decoder, run, write_family
from tests.support.blocks import KINDS, MASK, random_block

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, SIZE, LENGTH, COUNT = 20, 16, 5, 6
TOKENS = 24 if DEVICE == "cuda" else 4  # the interpreter is slow


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_family(tmp_path_factory.mktemp("m"), "llama2", hidden_size=64, num_key_value_heads=2, num_hidden_layers=2)
    return random_decoder(folder)


def on_host(decoder: Decoder, head: Any) -> BlockDrafter:
    """A drafter whose runner and rankings are torch's and NumPy's."""
    c = head.config.shape
    pool = KVPool(c.depth, PAGES, c.kv_heads, SIZE, c.head_dim)
    return BlockDrafter(head, pool, Plain(), BlockOptions(candidates=COUNT), BlockRunner(head, pool, Plain()))


@pytest.mark.parametrize("kind", KINDS if DEVICE == "cuda" else ["dspark", "dflash2", "dflash reduced"])
def test_candidates_are_those_of_the_reference(decoder: Decoder, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts, one of them with empty slots before it; what they read comes with the block and before it."""
    from outrider.heads import cuda_block
    from outrider.heads.cuda_block import CudaBlockRunner
    from outrider.model.cuda_runner import CudaRunner

    monkeypatch.setattr(cuda_block, "_MAX_ROWS", LENGTH)  # one text at a time
    head = random_block(decoder, kind)
    host, device = on_host(decoder, deepcopy(head)), CudaBlockRunner(head, CudaRunner(decoder, PAGES, SIZE, DEVICE))
    for part in (device._pool.keys, device._pool.values):  # what is not read must not matter
        part.normal_(std=30.0)
    pages: list[list[int]] = [[4, 1, 6], [2, 0]]
    ends, firsts, heat = (20, 9), (0, 3), (0.0, 0.9)
    taps = [
        torch.randn(end - first, head.fc.shape[1], generator=torch.Generator().manual_seed(end))
        for end, first in zip(ends, firsts, strict=True)
    ]
    reads = [Feed(pages[i], firsts[i], [1] * (ends[i] - firsts[i]), first_key=firsts[i]) for i in range(2)]
    feeds = [Feed(pages[i], ends[i], [7 + i, *[MASK] * (LENGTH - 1)], first_key=firsts[i]) for i in range(2)]
    slots = LENGTH - (0 if head.config.from_anchor else 1)
    rows = [
        Row(SamplingParams(temperature=heat[i]), 7 + i, 0, ends[i] + 1 + slot, 1, (), frozenset())
        for i in range(2) for slot in range(slots)
    ]  # fmt: skip
    got = device.candidates(feeds, rows, COUNT, (reads, torch.cat(taps).to(DEVICE)))
    assert host._runner is not None
    host._runner.read(reads, torch.cat(taps))
    sequences = [type("S", (), {"tokens": [feed.tokens[0]]})() for feed in feeds]
    guesses = host._led(host._runner.guess(feeds), [seq.tokens[-1] for seq in sequences], rows, [1.0] * len(rows))
    want = host._lattices(sequences, guesses, rows, [1.0] * len(rows))  # type: ignore[arg-type]
    from outrider.draft.dflash import _lattices_of

    for one, other in zip(_lattices_of(got, 2), want, strict=True):
        assert (one.tokens == other.tokens).all()
        assert np.allclose(one.chances, other.chances, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "dflash reduced"] if DEVICE == "cuda" else ["dflash reduced"])
def test_a_block_drafter_changes_no_token(decoder: Decoder, kind: str) -> None:
    from outrider.heads.cuda_block import CudaBlockRunner
    from outrider.model.cuda_runner import CudaRunner

    target = CudaRunner(decoder, PAGES, SIZE, DEVICE)
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS),
        SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5, max_tokens=TOKENS),
    ]
    to_submit = [make_request(list(range(5, 25 - 9 * i)), p, f"r{i}") for i, p in enumerate(params)]

    def texts(drafter: Drafter, length: int) -> Any:
        config = EngineConfig(page_size=SIZE, max_num_seqs=2, max_batch_rows=24, prefix_cache=False)
        return run(Engine(target, None, drafter, FixedLength(length), config), to_submit)

    plain = texts(NoDrafter(), 0)
    head, c = random_block(decoder, kind), decoder.spec
    pool = KVPool(2, PAGES, c.kv_heads, SIZE, c.head_dim)
    fast = texts(BlockDrafter(head, pool, Plain(), BlockOptions(candidates=COUNT), ranker=CudaBlockRunner(head, target)), 7)
    assert [writer.seq.tokens for writer in fast] == [writer.seq.tokens for writer in plain]
    assert [writer.seq.stats.fallback_reason for writer in fast] == [None] * 2
    assert all(writer.seq.stats.drafted > 0 for writer in fast)
