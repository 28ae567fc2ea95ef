"""Two hundred requests that come and go in too little memory equal their solo runs, on the bundled model."""

from __future__ import annotations

import pytest

from benchmarks.soak import random_requests, soak
from outrider import LLM

SIZE = 16


@pytest.mark.parametrize(
    ("method", "together", "pages"),
    [
        ("auto", 12, 30),
        ("auto", 1, 40),
        pytest.param("mixture:8:members=suffix+draft_model", 12, 30, marks=pytest.mark.exhaustive),
    ],
)
def test_a_crowd_equals_solo_runs(
    method: str, together: int, pages: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    requests, pages = (200, pages) if request.config.getoption("--whole-grids") else (40, 18) if together > 1 else (20, pages)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    alone = LLM(speculation="none", max_model_len=512)
    room = pages * SIZE * alone.engine.runner.pool.token_bytes
    busy = LLM(speculation=method, max_model_len=512, max_num_seqs=together, page_size=SIZE, kv_bytes=room)
    sent = random_requests(busy, requests, seed=3, longest=14 if together > 1 else 40)
    report = soak(busy, alone, sent)
    assert report.good, report
    assert report.finished > 0.7 * len(sent)
    assert report.cancelled > 0
    assert report.preemptions > 0 or together == 1, "memory was meant to run out"
    assert report.drafted > 0 or (method == "auto" and together > 1), "among many `auto` may find that nothing pays"
    assert report.prefix_hits > 0
