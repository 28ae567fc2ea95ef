"""The acceptance benchmark: rows, batches, shaped requests, and equality counted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.bench.acceptance import EVERY_METHOD, Workload, bench_methods, show_rows
from outrider.bench.workloads import find_prompts
from outrider.config import SpeculationConfig
from outrider.draft import method_names
from outrider.engine import llm as llm_module
from outrider.engine.acceptance import read_prompts
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

PROMPTS = ["import os\n", "def f(x):\n    return"]


def test_rows() -> None:
    methods = "none,ngram:4,mixture:6:members=ngram+(eagle:3)"
    rows = list(bench_methods(Workload(PROMPTS, 16, shaped=3), None, methods, [(0.0, 1), (0.8, 2)], check=True))
    assert [(row["method"], row["temperature"], row["batch"]) for row in rows] == [
        (method, temperature, batch) for temperature, batch in ((0.0, 1), (0.8, 2)) for method in methods.split(",")
    ]
    for row in rows:
        assert row["equal"] == 1.0
        assert (row["outputs"], row["compared"], row["fallbacks"]) == (2, 5, 0)
        assert row["propose_ms"] is None if row["method"] == "none" else row["propose_ms"] > 0
    assert rows[0]["tokens_per_round_all"] == 1.0
    assert rows[2]["tokens_per_round_all"] > 1.5
    text = io.StringIO()
    show_rows(rows, Console(file=text, width=160))
    assert "mixture:6" in text.getvalue()
    assert "100%" in text.getvalue()


def test_a_difference_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter under another rule emits other tokens, and the table says so."""
    real = llm_module.LLM.generate

    def spoilt(self, prompts, params=None, **kwargs):  # type: ignore[no-untyped-def]
        results = real(self, prompts, params, **kwargs)
        if self.speculation.method == "ngram":
            results[0].outputs[0].token_ids[-1] += 1
        return results

    monkeypatch.setattr(llm_module.LLM, "generate", spoilt)
    row = next(iter(bench_methods(Workload(PROMPTS, 6), None, "ngram:4", [(0.0, 1)], check=True)))
    assert row["equal"] == 0.5


def test_prompts_that_do_not_fit_are_left_out_and_counted() -> None:
    long = "x = 1\n" * 2000
    (row,) = bench_methods(Workload([PROMPTS[0], long, PROMPTS[1]], 6, shaped=2), None, "ngram:4", [(0.0, 1)], check=True)
    assert (row["outputs"], row["skipped"], row["compared"], row["equal"]) == (2, 1, 4, 1.0)
    text = io.StringIO()
    show_rows([row], Console(file=text, width=160))
    assert "do not fit the context: 1" in text.getvalue()
    with pytest.raises(InvalidParameter, match="no prompt leaves room for 6 tokens"):
        next(bench_methods(Workload([long], 6), None, "ngram:4", [(0.0, 1)]))


def test_shaped_requests_come_after_the_plain_ones() -> None:
    requests = Workload(PROMPTS, 9, shaped=5, seed=4).requests(0.8)
    assert [prompt for prompt, _ in requests] == [*PROMPTS, *PROMPTS, *PROMPTS, PROMPTS[0]]
    assert {params for _, params in requests[:2]} == {SamplingParams(temperature=0.8, seed=4, max_tokens=9)}
    shaped = [params for _, params in requests[2:]]
    assert any(params.stop_strings for params in shaped)
    assert any(params.repetition_penalty != 1.0 for params in shaped)
    assert any(params.frequency_penalty for params in shaped)


def test_every_drafter_is_measured_by_default() -> None:
    configs = [SpeculationConfig.parse(text) for text in EVERY_METHOD.split(",")]
    assert {config.method for config in configs} == set(method_names()) - {"none"}


def test_bundled_prompts() -> None:
    prompts = read_prompts(find_prompts("editing"))
    assert len(prompts) == len(set(prompts)) == 20
    for prompt in prompts:
        code, _, request = prompt.partition("\n\n\n# ")
        change, _, copy = request.rpartition("# ")[2].partition("\n")
        assert change.startswith("The same")
        assert copy
        assert code.startswith(copy.split("(")[0].splitlines()[0][:8])
    assert str(find_prompts("other.jsonl")) == "other.jsonl"
