"""`outrider bench never-slower`: plain decoding and `auto`, interleaved, where drafting pays and where it cannot."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.control import FixedLength
from outrider.draft.none import NoDrafter
from outrider.engine.acceptance import read_prompts
from outrider.engine.guard import GuardedDrafter
from outrider.engine.llm import LLM
from outrider.engine.outputs import RequestOutput
from outrider.sampling import SamplingParams

__all__ = [
    "SWEEP",
    "Best",
    "Case",
    "Ratio",
    "against_best",
    "as_rows",
    "cases",
    "engine",
    "measure",
    "never_slower",
    "show_ratios",
]

_WORKLOADS = Path(__file__).with_name("workloads")
_FLOOR = 0.98
_SWEEP_PAIRS = 4
_IDS = 4096  # of tokens nobody can guess
_CASCADE = "cascade:{}:levels=suffix+draft_model"
SWEEP = (
    *(f"{method}:{length}" for method in ("suffix", "draft_model", "eagle") for length in (4, 8, 16)),
    *(_CASCADE.format(length) for length in (6, 10, 14)),
    "eagle:12:beam=3:branch=4:depth=6",
    "mixture:16:members=suffix+eagle",
)
Prompts = Sequence[str | Sequence[int]]
Generate = Callable[[Prompts, Sequence[SamplingParams]], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of text at one batch size."""

    workload: str  # code, random
    temperature: float
    batch: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput of `auto` over plain decoding: the median of paired runs and a bootstrap interval of it."""

    workload: str
    temperature: float
    batch: int
    ratio: float
    low: float
    high: float
    plain_tok_s: float
    tokens_per_round: float

    @property
    def lost(self) -> bool:
        """Whether it is slower beyond doubt."""
        return self.high < _FLOOR


def cases(batches: Sequence[int], quick: bool) -> list[Case]:
    """Code, tokens nobody can guess, and a temperature at which nobody should."""
    kinds = [("code", 0.0), ("random", 1.0)] if quick else [("code", 0.0), ("random", 1.0), ("code", 1.5)]
    return [Case(name, temperature, batch) for name, temperature in kinds for batch in batches]


def engine(model: str | None, most: int) -> LLM:
    """`auto`, its costs measured."""
    found = LLM(model, speculation="auto", max_num_seqs=most, prefix_cache=False)
    found.measure_costs()
    return found


def never_slower(auto: LLM, wanted: Sequence[Case], tokens: int, pairs: int, seed: int = 0) -> Iterator[Ratio]:
    """A ratio for each case, as it is measured.

    Plain decoding is the same engine with nobody drafting and nothing to decide: two engines of one kind differ by
    several per cent, depending on where in memory their weights happen to lie.
    """
    for case in wanted:
        yield measure(_plainly(auto), auto.generate, case, tokens, pairs, seed)


def _plainly(llm: LLM) -> Generate:
    """Its requests decoded with speculation `none`."""
    engine, nobody = llm.engine, (FixedLength(0), GuardedDrafter(NoDrafter(), llm.config.vocab))

    def generate(prompts: Prompts, params: Sequence[SamplingParams]) -> list[RequestOutput]:
        drafting = engine.policy, engine.drafter
        engine.policy, engine.drafter = nobody
        try:
            return llm.generate(prompts, params)
        finally:
            engine.policy, engine.drafter = drafting

    return generate


@dataclass(frozen=True, slots=True)
class Best:
    """`auto` against the best fixed setting of a sweep, the two measured again in turns."""

    method: str
    ratio: float  # auto over it
    low: float
    high: float
    swept: dict[str, float]  # tokens per second of every setting


def against_best(auto: LLM, tokens: int, pairs: int, settings: Sequence[str] = SWEEP, seed: int = 0) -> Best:
    """On code at batch 1: which fixed setting is quickest, and how `auto` compares with it."""
    case, swept, found = Case("code", 0.0, 1), {}, {}
    for setting in settings:
        own = found[setting] = LLM(auto.directory, speculation=setting, prefix_cache=False).generate
        swept[setting] = measure(own, own, case, tokens, _SWEEP_PAIRS, seed).plain_tok_s
    best = max(swept, key=lambda setting: swept[setting])
    row = measure(found[best], auto.generate, case, tokens, pairs, seed)
    return Best(best, row.ratio, row.low, row.high, swept)


def measure(plain: Generate, fast: Generate, case: Case, tokens: int, pairs: int, seed: int = 0) -> Ratio:
    """Paired runs of the same requests, each twice and in mirrored order so that a drift cancels, after a pair to warm up."""
    rounds: list[float] = []
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs + 1):
        prompts = _prompts(case, pair)
        params = [
            SamplingParams(temperature=case.temperature, seed=seed + pair * case.batch + i, max_tokens=tokens, ignore_eos=True)
            for i in range(case.batch)
        ]
        spent = {False: 0.0, True: 0.0}
        for drafting in (False, True, True, False) if pair % 2 else (True, False, False, True):
            begun = time.perf_counter()
            results = (fast if drafting else plain)(prompts, params)
            spent[drafting] += time.perf_counter() - begun
            if pair and drafting:
                rounds += [result.outputs[0].speculation["tokens_per_round"] for result in results]
        if pair:
            emitted = 2 * sum(len(result.outputs[0].token_ids) for result in results)
            for drafting, seconds in spent.items():
                speeds[drafting].append(emitted / seconds)
    ratios = [a / b for a, b in zip(speeds[True], speeds[False], strict=True)]
    low, high = _interval(ratios)
    middle = statistics.median(ratios)
    return Ratio(**asdict(case), ratio=middle, low=low, high=high, plain_tok_s=statistics.median(speeds[False]),
                 tokens_per_round=statistics.mean(rounds))  # fmt: skip


def show_ratios(rows: Sequence[Ratio], console: Console) -> None:
    table = Table("workload", "T", "batch", "plain tok/s", "auto ÷ plain", "95 %", "tokens/round")
    for row in rows:
        interval = f"{row.low:.2f} to {row.high:.2f}"
        style = "red" if row.lost else "green" if row.low > 1 else ""
        ratio = f"[{style}]{row.ratio:.2f}[/]" if style else f"{row.ratio:.2f}"
        table.add_row(
            row.workload, f"{row.temperature:g}", str(row.batch), f"{row.plain_tok_s:.0f}", ratio, interval,
            f"{row.tokens_per_round:.2f}",
        )  # fmt: skip
    console.print(table)


def as_rows(rows: Sequence[Ratio]) -> list[dict[str, Any]]:
    return [{name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(row).items()} for row in rows]


def _prompts(case: Case, pair: int) -> Prompts:
    if case.workload == "random":
        rng = random.Random(f"{pair} {case.batch}")
        return [[rng.randrange(_IDS) for _ in range(64)] for _ in range(case.batch)]
    code = read_prompts(_WORKLOADS / "code.jsonl")
    return [code[(pair * case.batch + i) % len(code)] for i in range(case.batch)]


def _interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Where the median of such runs lies, 95 times of 100."""
    rng = random.Random(0)
    medians: Callable[[], float] = lambda: statistics.median(rng.choices(ratios, k=len(ratios)))  # noqa: E731
    found = sorted(medians() for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]
