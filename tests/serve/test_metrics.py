"""Metrics with vLLM's names, counts that add up, the dashboard's snapshot, and traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outrider import LLM
from outrider._version import __version__
from outrider.engine.tally import Tally
from outrider.serve.metrics import Metrics, Snapshot, bucket_quantile
from outrider.serve.settings import ServerSettings
from outrider.serve.trace import Tracer
from tests.support.server import Running

NAMES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_success",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "spec_decode_acceptance_by_method", "request_speculation", "requests_refused",
)  # fmt: skip


def read(server: Running) -> dict[str, float]:
    """Every sample by its name and its labels, without the model's label."""
    out = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return out


def test_metrics_have_vllm_s_names_and_add_up(server: Running) -> None:
    before = read(server)
    tokens = 0
    for seed in range(3):
        answer = server.post("/v1/completions", prompt="def main(", max_tokens=24, temperature=0.5, seed=seed, n=2).json()
        tokens += answer["usage"]["completion_tokens"]
    server.post("/v1/completions", prompt="def main(", max_tokens=4, speculation=False)
    now = read(server)
    families = {name.removeprefix("outrider:").split("{")[0] for name in now}
    for name in NAMES:
        assert any(family == name or family.startswith(f"{name}_") for family in families), name

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
    totals = [now[f"outrider:spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft")]
    assert now["outrider:spec_decode_acceptance_rate"] == totals[0] / totals[1]
    assert grown("inter_token_latency_seconds_count") == tokens + 4 - 7, "all but the first of each"
    assert grown("inter_token_latency_seconds_bucket{le=+Inf}") == tokens + 4 - 7
    assert now["outrider:num_requests_running"] == now["outrider:kv_cache_usage_perc"] == 0


def test_metrics_of_speculation_have_vllm_s_prefix_too(server: Running) -> None:
    server.post("/v1/completions", prompt="def main(", max_tokens=24)
    now = read(server)
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "acceptance_rate")
    for name in (*names, "num_accepted_tokens_per_pos_total{position=0}"):
        assert now[f"vllm:spec_decode_{name}"] == now[f"outrider:spec_decode_{name}"]
    assert all(name.startswith("vllm:spec_decode_") for name in now if name.startswith("vllm:"))
    ours_alone = generate_latest(Metrics("pyrite", vllm_names=False).registry).decode()
    assert "outrider:spec_decode_num_drafts" in ours_alone
    assert "vllm:" not in ours_alone


def test_answers_are_counted_by_route_and_status(server: Running) -> None:
    def count(route: str, status: int) -> float:
        return read(server).get(f"outrider:http_requests_total{{route={route},status={status}}}", 0.0)

    requests = [
        ("/v1/completions", 200),
        ("/v1/completions", 400),
        ("/v1/models/{name:path}", 404),
        ("other", 404),
        ("/version", 403),
    ]
    before = [count(*one) for one in requests]
    server.post("/v1/completions", prompt="x", max_tokens=1)
    server.post("/v1/completions", prompt="x", max_tokens=-1)
    server.http.get("/v1/models/nobody/knows/this")
    server.http.get("/no/such/path")
    server.http.get("/version", headers={"Origin": "http://evil.example"})
    assert [count(*one) for one in requests] == [value + 1 for value in before]


def test_the_phases_of_a_request_and_the_process_are_measured(server: Running) -> None:
    before = read(server)
    server.post("/v1/completions", prompt="def main(", max_tokens=8, n=2, seed=1)
    now = read(server)
    for phase, count in (("preparation", 1), ("prefill", 2), ("decode", 2)):
        name = f"outrider:request_{phase}_time_seconds"
        assert now[f"{name}_count"] - before.get(f"{name}_count", 0) == count, phase
        assert now[f"{name}_sum"] >= before.get(f"{name}_sum", 0)
    assert now["process_resident_memory_bytes"] > 0
    assert now["process_open_fds"] > 0
    assert any(name.startswith("outrider:build_info{") and f"version={__version__}" in name for name in now)


def test_a_drafter_s_faults_are_counted_by_kind(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"at {id(object())}")

    plain = server.post("/v1/completions", prompt="def main(", max_tokens=12, temperature=0, speculation=False).json()
    monkeypatch.setattr(llm.engine.drafter.drafter, "propose", broken)
    answer = server.post("/v1/completions", prompt="def main(", max_tokens=12, temperature=0).json()
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "RuntimeError" in answer["metrics"]["speculative_decoding"]["fallback_reason"]
    fallbacks = [name for name in read(server) if name.startswith("outrider:spec_decode_fallbacks_total")]
    assert fallbacks == ["outrider:spec_decode_fallbacks_total{reason=EagleDrafter.propose: RuntimeError}"]


def test_experts_per_round_are_measured() -> None:
    metrics = Metrics("mixture")
    assert b"experts_per_round" not in generate_latest(metrics.registry)
    metrics.snapshot = Snapshot(tally=Tally(expert_rounds=4, experts=50.0))
    text = generate_latest(metrics.registry).decode()
    assert 'outrider:experts_per_round_count{model_name="mixture"} 4.0' in text
    assert 'outrider:experts_per_round_sum{model_name="mixture"} 50.0' in text


def test_bytes_over_the_bus_are_measured() -> None:
    metrics = Metrics("streamed")
    assert b"bus_bytes_per_round" not in generate_latest(metrics.registry)
    metrics.snapshot = Snapshot(tally=Tally(streamed_rounds=4, bus_bytes=4 * 10**9))
    text = generate_latest(metrics.registry).decode()
    assert 'outrider:bus_bytes_per_round_count{model_name="streamed"} 4.0' in text
    assert 'outrider:bus_bytes_per_round_sum{model_name="streamed"} 4e+09' in text


def test_stats_has_the_dashboard_s_fields(server: Running) -> None:
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


def test_spans_describe_a_request(llm: LLM, server_with: Callable[..., Running]) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    server_with(drain_timeout=0.5)  # stops the previous server, which shares the engine
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    other = server_with(drain_timeout=0.4)
    other.app.state.tracer = Tracer(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"prompt": "def main(", "max_tokens": 9, "temperature": 0}
    other.http.post("/v1/completions", json=body, headers={"traceparent": parent, "X-Request-Id": "mine-1"})
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 9
    assert span.attributes["http.request.header.x-request-id"] == ("mine-1",)
    assert span.attributes["gen_ai.request.model"] == ServerSettings().model_name
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" in parent
    assert "def main(" not in str(span.to_json()), "no prompts in traces"
    provider.shutdown()


def test_stats_has_latencies(server_with: Callable[..., Running]) -> None:
    server = server_with(served_model_name=("timed",))  # a server without finished requests
    assert server.http.get("/stats").json()["latency"]["requests"] == 0
    firsts, totals = [], []
    for seed in range(5):
        timings = server.post("/v1/completions", prompt="def main(", max_tokens=8 + seed, seed=seed).json()["metrics"]["timings"]
        firsts.append(timings["first_token_ms"])
        totals.append(timings["total_ms"])
    latency = server.http.get("/stats").json()["latency"]
    assert latency["requests"] == 5
    assert latency["first_token_ms"] == pytest.approx({"p50": sorted(firsts)[2], "p95": sorted(firsts)[4]}, abs=0.01)
    assert latency["total_ms"] == pytest.approx({"p50": sorted(totals)[2], "p95": sorted(totals)[4]}, abs=0.01)
    assert 0 <= latency["queue_ms"]["p50"] <= latency["queue_ms"]["p95"] <= latency["first_token_ms"]["p95"]
    assert 0 < latency["inter_token_ms"]["p50"] <= latency["inter_token_ms"]["p95"] <= max(totals)


def test_bucket_quantile_interpolates() -> None:
    assert bucket_quantile((1.0, 2.0, 4.0), [0, 0, 0, 0], 0.5) is None
    assert bucket_quantile((1.0, 2.0, 4.0), [0, 10, 0, 0], 0.5) == 1.5
    assert bucket_quantile((1.0, 2.0, 4.0), [5, 0, 5, 0], 0.95) == 3.8
    assert bucket_quantile((1.0, 2.0, 4.0), [0, 0, 0, 3], 0.5) == 4.0  # values beyond the last bound count as the bound


def test_stats_states_whether_the_model_is_bundled(server: Running) -> None:
    assert server.http.get("/stats").json()["bundled"] is True
