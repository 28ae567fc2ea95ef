"""Two hundred requests that come and go in too little memory equal their solo runs, on the bundled model."""

from __future__ import annotations

import pytest

from outrider import LLM
from outrider.bench.crowd import random_requests, soak
from outrider.cache import KVPool

PAGES, SIZE = 40, 16


@pytest.mark.parametrize("method", ["auto", "mixture:8:members=suffix+draft_model"])
def test_a_crowd_equals_solo_runs(method: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    alone = LLM(max_model_len=512)
    shape = alone.config
    room = PAGES * SIZE * KVPool.bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim)
    crowd = LLM(speculation=method, max_model_len=512, max_num_seqs=12, page_size=SIZE, kv_bytes=room)
    asked = random_requests(crowd, 200 if method == "auto" else 40, seed=3, longest=14)
    report = soak(crowd, alone, asked)
    assert report.good, report
    assert report.finished > 0.7 * len(asked)
    assert report.cancelled > 0
    assert report.preemptions > 0, "memory was meant to run out"
    assert report.prefix_hits > 0
