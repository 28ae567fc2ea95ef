"""Schemathesis over the server's OpenAPI document: no request gives a 500 or an answer outside the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.examples import examples
from tests.support.server import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("POST", "/v1/responses"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/responses/{name}"), ("DELETE", "/v1/responses/{name}"), ("POST", "/forget"), ("POST", "/remember"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/livez"), ("GET", "/readyz"),
    ("GET", "/version"), ("GET", "/metrics"), ("GET", "/stats"),
]  # fmt: skip


@pytest.fixture
def document(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_document_has_every_operation(document: Any) -> None:
    operations = {(result.ok().method.upper(), result.ok().path) for result in document.get_all_operations()}
    assert operations == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_500_and_no_answer_outside_the_schema(server: Running, document: Any, method: str, path: str) -> None:
    operation = document[path][method]
    statuses: set[int] = set()

    @settings(
        examples(120 if method == "POST" else 10),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @operation_cases(operation)
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and method == "POST":
            shorten(case.body)
        response = case.call(base_url=server.url, timeout=60)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run()
    assert statuses - {400}, "something got through"


def shorten(body: dict[str, Any]) -> None:
    """Replace valid output limits by small ones, because running to the end of the context takes long."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    for name in names:
        if type(body.get(name)) is int and 4 < body[name] < 2048:
            body[name] = 4
    if all(body.get(name) is None for name in names):
        for field, name in (("messages", "max_completion_tokens"), ("input", "max_output_tokens")):
            if field in body:
                body[name] = 4


def operation_cases(operation: Any) -> Callable[..., Any]:
    from hypothesis import given

    from schemathesis import GenerationMode  # isort: skip

    both = operation.as_strategy(generation_mode=GenerationMode.POSITIVE) | operation.as_strategy(
        generation_mode=GenerationMode.NEGATIVE
    )
    return given(case=both)
