"""A load of conversations whose prompts grow, some of them left, and what came of every request."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.bench.workloads import find_prompts
from outrider.engine.acceptance import read_prompts
from outrider.quantiles import percentile_ms

__all__ = ["Answer", "ConversationPlan", "Outcome", "percentiles", "prefix_counts", "replicas_of", "run_conversations", "unequal"]

_RETRIES = 60  # of a request that got 503 with Retry-After, as a client makes them


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """The requests: conversations of several turns, as many at once as there are streams."""

    conversations: int
    turns: int
    cancel: float = 0.0  # share of requests that are left before their end
    streams: int = 8
    tokens: int = 24
    letters: int = 400  # that a turn adds to the prompt
    seed: int = 0

    @property
    def requests(self) -> int:
        return self.conversations * self.turns

    def bodies(self, conversation: int) -> list[dict[str, Any]]:
        """The requests of one conversation. Each prompt begins with the one before it."""
        draw = random.Random(self.seed * 1_000_003 + conversation)
        texts = read_prompts(find_prompts("code"))
        prompt, bodies = "", list[dict[str, Any]]()
        for _ in range(self.turns):
            prompt += draw.choice(texts)[: self.letters] + "\n\n\n"
            temperature, seed = draw.choice([0.0, 0.8]), draw.randrange(2**31)
            bodies.append({"prompt": prompt[:3500], "max_tokens": self.tokens, "temperature": temperature, "seed": seed})
        return bodies


@dataclass(slots=True)
class Answer:
    """One request: how it ended, and who gave the answer."""

    body: dict[str, Any]
    text: str = ""
    outcome: str = "failed"  # finished, cancelled, cut_off or failed
    replica: str = ""
    refusals: int = 0  # answers with 503 and Retry-After before this one
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """All answers."""

    answers: list[Answer] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(answer.outcome == outcome for answer in self.answers)

    def report(self, killed: str = "") -> dict[str, Any]:
        """How the requests ended. One that is cut off is lost only where its replica was not the one that was killed."""
        cut_off = [answer for answer in self.answers if answer.outcome == "cut_off"]
        return {
            "requests": len(self.answers),
            "finished": self.count("finished"),
            "cancelled": self.count("cancelled"),
            "cut_off_with_the_killed_replica": sum(answer.replica == killed for answer in cut_off),
            "answers_503_with_retry_after": sum(answer.refusals for answer in self.answers),
            "lost": self.count("failed") + sum(answer.replica != killed for answer in cut_off),
            "reasons": sorted({answer.reason for answer in self.answers if answer.outcome == "failed"}),
        }


async def run_conversations(
    url: str,
    plan: ConversationPlan,
    midway: Callable[[], None] | None = None,
    address: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Outcome:
    """Send every request, from an address of this machine, and call `midway` once half of them have ended."""
    outcome, waiting = Outcome(), list(range(plan.conversations))
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
    called = midway is None

    async def stream() -> None:
        nonlocal called
        while waiting:
            number = waiting.pop(0)
            draw = random.Random(plan.seed * 7919 + number)
            for body in plan.bodies(number):
                leave = draw.randrange(0, 8) if draw.random() < plan.cancel else None
                outcome.answers.append(await ask(client, body, leave))
                if not called and len(outcome.answers) >= plan.requests // 2:
                    called = True
                    assert midway is not None
                    await asyncio.to_thread(midway)

    async with httpx.AsyncClient(base_url=url, transport=transport, timeout=120, headers=headers, trust_env=False) as client:
        await asyncio.gather(*(stream() for _ in range(plan.streams)))
    return outcome


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> Answer:
    """One streamed request. Where it is answered with 503 and Retry-After, it is sent again, as clients do."""
    answer, begun = Answer(body), time.perf_counter()
    for _ in range(_RETRIES):
        try:
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                answer.replica = response.headers.get("x-outrider-replica", "")
                if response.status_code == 503 and "retry-after" in response.headers:
                    answer.refusals += 1
                elif response.status_code != 200:
                    answer.reason = f"HTTP {response.status_code}: {(await response.aread())[:120]!r}"
                    return answer
                else:
                    await _read(response, answer, leave_after)
                    answer.seconds = time.perf_counter() - begun
                    return answer
        except httpx.HTTPError as error:
            answer.reason = f"{type(error).__name__}: {error}"
            return answer
        await asyncio.sleep(min(float(response.headers["retry-after"]), 1.0))
    answer.reason = "only answers with 503"
    return answer


async def _read(response: httpx.Response, answer: Answer, leave_after: int | None) -> None:
    chunks = 0
    async for line in response.aiter_lines():
        if chunks == leave_after:
            answer.outcome = "cancelled"
            return
        if line == "data: [DONE]":
            answer.outcome = answer.outcome if answer.outcome == "cut_off" else "finished"
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                answer.outcome, answer.reason = "cut_off", event["error"]["code"]
            else:
                answer.text += "".join(choice["text"] for choice in event["choices"])
                chunks += 1


def unequal(outcome: Outcome) -> int:
    """Finished texts that differ from plain decoding alone."""
    from outrider.engine.llm import LLM
    from outrider.sampling import SamplingParams

    alone: dict[str, str] = {}
    llm = LLM(speculation="none", max_num_seqs=1)
    different = 0
    for answer in outcome.answers:
        if answer.outcome == "finished":
            key = json.dumps(answer.body)
            if key not in alone:
                body = dict(answer.body)
                alone[key] = llm.generate(body.pop("prompt"), SamplingParams(**body), use_tqdm=False)[0].outputs[0].text
            different += alone[key] != answer.text
    return different


def replicas_of(url: str) -> dict[str, dict[str, Any]]:
    """The replicas by name, as the front door sees them."""
    replicas: dict[str, dict[str, Any]] = httpx.get(f"{url}/replicas", timeout=30, trust_env=False).json().get("replicas", {})
    return replicas


def prefix_counts(url: str) -> tuple[float, float]:
    """Tokens that were looked up in prefix caches, and those that were there, of all replicas."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    sums = [
        sum(float(value) for value in re.findall(rf"^outrider:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE))
        for name in ("queries", "hits")
    ]
    return sums[0], sums[1]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds."""
    return {name: percentile_ms(seconds, share, 2) or 0.0 for name, share in (("p50", 0.5), ("p99", 0.99))}
