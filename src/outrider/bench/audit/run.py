"""Send the cases to both sides, in turn and at once, within limits of time and requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.bench.audit.cases import Case
from outrider.bench.audit.compare import Margin, equal, margin_at
from outrider.bench.audit.records import Answer, AuditRequest, Side

__all__ = ["Budget", "Outcome", "Runner", "Spent", "Waves"]

_LOOKED_AT = 16  # requests of a kind whose texts differ that are sent again
_ALTERNATIVES = 5


class Spent(Exception):
    """The budget is used up: what was measured so far counts."""


@dataclass(slots=True)
class Budget:
    """Limits of the whole audit."""

    seconds: float
    requests: int
    sent: int = 0
    begun: float = field(default_factory=time.monotonic)

    def take(self) -> None:
        """Count a request, or raise Spent."""
        if self.cut is not None:
            raise Spent
        self.sent += 1

    @property
    def cut(self) -> str | None:
        """Why nothing more is sent."""
        if self.sent >= self.requests:
            return f"{self.requests} requests were sent"
        return f"{self.seconds:g} seconds had passed" if time.monotonic() - self.begun > self.seconds else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers to one case. `again` is the plain side's to the same request, where the texts differ, and `margins` are
    those of its choices that differ and can be judged."""

    case: Case
    plain: Answer
    speculative: Answer
    again: Answer | None = None
    margins: tuple[Margin | None, ...] = ()

    @property
    def differs(self) -> bool:
        pairs = zip(self.plain.choices, self.speculative.choices, strict=False)
        return len(self.plain.choices) != len(self.speculative.choices) or not all(equal(a, b) for a, b in pairs)


@dataclass(slots=True)
class Waves:
    """Tokens and seconds of requests that were sent at once, by side."""

    plain_tokens: int = 0
    plain_s: float = 0.0
    speculative_tokens: int = 0
    speculative_s: float = 0.0


class Runner:
    """Sends requests to two sides."""

    def __init__(self, plain: Side, speculative: Side, budget: Budget, at_once: int, advance: Callable[[], None]) -> None:
        self.plain = plain
        self.speculative = speculative
        self.waves = Waves()
        self._budget = budget
        self._at_once = at_once if plain.parallel and speculative.parallel else 1
        self._advance = advance
        self._looked_at: Counter[str] = Counter()

    @property
    def parallel(self) -> bool:
        return self._at_once > 1

    async def send(self, side: Side, request: AuditRequest) -> Answer:
        """One request, within the budget. One that fails is sent once more: a lost connection says nothing of the engine."""
        for _ in range(2):
            self._budget.take()
            answer = await side.answer(request)
            self._advance()
            if answer.failed is None:
                break
        return answer

    async def warm_up(self, prompts: Sequence[str]) -> None:
        """Every prompt once, so that no side finds it in the prefix cache first."""
        for prompt in dict.fromkeys(prompts):
            for side in (self.plain, self.speculative):
                await self.send(side, AuditRequest(prompt, 1))

    async def alone(self, case: Case, plain_first: bool) -> Outcome:
        """A case on both sides, one after the other."""
        order = (self.plain, self.speculative) if plain_first else (self.speculative, self.plain)
        answers = {side.name: await self.send(side, case.request) for side in order}
        return await self._look_again(Outcome(case, answers[self.plain.name], answers[self.speculative.name]))

    async def at_once(self, cases: Sequence[Case], plain_first: bool) -> list[Outcome]:
        """Cases on one side, then on the other, as many at once as the audit allows."""
        requests = [case.request for case in cases]
        answers: dict[str, list[Answer]] = {}
        for is_plain in (plain_first, not plain_first):
            side, begun = self.plain if is_plain else self.speculative, time.perf_counter()
            answers[side.name] = await self.flood(side, requests)
            self._count(is_plain, sum(answer.tokens for answer in answers[side.name]), time.perf_counter() - begun)
        pairs = zip(cases, answers[self.plain.name], answers[self.speculative.name], strict=True)
        return [await self._look_again(Outcome(*pair)) for pair in pairs]

    async def flood(self, side: Side, requests: Sequence[AuditRequest]) -> list[Answer]:
        """Requests at once; the answers in their order."""
        slots = asyncio.Semaphore(self._at_once)

        async def one(request: AuditRequest) -> Answer:
            async with slots:
                return await self.send(side, request)

        results = await asyncio.gather(*map(one, requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Answer)]

    def _count(self, is_plain: bool, tokens: int, seconds: float) -> None:
        if is_plain:
            self.waves.plain_tokens, self.waves.plain_s = self.waves.plain_tokens + tokens, self.waves.plain_s + seconds
        else:
            self.waves.speculative_tokens += tokens
            self.waves.speculative_s += seconds

    async def _look_again(self, outcome: Outcome) -> Outcome:
        """Where texts differ: whether the plain side repeats its text, and the margin of its choice."""
        case, comparable = outcome.case, outcome.plain.good and outcome.speculative.good
        if not comparable or not outcome.differs or self._looked_at[case.kind] >= _LOOKED_AT:
            return outcome
        self._looked_at[case.kind] += 1
        request = replace(case.request, logprobs=_ALTERNATIVES) if case.greedy else case.request
        again = await self.send(self.plain, request)
        if not again.good and case.greedy:
            again = await self.send(self.plain, case.request)
        if not again.good:
            return outcome
        triples = zip(again.choices, outcome.plain.choices, outcome.speculative.choices, strict=False)
        margins = tuple(margin_at(a, p, s) if case.greedy else None for a, p, s in triples if not equal(p, s))
        return replace(outcome, again=again, margins=margins)
