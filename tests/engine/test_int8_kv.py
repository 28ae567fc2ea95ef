"""Keys and values in int8: the same tokens with and without speculation, and memory that is counted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidParameter
from tests.support import VOCAB, Oracle, make_engine, make_request, random_decoder, run, write_family
from tests.support.engines import assert_same_bits, random_params, run_recorded


@pytest.mark.parametrize("branches", [0, 5], ids=["chains", "trees"])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
@pytest.mark.usefixtures("both_paths")
def test_oracle_drafts_change_nothing(tmp_path: Path, family: str, branches: int) -> None:
    rng = random.Random(f"{family} {branches}")
    decoder = random_decoder(write_family(tmp_path, family, "bfloat16"), 0)
    requests = [
        make_request([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], random_params(rng, 30), f"r{i}") for i in range(4)
    ]
    plain = run_recorded(make_engine(decoder, kv_dtype="int8"), requests)
    oracle = Oracle({r.id: w.seq.tokens for r, w in zip(requests, plain[0], strict=True)}, 4, branches)
    assert_same_bits(plain, run_recorded(make_engine(decoder, oracle, 4 + branches, kv_dtype="int8"), requests))
    assert max(oracle.accepted) == 4


@pytest.mark.usefixtures("both_paths")
def test_preemption_and_prefix_hits_change_nothing(tmp_path: Path) -> None:
    decoder = random_decoder(write_family(tmp_path, "llama2", "bfloat16"), 0)
    prompt = [i * 31 % VOCAB for i in range(40)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=60) for i in range(4)]
    requests = [make_request([*prompt, i], p, f"r{i}") for i, p in enumerate(params)]
    alone = [run(make_engine(decoder, kv_dtype="int8"), [request])[0].seq.tokens for request in requests]
    engine = make_engine(decoder, pages=14, kv_dtype="int8")
    assert [writer.seq.tokens for writer in run(engine, requests)] == alone
    assert [writer.seq.tokens for writer in run(engine, requests)] == alone, "from the prefix cache"


def test_kv_bytes_buy_more_tokens(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama2", "bfloat16")
    settings = {"load_format": "dummy", "kv_bytes": 2**18, "max_num_seqs": 64, "page_size": 16}
    if LLM(folder, **settings).engine.runner.stack is None:
        with pytest.raises(InvalidParameter, match="native core alone"):
            LLM(folder, kv_dtype="int8", **settings)
        return
    narrow, wide = LLM(folder, kv_dtype="int8", **settings), LLM(folder, **settings)
    pool, page = narrow.engine.runner.pool, 16 * narrow.engine.runner.pool.token_bytes
    assert 2**18 - page < pool.keys.nbytes + pool.values.nbytes - page <= 2**18
    assert pool.token_bytes == 2 * 2 * 4 * (16 + 4)  # of both, in two layers and four heads: the integers and a scale
    assert narrow.engine.pages.count > 1.5 * wide.engine.pages.count
    assert pool.keys.dtype == torch.int8


@pytest.mark.parametrize(("settings", "words"), [
    ({"kv_dtype": "int4"}, "auto, int8"),
    ({"kv_dtype": "int8", "page_size": 10}, "not a multiple of 16"),
    ({"kv_cache_dtype": "int8", "tensor_parallel_size": 2}, "one process"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(tmp_path: Path, settings: dict[str, object], words: str) -> None:
    folder = write_family(tmp_path, "llama2", "bfloat16")
    with pytest.raises(InvalidParameter, match=words):
        LLM(folder, load_format="dummy", **settings)
