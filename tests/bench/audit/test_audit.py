"""An audit of a real server: sound as it is, and with faults that a proxy on the loopback plants."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.bench.audit.audit import AuditPlan, audit
from outrider.bench.audit.card import write_card
from outrider.bench.audit.cases import KINDS, AuditSize
from outrider.bench.audit.http_side import HttpSide
from outrider.bench.audit.verdict import DIFFERENT, SAME
from outrider.bench.client import Endpoint
from outrider.bench.environment import environment
from outrider.bench.workloads import load_prompts
from outrider.model.bundled import bundled_model
from outrider.serve.settings import ServerSettings
from outrider.text import Tokenizer
from tests.support.proxy import Body, Memory, proxy, unchanged
from tests.support.server import Running

pytestmark = pytest.mark.slow
PROMPTS = [prompt for name in ("editing", "code") for prompt in load_prompts(name).categories[name] if isinstance(prompt, str)]
TEXTS = AuditSize(prompts=3, few=1, tokens=96, concurrent=36, at_once=12, samples=0)
SAMPLES = AuditSize(prompts=1, few=1, tokens=8, concurrent=0, samples=100, at_once=16)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    llm = LLM(speculation="suffix:8:adaptive=false", max_num_seqs=16)
    running = Running(ServerSettings(), lambda: llm).wait()
    yield running
    running.close()
    llm.close()


@pytest.fixture(scope="module")
def memory() -> Memory:
    """Answers of the server, whose texts do not change: what one audit has seen the next one need not wait for."""
    return {}


def audited(
    server: Running, memory: Memory, size: AuditSize, request: Any = unchanged, answer: Any = unchanged
) -> dict[str, Any]:
    """The server without speculation against the server with it, the latter behind a proxy with these faults."""
    with proxy(server.url, memory) as sound, proxy(server.url, memory, request, answer) as faulty:
        plain = HttpSide("plain", Endpoint(sound.url, body={"speculation": False}))
        return audit(plain, HttpSide("speculative", Endpoint(faulty.url)), AuditPlan(PROMPTS, size))


@pytest.fixture(scope="module")
def sound(server: Running, memory: Memory) -> dict[str, Any]:
    return audited(server, memory, TEXTS)


def test_a_sound_engine_has_the_same_tokens(sound: dict[str, Any]) -> None:
    assert sound["verdict"] == SAME, sound["reasons"]
    assert set(sound["kinds"]) == set(KINDS)
    for name, row in sound["kinds"].items():
        assert row["equal"] == row["compared"] == row["ids_compared"] > 0, name
        assert row["divergences"] == []
    assert sound["tokens_compared"] > 3400
    assert sound["fault_rate_seen_with_95_percent"] < 1 / 1100
    assert sound["kinds"]["json"]["valid_speculative"] == sound["kinds"]["json"]["ended"] == 1
    assert sound["kinds"]["logprobs"]["largest_logprob_gap"] == 0.0
    assert 0 < sound["acceptance"]["rate"] < 1
    assert sound["acceptance"]["mean_length"] > 1
    assert sound["cut_short"] is None


def test_one_wrong_token_in_a_thousand_is_detected(server: Running, memory: Memory, sound: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    assert tokenizer is not None
    changed = []

    def change(answer: Body, request: Body) -> Body:
        for choice in answer["choices"]:
            ids = tokenizer.encode(choice["text"])
            for place in range(len(ids)):
                draw = zlib.crc32(json.dumps([request, place], sort_keys=True).encode())
                if draw % 1000 == 0:
                    ids[place] = 100 + draw // 1000 % 8000
                    changed.append(ids[place])
            choice["text"] = tokenizer.decode(ids)
        return answer

    result = audited(server, memory, TEXTS, answer=change)
    assert 1 <= len(changed) <= 20
    assert result["verdict"] == DIFFERENT
    assert any("less likely by up to" in reason for reason in result["reasons"])
    parted = [row for kind in result["kinds"].values() for row in kind.get("divergences", ())]
    assert 1 <= len(parted) <= len(changed)
    assert max(row["margin_nats"] or 0.0 for row in parted) > 1.0
    assert sound["verdict"] == SAME


def test_samples_pass_and_another_temperature_is_detected(server: Running, memory: Memory) -> None:
    result = audited(server, memory, SAMPLES)
    assert result["verdict"] == SAME, result["reasons"]
    assert 390 <= result["sampling"]["samples"] <= 400  # a text that ends at once is no sample
    assert abs(result["sampling"]["temperature_speculative"]["value"] - 1) < 0.2

    def warmer(request: Body) -> Body:
        return request | {"temperature": request["temperature"] * 1.5}

    result = audited(server, memory, SAMPLES, request=warmer)
    assert result["verdict"] == DIFFERENT
    assert any("sampled first tokens do not follow the model's distribution" in reason for reason in result["reasons"])
    assert result["sampling"]["temperature_speculative"]["value"] == pytest.approx(1.5, abs=0.4)
    assert result["sampling"]["first_tokens_plain"]["p_value"] > 1e-4


def test_faults_of_features(server: Running, memory: Memory) -> None:
    """A schema, a stop string, penalties and samples that are dropped with speculation only."""
    size = AuditSize(prompts=8, few=4, tokens=96, concurrent=0, samples=0)
    penalties = {"repetition_penalty", "repeat_penalty", "frequency_penalty", "presence_penalty"}
    dropped = {"response_format", "stop", "n", *penalties}

    def drop(request: Body) -> Body:
        return {name: value for name, value in request.items() if name not in dropped}

    result = audited(server, memory, size, request=drop)
    assert result["verdict"] == DIFFERENT
    named = {reason.partition(":")[0] for reason in result["reasons"]}
    assert {"json", "stop", "n", "penalties", "repetition"} <= named


def test_what_an_engine_does_not_take_is_no_failure(server: Running, memory: Memory) -> None:
    """Log probabilities are refused, schemas break the server, `n` is ignored, and fields beyond OpenAI's are refused."""

    def limited(request: Body) -> Body:
        unknown = request.get("logprobs") is not None or "top_k" in request
        return {"refused": True} if unknown else {name: value for name, value in request.items() if name != "n"}

    size = AuditSize(prompts=1, few=1, tokens=8, concurrent=0, samples=5)
    with proxy(server.url, memory, limited) as both:
        sides = [HttpSide(name, Endpoint(both.url, body=body)) for name, body in (("p", {"speculation": False}), ("s", {}))]
        result = audit(sides[0], sides[1], AuditPlan(PROMPTS, size))
    assert result["verdict"] == SAME, result["reasons"]
    assert "HTTP 400" in next(iter(result["kinds"]["logprobs"]["not_supported"]))
    assert result["kinds"]["n"]["not_supported"] == {"answered with 1 of 3 choices": 1}
    assert result["kinds"]["greedy"]["compared"] == 1
    assert "first_tokens_plain" not in result["sampling"]  # no log probabilities, no reference
    assert 15 <= result["sampling"]["samples"] <= 20


def test_chats(server: Running) -> None:
    size = AuditSize(prompts=1, few=1, tokens=8, concurrent=2, samples=5)
    sides = [
        HttpSide(name, Endpoint(server.url, chat=True, body=body)) for name, body in (("p", {"speculation": False}), ("s", {}))
    ]
    result = audit(sides[0], sides[1], AuditPlan(PROMPTS, size))
    assert result["verdict"] == SAME, result["reasons"]
    assert result["kinds"]["logprobs"]["logprobs_compared"] == 4
    assert "first_tokens_plain" in result["sampling"]


def test_an_audit_ends_at_its_limits(server: Running, memory: Memory) -> None:
    plan = AuditPlan(PROMPTS, replace(TEXTS, samples=5), requests=90)
    with proxy(server.url, memory) as both:
        sides = [HttpSide(name, Endpoint(both.url, body=body)) for name, body in (("p", {"speculation": False}), ("s", {}))]
        result = audit(sides[0], sides[1], plan)
    assert result["requests"] == 90
    assert result["cut_short"] == "90 requests were sent"
    assert result["kinds"]["greedy"]["compared"] > 0
    assert "n" not in result["kinds"]


def test_a_card_in_three_formats(sound: dict[str, Any], tmp_path: Path) -> None:
    card = {"name": "<Engine> | one", "sides": {"plain": "a", "speculative": "b"}, "about": environment()} | sound
    as_json, as_markdown, as_html = (path.read_text() for path in write_card(card, tmp_path / "deep"))
    assert json.loads(as_json) == json.loads(json.dumps(card))
    assert "**same tokens**" in as_markdown
    assert all(f"| {kind} |" in as_markdown for kind in KINDS)
    assert "<svg" in as_html
    assert "&lt;Engine&gt;" in as_html
    assert "<Engine>" not in as_html
    assert "http" not in as_html.replace("http://www.w3.org", "")  # it needs no other file
