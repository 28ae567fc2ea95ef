"""The KV pool: its size in bytes, and how it stores rows that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.cache import KVPool
from tests.support import write_family

MIB = 2**20


@pytest.mark.parametrize("page_size", [16, 64, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_buy_that_much_memory(tmp_path: Path, both_paths: str, dtype: str, page_size: int) -> None:
    """Uses a pool smaller than all sequences could use; one more page is for padding."""
    folder = write_family(tmp_path, "llama2", dtype)
    llm = LLM(folder, load_format="dummy", kv_bytes=MIB, max_num_seqs=64, page_size=page_size)
    pool = llm.engine.runner.pool
    held, page = pool.keys.nbytes + pool.values.nbytes, page_size * pool.token_bytes
    assert MIB - page < held - page <= MIB
    assert pool.keys.untyped_storage().nbytes() <= pool.keys.nbytes + 64
    assert llm.engine.pages.count * page == held - page
    narrow = both_paths == "native" and dtype == "bfloat16" and page_size % 2 == 0
    assert pool.token_bytes == KVPool.bytes_per_token(2, 4, 12, 2 if narrow else 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("rows", [1, 3])
def test_values_in_memory_are_finite(value: float, part: str, rows: int) -> None:
    """A row that is not finite is stored with a key of NaN: rows that see it are not finite, others are unchanged."""
    pool = KVPool(layers=1, pages=2, kv_heads=2, page_size=4, head_dim=6)
    keys, values = torch.randn(rows, 2, 6), torch.randn(rows, 2, 6)
    (keys if part == "key" else values)[0, 1, 2] = value
    slots = torch.ones(rows, dtype=torch.int64), torch.arange(rows)
    pool.write(0, slots, keys, values)
    assert bool(pool.values.isfinite().all())
    assert bool(pool.keys[0, 1, 1, 0, :6].isnan().all())
    assert torch.equal(pool.keys[0, 1, 0, :rows, :6], keys[:, 0])
    assert torch.equal(pool.values[0, 1, 0, :rows, :6], values[:, 0])
    assert torch.equal(pool.values[0, 1, 1, 1:rows, :6], values[1:, 1])
