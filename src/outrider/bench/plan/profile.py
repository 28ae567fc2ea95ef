"""A drafter measured: what its guesses were worth and what each part of its rounds cost, as a prediction needs them."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from outrider.bench.plan.formulas import best_length, break_even, expected_time
from outrider.bench.plan.trace import Guess, Recorder, Round, Trace
from outrider.config import SpeculationConfig
from outrider.control.costs import Curve
from outrider.engine.llm import LLM
from outrider.engine.outputs import RequestOutput
from outrider.sampling import SamplingParams

__all__ = ["Memory", "Prices", "Profile", "Prompt", "Subject", "memory_of"]

_MANY = 64  # rows
_NEAR = 256  # recorded guesses that speak for a place in the text
_STALL = 5.0  # a time this many times the median counts as this many: a stall is not a cost
_COMPANIONS = {"draft_model": "draft", "eagle": "eagle", "medusa": "medusa"}
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
Prompt = str | Sequence[int]


class Prices:
    """Seconds of a round's parts: forwards by rows, proposals by length and the host by rows, each at batches seen."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, dict[int, list[float]]]] = {part: {} for part in ("propose", "forward", "host")}
        self._curves: dict[str, dict[int, Curve]] | None = None

    def learn(self, rounds: Iterable[Round]) -> None:
        """Add measured rounds; of those that read prompts, only forwards of many rows: they are no round's rows."""
        for own in rounds:
            if own.prefill:
                if own.rows > _MANY:
                    self.add("forward", own.batch, own.rows, own.forward_s)
            else:
                if own.asked:
                    self.add("propose", own.batch, own.asked, own.propose_s)
                self.add("forward", own.batch, own.rows, own.forward_s)
                self.add("host", own.batch, own.rows, own.host_s)

    def add(self, part: str, batch: int, size: int, seconds: float) -> None:
        batch = 1 if part == "forward" else batch  # rows are rows, whosever they are
        self._seen[part].setdefault(batch, {}).setdefault(size, []).append(seconds)
        self._curves = None

    def round_s(self, asked: int, nodes: int, batch: int = 1) -> float:
        """A round that asks for so many nodes and verifies so many, for each of `batch` sequences."""
        rows = batch * (1 + nodes)
        proposal = self.time("propose", batch, asked) if asked else 0.0
        return proposal + self.time("forward", batch, rows) + self.time("host", batch, rows)

    def time(self, part: str, batch: int, size: int) -> float:
        """Between batches that were seen it is interpolated; beyond, a proposal grows with the batch."""
        if self._curves is None:
            self._curves = {name: {b: _curve(sizes) for b, sizes in own.items()} for name, own in self._seen.items()}
        curves = self._curves[part]
        if not curves:
            return 0.0
        if part == "forward":
            return _at(curves[1], size)
        known = sorted(curves)
        low = max((b for b in known if b <= batch), default=known[0])
        high = min((b for b in known if b >= batch), default=known[-1])
        first, second = (
            _at(curves[own], size) if part == "propose" else _within(curves[own], size * own // batch) for own in (low, high)
        )
        if low == high:
            return first * (batch / low if batch > low else 1.0)
        return first + (second - first) * (batch - low) / (high - low)

    @classmethod
    def forwards(cls, several: Iterable[Prices]) -> Prices:
        """All that is known of the target's forward, whoever drafted."""
        prices = cls()
        for own in several:
            for size, times in own._seen["forward"].get(1, {}).items():
                for seconds in times:
                    prices.add("forward", 1, size, seconds)
        return prices

    def as_dict(self) -> dict[str, Any]:
        """{"forward": {batch: {rows: seconds}}, "propose": {batch: {length: seconds}}, "host": {batch: {rows: seconds}}}."""
        return {
            part: {str(b): {str(size): _mean(times) for size, times in sorted(own.items())} for b, own in sorted(seen.items())}
            for part, seen in self._seen.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prices:
        prices = cls()
        for part in prices._seen:
            for batch, sizes in data.get(part, {}).items():
                for size, seconds in sizes.items():
                    prices.add(part, int(batch), int(size), float(seconds))
        return prices


def _at(curve: Curve, size: int) -> float:
    return curve.time(size) or 0.0


def _within(curve: Curve, size: int) -> float:
    """At the nearest size that was seen, where it lies outside them all: nothing says that the host's time grows so."""
    return _at(curve, min(max(size, min(curve.means)), max(curve.means)))


def _curve(sizes: Mapping[int, Sequence[float]]) -> Curve:
    return Curve(
        {size: _mean(times) for size, times in sizes.items()}, {size: float(len(times)) for size, times in sizes.items()}
    )


def _mean(times: Sequence[float]) -> float:
    """The mean without the weight of stalls."""
    limit = _STALL * statistics.median(times)
    return statistics.fmean(min(time, limit) for time in times)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a drafter needs beside the target, in bytes."""

    weights: int
    kv_per_token: int


@dataclass
class Profile:
    """All that is known of a drafter, or of plain decoding (`most` = 0)."""

    method: str
    most: int
    traces: list[Trace] = field(default_factory=list)
    prices: Prices = field(default_factory=Prices)
    firsts: list[tuple[int, float]] = field(default_factory=list)  # tokens of a prompt, seconds to its first token
    entries: list[tuple[int, float]] = field(default_factory=list)  # likewise, what its first proposal takes beyond others
    memory: Memory = Memory(0, 0)

    @cached_property
    def guesses(self) -> list[Guess]:
        """Every recorded guess."""
        return [guess for trace in self.traces for guess in trace.guesses]

    def law(self, most: int) -> Mapping[tuple[int, int], float]:
        """How often so many nodes are verified and so many of them accepted, when `most` may be drafted."""
        if most not in self._laws:
            found = Counter(guess.best(most) for guess in self.guesses if guess.room >= most) if most else None
            self._laws[most] = found or Counter({(0, 0): 1})
        return self._laws[most]

    def law_at(self, place: int, most: int) -> Mapping[tuple[int, int], float]:
        """The same after so many tokens: lookups guess better the more they have read."""
        able = [guess for guess in self.guesses if guess.room >= most > 0]
        near = sorted(able, key=lambda guess: abs(guess.at - place))[:_NEAR]
        return Counter(guess.best(most) for guess in near) or Counter({(0, 0): 1})

    @cached_property
    def _laws(self) -> dict[int, Mapping[tuple[int, int], float]]:
        return {}

    @cached_property
    def _spans(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def tokens(self, length: int) -> float:
        """Expected tokens of a round that may draft `length` nodes."""
        law = self.law(length)
        return 1.0 + sum(accepted * weight for (_, accepted), weight in law.items()) / sum(law.values())

    def round_s(self, length: int, batch: int = 1) -> float:
        """Expected seconds of such a round."""
        law = self.law(length)
        total = sum(weight * self.prices.round_s(length, nodes, batch) for (nodes, _), weight in law.items())
        return total / sum(law.values())

    def request_s(self, prompt: int, tokens: int, length: int) -> tuple[float, float]:
        """Seconds until the first token and in all, for a request of so many tokens."""
        first = _line(self.firsts, prompt)
        spent, _ = self.decoding(tokens, length)
        return first, first + spent + (_line(self.entries, prompt) if length else 0.0)

    def decoding(self, tokens: int, length: int) -> tuple[float, float]:
        """Seconds and rounds after the first token, the first proposal's extra time left out."""
        if (tokens, length) not in self._spans:
            self._spans[tokens, length] = expected_time(
                tokens - 1,
                lambda room: self.law_at(tokens - 1 - room, min(length, room)),
                lambda room, nodes: self.prices.round_s(min(length, room), nodes),
            )
        return self._spans[tokens, length]

    def speedup(self, plain: Profile, length: int, batch: int = 1) -> float:
        """Against plain rounds, for rounds that draft alike."""
        return self.tokens(length) * plain.round_s(0, batch) / self.round_s(length, batch)

    def best_length(self, batch: int = 1) -> int:
        """The draft length at which tokens come quickest."""
        lengths = range(self.most + 1)
        return best_length([self.tokens(k) for k in lengths], [self.round_s(k, batch) for k in lengths])

    def break_even(self, plain: Profile, most: int = 1024) -> int:
        """The largest batch at which some draft length is quicker than none."""
        lengths = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k < self.most} | {self.most})
        return break_even(lambda batch: max(self.speedup(plain, k, batch) for k in lengths), most)

    def by_position(self, most: int = 8) -> list[float]:
        """The chance of each position, once all before it were right, where something was guessed there."""
        out = []
        for depth in range(most):
            reached = [guess for guess in self.guesses if len(guess.path) >= depth and _depth(guess) > depth]
            if not reached:
                break
            out.append(sum(len(guess.path) > depth for guess in reached) / len(reached))
        return out

    def ranks(self, most: int = 6) -> list[float]:
        """The chance that a node's first, second, ... child, by claim, is the one that came true."""
        seen, true = 0, [0] * most
        for guess in self.guesses:
            children: dict[int, list[int]] = defaultdict(list)
            for node, parent in enumerate(guess.parents):
                children[parent].append(node)
            for parent in (-1, *guess.path):
                if own := sorted(children.get(parent, ()), key=lambda i: (-guess.survival[i], i)):
                    seen += 1
                    hit = next((rank for rank, node in enumerate(own) if node in guess.path), most)
                    if hit < most:
                        true[hit] += 1
        return [count / seen for count in true] if seen else []


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of a line through the points that a few far ones do not move: medians of slopes and of what is left."""
    if not points:
        return 0.0
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[:n] if i != j]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope * x + statistics.median(y - slope * own for own, y in points)


def _depth(guess: Guess) -> int:
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


class Subject:
    """An engine with one drafter that is watched while it works."""

    def __init__(self, model: str | None, method: str | Mapping[str, Any], dtype: str = "auto", batch: int = 1) -> None:
        config = SpeculationConfig.parse(method)
        self.llm = LLM(model, speculation=config, dtype=dtype, max_num_seqs=batch, prefix_cache=False)
        name = method if isinstance(method, str) else config.method
        self.profile = Profile(name, config.draft_tokens if config.method != "none" else 0, memory=memory_of(self.llm))
        self._rule = config.rule
        self._recorder = self._watch(self.profile.most)

    def _watch(self, length: int) -> Recorder:
        self.llm.engine.policy = recorder = Recorder(length, self._rule)
        return recorder

    def run(self, prompt: Prompt, params: SamplingParams, learn: bool = True) -> RequestOutput:
        """Generate for one prompt; its rounds are learnt unless they are to be predicted."""
        result = self.llm.generate([prompt], params)[0]
        rounds = self._recorder.take()
        if learn:
            self._learn(rounds, len(result.prompt_token_ids), result.outputs[0].timings.first_token_s)
        return result

    def learn_costs(self, prompts: Sequence[Prompt], params: SamplingParams, length: int) -> None:
        """What rounds of this length cost for these prompts at once; acceptance is not learnt from it."""
        recorder = self._watch(min(length, self.profile.most))
        self.llm.generate(list(prompts), params)
        self.profile.prices.learn(own for own in recorder.take() if own.batch == len(prompts))
        self._recorder = self._watch(self.profile.most)

    def _learn(self, rounds: Sequence[Round], prompt: int, first_s: float) -> None:
        own = self.profile
        for name in ("guesses", "_laws", "_spans"):
            own.__dict__.pop(name, None)
        decoding = [r for r in rounds if not r.prefill]
        own.traces.append(Trace(own.method, prompt, own.most, [r.guesses[0] for r in decoding if r.guesses[0].room]))
        own.firsts.append((prompt, first_s))
        full = [r for r in decoding if r.asked == own.most]
        if len(full) > 2:  # the first proposal may have a prompt to read
            own.entries.append((prompt, full[0].propose_s - _mean([r.propose_s for r in full[1:]])))
            own.prices.add("forward", 1, full[0].rows, full[0].forward_s)
            own.prices.add("host", 1, full[0].rows, full[0].host_s)
        own.prices.learn(r for r in rounds if not full[2:] or r is not full[0])


def memory_of(llm: LLM) -> Memory:
    """Weights and KV of the drafter that came with an engine."""
    folders = {path for own in _parts(llm.speculation) if (path := _folder(own, llm.directory)) is not None}
    dtype = str(llm.speculation.options.get("dtype", llm.config.dtype))
    size = _BYTES.get(dtype, 2)
    return Memory(sum(_parameters(path) * size for path in folders), llm.engine.drafter.needs.kv_bytes_per_token)


def _parts(config: SpeculationConfig) -> Iterable[SpeculationConfig]:
    yield config
    for own in config.nested():
        yield from _parts(own)


def _folder(config: SpeculationConfig, target: Path) -> Path | None:
    if config.method not in _COMPANIONS:
        return None
    return Path(config.model) if config.model else target / _COMPANIONS[config.method]


def _parameters(folder: Path) -> int:
    """Weights in a folder's safetensors, scales left out."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys() if not name.endswith(".scale"))  # noqa: SIM118
    return count
