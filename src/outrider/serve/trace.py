"""Optional OpenTelemetry traces: one span per request, with the names of the GenAI conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.serve.requests import PreparedRequest
    from outrider.serve.service import RequestHandle

__all__ = ["Tracer", "open_tracer"]


class Tracer:
    """Writes a span for each finished request."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        self._tracer = provider.get_tracer("outrider", __version__)
        self._extract = extract
        self._kind = SpanKind.SERVER
        self._provider = provider

    def finished(
        self, headers: Mapping[str, str], model: str, name: str, prepared: PreparedRequest, handle: RequestHandle
    ) -> None:
        """Write a span from the start of the request to now, as a child of the client's span if its headers name one."""
        outputs = list(handle.outputs.values())
        params = prepared.jobs[0][0][0].params
        stats = [output.speculation for output in outputs]
        attributes = {
            "gen_ai.operation.name": "text_completion" if name.startswith("cmpl") else "chat",
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
            "gen_ai.response.id": name,
            "http.request.header.x-request-id": [headers["x-request-id"]],
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.finish_reasons": [output.finish_reason or "abort" for output in outputs],
            "gen_ai.usage.input_tokens": sum(len(requests[0].prompt_ids) for requests, _ in prepared.jobs),
            "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
            "gen_ai.latency.time_to_first_token": min(output.timings.first_token_s for output in outputs),
            "gen_ai.latency.time_in_queue": max(output.timings.queued_s for output in outputs),
            "gen_ai.spec_decode.num_draft_tokens": sum(row["drafted"] for row in stats),
            "gen_ai.spec_decode.num_accepted_tokens": sum(row["accepted"] for row in stats),
            "gen_ai.spec_decode.method": stats[0]["method"],
        }
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {model}",
            context=self._extract(dict(headers)),
            kind=self._kind,
            start_time=int(handle.started_s * 1e9),
            attributes=attributes,
        )
        span.end()

    def close(self) -> None:
        self._provider.shutdown()


def open_tracer(endpoint: str) -> Tracer:
    """A tracer that sends spans to a collector by OTLP over HTTP."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InvalidParameter("--otlp-traces-endpoint", "needs OpenTelemetry: pip install 'outrider[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "outrider", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)
