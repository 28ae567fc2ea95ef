"""The plan: for each drafter its best length and tree, break-even batch and memory; and what if acceptance were other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.plan.formulas import best_length, best_tree, break_even, closed_form_length, expected_tokens, survival_of
from outrider.bench.plan.prices import Prices
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Prompt, Subject, learn_from
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = ["CHANCES", "LENGTHS", "Row", "given_costs", "measure", "plan_chain", "plan_rows", "prices_of", "read_costs", "what_if"]

CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_BATCHES = (4, 16)


@dataclass(frozen=True, slots=True)
class Row:
    """What to expect of one drafter."""

    method: str
    tokens_per_round: float
    speedup: float  # at the length it was asked for
    best_length: int
    best_speedup: float
    break_even_batch: int
    by_position: list[float]
    tree: dict[str, Any] | None  # the best static tree from the ranks of what came true; None: it guesses chains
    weights_bytes: int
    kv_bytes_per_token: int
    curve: list[tuple[int, float]] = field(default_factory=list)  # speed-up by length

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    subjects: Sequence[Subject], prompts: Sequence[Prompt], params: SamplingParams, batches: bool, say: Callable[[str], None]
) -> None:
    """Fill every subject's profile: acceptance on all prompts, interleaved, then costs at shorter drafts and in batches."""
    learn_from(subjects, prompts, params, say)
    for length in (1, 2, 4, 8, 16):
        for subject in subjects:
            if length < subject.profile.most:
                say(f"costs at {length} drafted")
                subject.learn_costs(prompts[:1], params, length)
    for batch in _BATCHES if batches else ():
        for subject in subjects:
            say(f"costs at batch {batch}")
            several = [prompts[i % len(prompts)] for i in range(batch)]
            subject.learn_costs(several, params, subject.profile.most)


def plan_rows(plain: Profile, profiles: Sequence[Profile], most_batch: int = 1024) -> list[Row]:
    """A row for every drafter, the quickest first."""
    rows = []
    for own in profiles:
        best = own.best_length()
        curve = [(k, own.speedup(plain, k)) for k in LENGTHS if k <= own.most]
        rows.append(
            Row(
                own.method,
                own.tokens(own.most),
                own.speedup(plain, own.most),
                best,
                own.speedup(plain, best) if best else 1.0,
                own.break_even(plain, most_batch),
                own.by_position(),
                _tree(plain, own),
                own.memory.weights,
                own.memory.kv_per_token,
                curve,
            )
        )
    return sorted(rows, key=lambda row: -row.best_speedup)


def _tree(plain: Profile, own: Profile) -> dict[str, Any] | None:
    """The static tree whose expected tokens over time are most, each level costing as its nodes do."""
    ranks = own.ranks()
    if sum(rank > 0 for rank in ranks) < 2:
        return None
    sizes = [size for size in LENGTHS if size <= own.most]
    trees = {size: best_tree(ranks, size) for size in sizes}
    speed = {size: tokens * plain.prices.round_s(0, 0) / own.prices.round_s(size, size) for size, (tokens, _) in trees.items()}
    best = max(speed, key=lambda size: speed[size])
    tokens, parents = trees[best]
    return {"nodes": best, "parents": parents, "tokens": tokens, "speedup": speed[best], "ranks": [round(r, 4) for r in ranks]}


def plan_chain(prices: Prices, plain: Prices, chances: float | Sequence[float], most: int, batch: int = 1) -> dict[str, Any]:
    """The same for a chain whose acceptance is given: by length its expected tokens and speed-up, the best, and break-even."""
    survival = survival_of(chances, most)
    lengths = range(most + 1)
    tokens = [expected_tokens(survival, k) for k in lengths]

    def speedups(size: int) -> list[float]:
        base = plain.round_s(0, 0, size)
        return [tokens[k] * base / (prices.round_s(k, k, size) if k else base) for k in lengths]

    base = plain.round_s(0, 0, batch)
    times = [prices.round_s(k, k, batch) if k else base for k in lengths]
    best = best_length(tokens, times)
    found = speedups(batch)
    cost = (prices.time("propose", 1, most) / most) / base if most else 0.0
    return {
        "acceptance": chances if isinstance(chances, float) else list(chances),
        "batch": batch,
        "tokens": tokens,
        "speedup": found,
        "best_length": best,
        "best_speedup": found[best],
        "break_even_batch": break_even(lambda size: max(speedups(size)[1:], default=0.0)),
        "closed_form_length": closed_form_length(chances, cost) if isinstance(chances, float) and cost > 0 else None,
    }


def what_if(prices: Prices, plain: Prices, most: int, batch: int = 1) -> dict[float, list[tuple[int, float]]]:
    """Speed-up of a chain by acceptance and length, at these prices."""
    out = {}
    for chance in CHANCES:
        speedup = plan_chain(prices, plain, chance, most, batch)["speedup"]
        out[chance] = [(k, speedup[k]) for k in LENGTHS if k <= most]
    return out


def given_costs(draft: float, row: float, host: float, knee: int = 1) -> tuple[Prices, Prices]:
    """Prices in plain forwards: a draft token, a row beyond the first `knee`, the host; for a drafter and for none."""
    plain, own = Prices(), Prices()
    for prices in (plain, own):
        for rows in (1, knee, knee + 1024):
            prices.add("forward", 1, rows, 1.0 + row * max(rows - knee, 0))
    for batch in (1, 4096):  # shared by all sequences
        for prices in (plain, own):
            prices.add("host", batch, batch, host)
        for length in (1, 64):
            own.add("propose", batch, length, draft * length)
    return own, plain


def prices_of(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Measured prices by method, for a file."""
    return {"methods": {own.profile.method: own.profile.prices.as_dict() for own in subjects}}


def read_costs(path: Path) -> dict[str, Prices]:
    """Prices by method, from `--save-costs`, or from the file in which the controller keeps what it measured."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "methods" in data:
            return {name: Prices.from_dict(own) for name, own in data["methods"].items()}
        shared = {"forward": {"1": data["forward"]}}
        return {"none": Prices.from_dict(shared)} | {
            name: Prices.from_dict(shared | {"propose": own}) for name, own in data["propose"].items()
        }
    except OSError as error:
        raise InvalidParameter("--costs", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParameter("--costs", f"{path} is no table of costs ({type(error).__name__}: {error})") from None
