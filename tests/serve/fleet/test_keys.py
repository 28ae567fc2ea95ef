"""What the router knows of a request: turns of a conversation share a prefix, and tenants share nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.fleet.keys import Routed, routed

LONG = "word " * 200


def of(body: Any, path: str = "/v1/chat/completions", headers: dict[bytes, bytes] | None = None) -> Routed:
    return routed(path, headers or {}, body if isinstance(body, bytes) else json.dumps(body).encode())


def shared(one: Routed, other: Routed) -> int:
    return sum(a == b for a, b in zip(one.keys.prefix, other.keys.prefix, strict=False))


@pytest.mark.parametrize("pad", [0, 100_000], ids=["small", "large"])
def test_a_later_turn_shares_the_prefix_of_the_earlier_one(pad: int) -> None:
    first = [{"role": "system", "content": LONG + "x" * pad}, {"role": "user", "content": LONG}]
    later = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    one, other = of({"model": "m", "messages": first, "seed": 1}), of({"model": "m", "messages": later, "seed": 2})
    assert shared(one, other) >= len(one.keys.prefix) - 1 >= 5
    assert shared(one, of({"model": "m", "messages": [{"role": "user", "content": "other" + LONG}]})) == 0


def test_prompts_are_texts_or_ids_and_models_and_salts_are_apart() -> None:
    text, ids = of({"prompt": LONG}), of({"prompt": list(range(300))})
    assert len(text.keys.prefix) == 3
    assert len(ids.keys.prefix) == 4
    assert shared(of({"prompt": [LONG, "b"]}), text) == 3
    assert shared(of({"prompt": [list(range(300))]}), ids) == 4
    assert shared(text, of({"prompt": LONG, "cache_salt": "s"})) == 0
    assert shared(text, of({"prompt": LONG, "model": "adapter"})) == 0


def test_tenants_are_keys_and_salts() -> None:
    assert of({"prompt": "p"}).keys.tenant is None
    tenants = {
        of({"prompt": "p"} | body, headers=headers).keys.tenant
        for body in ({}, {"cache_salt": "s"})
        for headers in ({b"authorization": b"Bearer a"}, {b"x-api-key": b"b"})
    }
    assert len(tenants) == 4
    assert not any("Bearer" in str(tenant) for tenant in tenants), "a key is never kept"


def test_a_stored_answer_is_a_conversation() -> None:
    assert of(b"", "/v1/responses/resp_1").keys.conversation == "resp_1"
    assert of({"input": "p", "previous_response_id": "resp_1"}, "/v1/responses").keys.conversation == "resp_1"
    assert of({"prompt": "p"}, headers={b"x-session-id": b"s"}).keys.conversation == "s"
    assert of({"prompt": "p", "prompt_cache_key": "k"}).keys.conversation == "k"


@pytest.mark.parametrize(
    ("body", "sequences"),
    [({}, 1), ({"n": 3}, 3), ({"prompt": ["a", "b"], "n": 2}, 4), ({"n": True}, 1), ({"n": -1}, 1), ({"n": 10**9}, 128)],
)
def test_sequences_are_samples_of_prompts(body: dict[str, Any], sequences: int) -> None:
    assert of(body).sequences == sequences


NAMES = st.sampled_from(["prompt", "messages", "n", "model", "cache_salt", "input", "tools", "previous_response_id"])
VALUES = st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(NAMES, x), max_leaves=8)


@given(st.binary(max_size=300) | VALUES)
def test_any_body_has_keys(body: Any) -> None:
    assert of(body).sequences >= 1
