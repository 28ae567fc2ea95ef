"""The load of a fleet: requests with their times, made from rates and lengths, or read from a trace in JSONL."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter

__all__ = ["ANSWER_TOKEN", "FleetRequest", "LoadShape", "read_load"]

ANSWER_TOKEN = 1  # what every simulated answer consists of
MAX_REQUESTS = 5_000_000
_FIRST_PROMPT_TOKEN = 8
_TOKENS = 2**31  # different prompt tokens
_BLOCK = 512  # tokens that an entry of `hash_ids` stands for
_LONGEST = 2**20  # tokens of a prompt or an answer


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request of the load."""

    at: float  # seconds from the beginning
    prompt: tuple[int, ...]
    output: int  # tokens
    text: int = 0  # which of the recorded texts its answer drafts like
    tenant: str | None = None
    conversation: str | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A made-up load. Conversations begin at random times; each has `turns` requests on average."""

    rate: float  # requests per second
    seconds: float
    prompt: int = 128  # tokens a turn adds to its conversation, on average
    output: int = 64
    spread: float = 0.5  # of the lengths: standard deviation of their logarithm
    burstiness: float = 1.0  # shape of the gamma distribution between beginnings: 1 is Poisson, less comes in bursts
    shared: int = 0  # tokens with which every prompt of a tenant begins
    tenants: int = 1
    turns: float = 1.0
    pause: float = 10.0  # seconds from one turn to the next, on average
    swing: float = 0.0  # the rate rises and falls by this share
    period: float = 86_400.0  # within so many seconds: a day
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {"--arrival": self.rate, "--seconds": self.seconds, "--burstiness": self.burstiness}
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise InvalidParameter(name, f"must be a positive number, got {value:g}")
        if self.rate * self.seconds > MAX_REQUESTS:
            raise InvalidParameter(
                "--arrival",
                f"{self.rate:g} requests a second for {self.seconds:g} s are {self.rate * self.seconds:.3g} requests; "
                f"at most {MAX_REQUESTS:,} are simulated: lower --arrival or --seconds",
            )
        if self.turns < 1 or not 0 <= self.swing < 1:
            raise InvalidParameter("--turns", "is at least 1") if self.turns < 1 else InvalidParameter("--swing", "is 0 to 1")

    def requests(self) -> Iterator[FleetRequest]:
        """The requests in order of time. The same seed gives the same ones."""
        draw, pending = random.Random(self.seed), list[tuple[float, int, _Talk]]()
        for number, begin in enumerate(self._beginnings(draw)):
            while pending and pending[0][0] <= begin:
                yield from self._turn(pending, draw)
            heapq.heappush(pending, (begin, number, _Talk(f"c{number}", number % self.tenants, draw.randrange(2**30))))
            while pending and pending[0][0] <= begin:
                yield from self._turn(pending, draw)
        while pending:
            yield from self._turn(pending, draw)

    def _beginnings(self, draw: random.Random) -> Iterator[float]:
        """Times at which conversations begin, thinned by the time of day."""
        now, top = 0.0, self.rate / self.turns * (1.0 + self.swing)
        while True:
            now += draw.gammavariate(self.burstiness, 1.0 / (self.burstiness * top))
            if now >= self.seconds:
                return
            level = 1.0 - self.swing * math.cos(2.0 * math.pi * now / self.period)
            if not self.swing or draw.random() * (1.0 + self.swing) < level:
                yield now

    def _turn(self, pending: list[tuple[float, int, _Talk]], draw: random.Random) -> Iterator[FleetRequest]:
        at, number, talk = heapq.heappop(pending)
        if at >= self.seconds:
            return
        if not talk.tokens and self.shared:
            talk.tokens = _tokens(talk.tenant * 7_919 * _BLOCK + 5, self.shared)
        talk.turns += 1
        prompt = talk.tokens + _tokens(talk.seed + talk.turns * 65_536, self._length(self.prompt, draw))
        output = self._length(self.output, draw)
        conversation = talk.name if self.turns > 1 else None
        yield FleetRequest(at, prompt, output, talk.seed, f"t{talk.tenant}" if self.tenants > 1 else None, conversation)
        if draw.random() < 1.0 - 1.0 / self.turns:
            talk.tokens = prompt + (ANSWER_TOKEN,) * output
            heapq.heappush(pending, (at + draw.expovariate(1.0 / self.pause), number, talk))

    def _length(self, mean: int, draw: random.Random) -> int:
        if not self.spread:
            return mean
        return max(1, min(round(mean * draw.lognormvariate(-(self.spread**2) / 2, self.spread)), 8 * mean))


@dataclass(slots=True)
class _Talk:
    """One conversation."""

    name: str
    tenant: int
    seed: int
    tokens: tuple[int, ...] = ()
    turns: int = 0


def read_load(path: Path) -> list[FleetRequest]:
    """A trace: one request per line, with the fields of Mooncake's published traces.

    `timestamp` (milliseconds), `input_length` and `output_length` (tokens); optional `hash_ids` (equal ids stand for equal
    blocks of 512 prompt tokens), `conversation` (its prompt begins with the last prompt and answer), `tenant`, `temperature`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("--trace", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    requests: list[FleetRequest] = []
    talks: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_read_request(json.loads(line), number, talks))
            except (ValueError, KeyError, TypeError) as error:
                reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
                raise InvalidParameter(
                    "--trace",
                    f"{path}:{number} is no request ({reason}); a line is "
                    '{"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS}',
                ) from None
    if not requests:
        raise InvalidParameter("--trace", f"{path} holds no requests")
    if len(requests) > MAX_REQUESTS:
        raise InvalidParameter("--trace", f"{path} holds {len(requests):,} requests; at most {MAX_REQUESTS:,} are simulated")
    requests.sort(key=lambda request: request.at)
    first = requests[0].at
    return [_moved(request, first) for request in requests]


def _moved(request: FleetRequest, first: float) -> FleetRequest:
    fields = {name: getattr(request, name) for name in FleetRequest.__slots__}
    return FleetRequest(**fields | {"at": request.at - first})


def _read_request(data: Mapping[str, Any], number: int, talks: dict[str, tuple[int, ...]]) -> FleetRequest:
    if not isinstance(data, dict):
        raise TypeError("it is no object")
    at, prompt, output = (_number(data, name) for name in ("timestamp", "input_length", "output_length"))
    if at < 0 or not 1 <= prompt <= _LONGEST or not 1 <= output <= _LONGEST:
        raise ValueError(f"timestamp {at:g}, lengths {prompt:g} and {output:g}")
    conversation, tenant = data.get("conversation"), data.get("tenant")
    blocks = [] if conversation is None else [talks.get(str(conversation), ())]
    blocks += [_tokens(7 * _BLOCK * int(block), _BLOCK) for block in data.get("hash_ids", ())]
    tokens = tuple(token for block in blocks for token in block)[: int(prompt)]
    tokens += _tokens(number * 65_536 + 3, int(prompt) - len(tokens))
    if conversation is not None:
        talks[str(conversation)] = tokens + (ANSWER_TOKEN,) * int(output)
    tenant, conversation = (None if name is None else str(name) for name in (tenant, conversation))
    return FleetRequest(at / 1e3, tokens, int(output), number, tenant, conversation, float(data.get("temperature", 0.0)))


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{name} is {value!r:.40}")
    return value


def _tokens(first: int, count: int) -> tuple[int, ...]:
    """So many tokens that begin with one of its own: prompts that share no beginning share no pages."""
    first = _FIRST_PROMPT_TOKEN + first % (_TOKENS - _LONGEST)
    return tuple(range(first, first + count))
