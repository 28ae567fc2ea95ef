"""Tags: how requests carry them, and what is counted for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serve.tags import MAX_TAGS, OTHER, TagCounts, is_tag, tag_of_metadata
from tests.support.server import Running

Starter = Callable[..., Running]


def output(rounds: int, tokens: int, drafted: int, accepted: int) -> Any:
    return SimpleNamespace(speculation={"rounds": rounds, "drafted": drafted, "accepted": accepted}, token_ids=[0] * tokens)


def test_at_most_32_tags_are_told_apart_and_those_of_rules_first() -> None:
    counts = TagCounts()
    counts.reserve(["rule"])
    for i in range(100):
        counts.add(f"tag{i}", output(1, 2, 4, 1))
    counts.add("rule", output(2, 8, 6, 6))
    tallies = dict(counts.items())
    assert len(tallies) == MAX_TAGS + 1
    assert (tallies["rule"].tokens_per_round, tallies["rule"].acceptance) == (4.0, 1.0)
    assert tallies[OTHER].rounds == 100 - (MAX_TAGS - 1)
    assert sum(tally.tokens for tally in tallies.values()) == 208
    assert counts.as_dict()["tag0"] == {"rounds": 1, "tokens": 2, "acceptance": 0.25, "tokens_per_round": 2.0}


TAGS: list[tuple[Any, bool]] = [
    ("A.b-c_9", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("a b", False), ('a"', False), ("a\n", False),
    ("é", False), (7, False), (None, False),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "good"), TAGS)
def test_letters_of_a_tag_are_safe(server: Running, tag: Any, good: bool) -> None:
    assert is_tag(tag) == good
    assert tag_of_metadata({"tag": tag}) == ({"tag": tag} if good else {})
    if tag is not None:
        answer = server.post("/v1/completions", prompt="x", max_tokens=1, tag=tag)
        assert (answer.status_code, answer.json().get("error", {}).get("param")) == ((200, None) if good else (400, "tag"))
        assert server.post("/v1/completions", prompt="x", max_tokens=1, metadata={"tag": tag}).status_code == 200


def test_a_wrong_header_is_refused(server: Running) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Outrider-Tag": "a b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Outrider-Tag")


def test_acceptance_and_tokens_per_round_by_tag(server_with: Starter) -> None:
    server = server_with(max_queue=77)  # a new one, with no counts
    body: dict[str, Any] = {"prompt": "def read_config(path):\n    ", "max_tokens": 20, "temperature": 0}
    first = server.post("/v1/completions", **body, tag="code").json()["metrics"]["speculative_decoding"]
    server.post("/v1/completions", **body, tag="code")
    server.post("/v1/completions", **body, tag="off", speculation=False, n=2)
    server.post("/v1/completions", **body)
    text, line = server.http.get("/metrics").text, r'^outrider:(\w+_by_tag(?:_total)?\{model_name="pyrite",tag="\w+"\}) (\S+)$'
    values = dict(re.findall(line, text, re.MULTILINE))
    code = {name.partition("{")[0]: float(value) for name, value in values.items() if 'tag="code"' in name}
    assert code["generation_tokens_by_tag_total"] == 40
    assert code["num_rounds_by_tag_total"] == 2 * first["rounds"]
    assert code["spec_decode_draft_tokens_by_tag_total"] == 2 * first["num_draft_tokens"]
    assert code["spec_decode_accepted_tokens_by_tag_total"] == 2 * first["num_accepted_draft_tokens"] > 0
    assert code["spec_decode_acceptance_by_tag"] == pytest.approx(first["draft_acceptance_rate"], abs=1e-4)
    assert code["tokens_per_round_by_tag"] == pytest.approx(20 / first["rounds"])
    off = {name.partition("{")[0]: float(value) for name, value in values.items() if 'tag="off"' in name}
    assert (off["generation_tokens_by_tag_total"], off["tokens_per_round_by_tag"]) == (40, 1.0)
    assert len(values) == 12, "the request without a tag is not counted by tag"
    assert server.http.get("/stats").json()["by_tag"]["off"]["rounds"] == 40
