"""Metrics in the field's names, counts that add up, the dashboard's snapshot, and traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider import LLM
from outrider.serve.settings import Settings
from outrider.serve.trace import Tracer
from tests.serve.conftest import Running

NAMES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_success",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "spec_decode_acceptance_by_method", "request_speculation", "requests_refused",
)  # fmt: skip


def read(server: Running) -> dict[str, float]:
    """Every sample by its name and its labels beside the model's."""
    out = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return out


def test_names_and_sums(server: Running) -> None:
    before = read(server)
    tokens = 0
    for seed in range(3):
        answer = server.post("/v1/completions", prompt="def main(", max_tokens=24, temperature=0.5, seed=seed, n=2).json()
        tokens += answer["usage"]["completion_tokens"]
    server.post("/v1/completions", prompt="def main(", max_tokens=4, speculation=False)
    now = read(server)
    families = {name.removeprefix("outrider:").split("{")[0] for name in now}
    for name in NAMES:
        assert any(own == name or own.startswith(f"{name}_") for own in families), name

    def grown(name: str) -> float:
        return now[f"outrider:{name}"] - before.get(f"outrider:{name}", 0.0)

    assert grown("generation_tokens_total") == tokens + 4
    assert grown("prompt_tokens_total") == 4 * len(server.post("/tokenize", prompt="def main(").json()["tokens"])
    assert grown("request_success_total{finished_reason=length}") == 7
    assert grown("time_to_first_token_seconds_count") == 7
    assert grown("request_speculation_total{reason=the request turned it off,state=off}") == 1
    assert grown("request_speculation_total{reason=,state=on}") == 6
    accepted, drafted = grown("spec_decode_num_accepted_tokens_total"), grown("spec_decode_num_draft_tokens_total")
    assert 0 < accepted < drafted
    assert sum(grown(f"spec_decode_num_accepted_tokens_per_pos_total{{position={i}}}") for i in range(4)) == accepted
    assert grown("spec_decode_accepted_tokens_by_method_total{method=eagle}") == accepted
    assert grown("inter_token_latency_seconds_count") == tokens + 4 - 7, "all but the first of each"
    assert grown("inter_token_latency_seconds_bucket{le=+Inf}") == tokens + 4 - 7
    assert now["outrider:num_requests_running"] == now["outrider:kv_cache_usage_perc"] == 0


def test_a_drafter_s_faults_are_counted_by_kind(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"at {id(object())}")

    plain = server.post("/v1/completions", prompt="def main(", max_tokens=12, temperature=0, speculation=False).json()
    monkeypatch.setattr(llm.engine.drafter.drafter, "propose", broken)
    answer = server.post("/v1/completions", prompt="def main(", max_tokens=12, temperature=0).json()
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "RuntimeError" in answer["metrics"]["speculative_decoding"]["fallback_reason"]
    found = [name for name in read(server) if name.startswith("outrider:spec_decode_fallbacks_total")]
    assert found == ["outrider:spec_decode_fallbacks_total{reason=EagleDrafter.propose: RuntimeError}"]


def test_the_snapshot_for_the_dashboard(server: Running) -> None:
    server.post("/v1/completions", prompt="def main(", max_tokens=16, temperature=0)
    stats = server.http.get("/stats").json()
    assert set(stats) >= {
        "model", "uptime_s", "running", "waiting", "kv_usage", "prefix_hit_rate", "preemptions", "generated_tokens",
        "tokens_per_s",
        "tokens_per_round", "acceptance_by_position", "by_method", "off_reasons", "finished",
    }  # fmt: skip
    assert stats["generated_tokens"] > 0
    assert stats["by_method"]["eagle"]["accepted"] > 0
    assert 0 < stats["acceptance_by_position"][0] <= 1
    assert stats["finished"]["length"] > 0


def test_traces_say_what_a_request_did(llm: LLM, server_with: Callable[..., Running]) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    server_with(drain_s=0.5)  # stops the one before, which shares the engine
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    other = server_with(drain_s=0.4)
    other.app.state.tracer = Tracer(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"prompt": "def main(", "max_tokens": 9, "temperature": 0}
    other.http.post("/v1/completions", json=body, headers={"traceparent": parent})
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 9
    assert span.attributes["gen_ai.request.model"] == Settings().model_name
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" in parent
    assert "def main(" not in str(span.to_json()), "no prompts in traces"
    provider.shutdown()
