"""The numbers of a benchmark row, computed from measurements without an engine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.profiler import ProfiledRound, decode_rounds
from outrider.bench.validity import meets
from outrider.engine.acceptance import acceptance_totals, accepted_by_position, loops
from outrider.engine.outputs import CompletionOutput
from outrider.quantiles import quantile

__all__ = ["MEANING", "Group", "MethodResult", "combined", "cost_points", "summary"]

_DRAWS = 2000
MEANING = {
    "tok/s": "Output tokens over wall time, reading the prompts included; of every group of requests that run together the "
    "median of its repeats counts. Quartiles are of whole repeats.",
    "speed-up": "Tokens per second over those of plain decoding of the same requests, which took turns with it in one process. "
    "The 95 % interval is a bootstrap over groups of requests: how far it would move with other requests like these.",
    "no loops": "The same without outputs in which some 8-gram occurs more than three times. Small models loop when greedy, and "
    "loops are easy to guess.",
    "tokens / round": "Tokens a round emits, the round that reads the prompt left out.",
    "acceptance rate": "Accepted over drafted tokens; every node of a tree is a drafted token.",
    "acceptance length": "Mean over rounds that drafted: the accepted tokens and the bonus token.",
    "conversion": "Speed-up over tokens / round: the part of the drafter's merit that the engine turns into time.",
    "draft, verify, choose, host": "Per round in which nobody reads a prompt: proposing and the drafter's commit; the "
    "target's forward; the target's choices and the walk; everything else (scheduling, planning, commit, text).",
    "TTFT, ITL, TPOT": "Time to the first token; between rounds that bring a request tokens, as a reader sees them arrive; per "
    "output token after the first. Medians.",
    "efficiency": "Time of all the round's draft and target forwards alone over the round's wall time. On a processor the same "
    "forwards run once more on the same inputs with nothing between them, and that extra time is left out of the round's; on a "
    "GPU it is the time between events before and after each. The median round of a separate pass over the first two groups. "
    "It is the engine's merit; tokens per round are the drafter's.",
    "valid": "Where a schema constrains the outputs: of those that came to their end, the share that is JSON of this schema.",
    "equal": "Share of outputs whose token ids are those of plain decoding, one request at a time; every repeat is compared.",
}


@dataclass(slots=True)
class Group:
    """Requests that run together: as many as the batch holds."""

    seconds: list[float] = field(default_factory=list)  # of each repeat
    outputs: list[CompletionOutput] = field(default_factory=list)  # of the last repeat
    compared: int = 0  # outputs of all repeats, and of the pass that times forwards alone
    equal: int = 0  # of them, with the token ids of plain decoding

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def looping(self) -> int:
        return sum(loops(output.token_ids) for output in self.outputs)


@dataclass(slots=True)
class MethodResult:
    """The measurements of one method on the prompts of one category."""

    groups: list[Group] = field(default_factory=list)
    rounds: list[ProfiledRound] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token
    alone: list[ProfiledRound] = field(default_factory=list)  # of the pass whose forwards ran again alone
    skipped: int = 0  # prompts that do not fit the context
    schema: dict[str, Any] | None = None  # that the outputs had to meet
    failed: str | None = None


def combined(results: Sequence[MethodResult]) -> MethodResult:
    """The results of several categories, joined."""
    whole = MethodResult(
        skipped=sum(result.skipped for result in results),
        failed=next((result.failed for result in results if result.failed), None),
        schema=results[0].schema,
    )
    for result in results:
        for name in ("groups", "rounds", "gaps", "first", "alone"):
            getattr(whole, name).extend(getattr(result, name))
    return whole


def summary(result: MethodResult, plain: MethodResult) -> dict[str, Any]:
    """Speed, acceptance, phases and equality of a method beside plain decoding of the same requests."""
    outputs = [output for group in result.groups for output in group.outputs]
    if result.failed is not None or plain.failed is not None:
        return {"failed": result.failed or f"plain decoding failed: {plain.failed}", "skipped": result.skipped}
    rounds, alone = decode_rounds(result.rounds), decode_rounds(result.alone)
    steady = [i for i, group in enumerate(result.groups) if not group.looping]
    wall = sum(one.wall for one in rounds)
    per_round = {name: _ms(sum(getattr(one, name) for one in rounds) / len(rounds)) for name in _PHASES} if rounds else {}
    speedup, tokens_per_round = _ratio(result.groups, plain.groups), _per_round(outputs)
    speeds = [output.timings.decode_tokens_per_s for output in outputs if output.timings.decode_tokens_per_s]
    steady_outputs = [output for output in outputs if not loops(output.token_ids)]
    return {
        "requests": len(outputs),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "skipped": result.skipped,
        "tok_s": _speed(result.groups),
        "tok_s_quartiles": _quartiles(result.groups),
        "speedup": speedup,
        "speedup_interval": _interval(result.groups, plain.groups),
        "speedup_steady": _ratio([result.groups[i] for i in steady], [plain.groups[i] for i in steady]) if steady else None,
        "tokens_per_round": tokens_per_round,
        "tokens_per_round_steady": _per_round(steady_outputs),
        "looping": 1 - len(steady_outputs) / len(outputs),
        "accepted_by_position": accepted_by_position(outputs),
        **acceptance_totals(outputs),
        "conversion": speedup / tokens_per_round if tokens_per_round else None,
        "tok_s_per_user": statistics.fmean(speeds) if speeds else None,
        **_validity(result.schema, outputs),
        "ms_per_round": per_round,
        "share_of_round": {name: sum(getattr(one, name) for one in rounds) / wall for name in _PHASES if name != "wall"}
        if rounds
        else {},
        "ttft_ms": _spread(result.first),
        "itl_ms": _spread(result.gaps),
        "tpot_ms": _spread(1 / speed for speed in speeds),
        "efficiency": statistics.median(one.alone / one.wall for one in alone) if alone else None,
        "compared": sum(group.compared for group in result.groups),
        "equal": sum(group.equal for group in result.groups) / max(sum(group.compared for group in result.groups), 1),
        "fallbacks": sum(output.speculation["fallback_reason"] is not None for output in outputs),
        "failed": None,
    }


_PHASES = ("wall", "draft", "verify", "choose", "host")


def _validity(schema: dict[str, Any] | None, outputs: Sequence[CompletionOutput]) -> dict[str, float | None]:
    """The share of outputs that came to their end, and of those the share that is JSON of this schema."""
    if schema is None:
        return {}
    ended = [output.text for output in outputs if output.finish_reason == "stop"]
    valid = statistics.fmean(meets(text, schema) for text in ended) if ended else None
    return {"complete": len(ended) / len(outputs), "valid": valid}


def cost_points(result: MethodResult) -> dict[str, list[list[float]]]:
    """Median milliseconds of the target's forward by rows, and of a proposal by nodes, where seen five times or more."""
    rounds = decode_rounds(result.rounds)
    return {
        "verify": _medians((one.rows, one.verify) for one in rounds),
        "propose": _medians((one.nodes, one.propose) for one in rounds if one.nodes),
    }


def _speed(groups: Sequence[Group]) -> float:
    """Tokens over seconds, the seconds of each group the median of its repeats."""
    return sum(group.tokens for group in groups) / sum(statistics.median(group.seconds) for group in groups)


def _ratio(groups: Sequence[Group], plain: Sequence[Group]) -> float:
    return _speed(groups) / _speed(plain)


def _quartiles(groups: Sequence[Group]) -> list[float]:
    """Of the speeds of whole repeats."""
    tokens, repeats = sum(group.tokens for group in groups), min(len(group.seconds) for group in groups)
    speeds = [tokens / sum(group.seconds[i] for group in groups) for i in range(repeats)]
    return [quantile(speeds, 0.25), quantile(speeds, 0.75)]


def _interval(groups: Sequence[Group], plain: Sequence[Group]) -> list[float]:
    """The 95 % interval of the speed-up: a bootstrap over groups of requests."""
    rng, places = random.Random(0), range(len(groups))
    method = [(group.tokens, statistics.median(group.seconds)) for group in groups]
    reference = [(group.tokens, statistics.median(group.seconds)) for group in plain]

    def drawn() -> float:
        picked = rng.choices(places, k=len(places))
        speeds = [sum(side[i][0] for i in picked) / sum(side[i][1] for i in picked) for side in (method, reference)]
        return speeds[0] / speeds[1]

    ratios = sorted(drawn() for _ in range(_DRAWS))
    return [quantile(ratios, 0.025), quantile(ratios, 0.975)]


def _per_round(outputs: Sequence[CompletionOutput]) -> float | None:
    """Tokens per round, without the round that reads the prompt: nothing can be drafted in it."""
    rounds = sum(output.speculation["rounds"] - 1 for output in outputs)
    return sum(len(output.token_ids) - 1 for output in outputs) / rounds if rounds else None


def _spread(seconds: Iterable[float]) -> dict[str, float] | None:
    values = list(seconds)
    return {"median": _ms(statistics.median(values)), "p99": _ms(quantile(values, 0.99))} if values else None


def _medians(pairs: Iterable[tuple[int, float]]) -> list[list[float]]:
    times: dict[int, list[float]] = {}
    for size, one in pairs:
        times.setdefault(size, []).append(one)
    return [[size, _ms(statistics.median(seconds))] for size, seconds in sorted(times.items()) if len(seconds) >= 5]


def _ms(seconds: float) -> float:
    return seconds * 1e3
