"""`outrider bench never-slower`: plain decoding and drafting under the controller, interleaved, where it pays and where not."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.interleaved import Contestant, run_in_turns
from outrider.engine.acceptance import read_prompts
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams

__all__ = [
    "SWEEP",
    "BestSetting",
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
_SWEPT = 8  # texts
_IDS = 4096  # of tokens nobody can guess
_CASCADE = "cascade:{}:levels=suffix+draft_model"
SWEEP = (
    *(f"{method}:{length}" for method in ("suffix", "draft_model", "eagle") for length in (4, 8, 16)),
    *(_CASCADE.format(length) for length in (6, 10, 14)),
    "eagle:12:beam=3:branch=4:depth=6",
    "mixture:16:members=suffix+eagle",
)
Prompts = Sequence[str | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of text at one batch size, drafted for by one method."""

    workload: str  # code, random
    temperature: float
    batch: int
    method: str = "auto"  # or a drafter by name; "useless": a draft model whose weights are random
    prompt: int = 0  # tokens; 0: as long as the workload's are
    tokens: int = 0  # of the answer; 0: as many as the command says


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput of a method over plain decoding, first tokens included: the median of pairs and a bootstrap interval."""

    workload: str
    temperature: float
    batch: int
    ratio: float
    low: float
    high: float
    plain_tok_s: float
    tokens_per_round: float
    method: str = "auto"
    prompt: int = 0
    tokens: int = 0

    @property
    def lost(self) -> bool:
        """Whether it is slower beyond doubt."""
        return self.high < _FLOOR


def cases(batches: Sequence[int], quick: bool) -> list[Case]:
    """Code, tokens nobody can guess, several temperatures; drafters by name, one of them useless; and short answers."""
    texts = [("code", 0.0), ("random", 1.0)]
    if not quick:
        texts += [("code", 0.7), ("code", 1.2), ("code", 1.5)]
    wanted = [Case(name, temperature, batch) for name, temperature in texts for batch in batches]
    named = [("useless", (1, 8))] if quick else [(method, (1, 4, 8, 16)) for method in ("draft_model", "eagle", "useless")]
    wanted += [Case("code", 0.0, batch, method) for method, sizes in named for batch in sizes]
    answers = [(64, 16)] if quick else product((64, 2000), (4, 16, 32))
    methods = ("auto",) if quick else ("auto", "useless")
    wanted += [Case("code", 0.0, 1, method, *one) for one in answers for method in methods]
    return wanted


def engine(model: str | None, max_num_seqs: int) -> LLM:
    """`auto`, its costs measured."""
    llm = LLM(model, speculation="auto", max_num_seqs=max_num_seqs, prefix_cache=False, share=False)
    llm.measure_costs()
    return llm


def never_slower(auto: LLM, wanted: Sequence[Case], tokens: int, pairs: int, seed: int = 0) -> Iterator[Ratio]:
    """A ratio for each case, as it is measured."""
    plain = auto.beside("none")
    with tempfile.TemporaryDirectory() as folder:
        methods = {"auto": auto}
        for case in wanted:
            if case.method not in methods:
                name = _useless_model(Path(folder), auto) if case.method == "useless" else case.method
                methods[case.method] = auto.beside(name)
            yield measure(plain, methods[case.method], case, case.tokens or tokens, pairs, seed)


def _useless_model(folder: Path, llm: LLM) -> str:
    """A draft model whose weights are random, shaped as the one beside the target, named as a method."""
    shutil.copytree(llm.directory / "draft", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    return f"draft_model:model={folder}:load_format=dummy"


@dataclass(frozen=True, slots=True)
class BestSetting:
    """`auto` against the best fixed setting of a sweep, the two measured again in turns."""

    method: str
    ratio: float  # auto over it
    low: float
    high: float
    swept: dict[str, float]  # every setting over plain decoding


def against_best(auto: LLM, tokens: int, pairs: int, settings: Sequence[str] = SWEEP, seed: int = 0) -> BestSetting:
    """On code at batch 1: which fixed setting is quickest, and how `auto` compares with it."""
    case, plain = Case("code", 0.0, 1), auto.beside("none")
    fixed = {setting: auto.beside(f"{setting}:adaptive=false") for setting in settings}
    runs = [_in_turns((plain, *fixed.values()), *_requests(case, tokens, text, seed)) for text in range(_SWEPT + 1)][1:]
    ratios = zip(*([slow.seconds / run.seconds for run in others] for slow, *others in runs), strict=True)
    swept = dict(zip(fixed, map(statistics.median, ratios), strict=True))
    best = max(swept, key=lambda setting: swept[setting])
    row = measure(fixed[best], auto, case, tokens, pairs, seed)
    return BestSetting(best, row.ratio, row.low, row.high, swept)


def measure(plain: LLM, fast: LLM, case: Case, tokens: int, pairs: int, seed: int = 0) -> Ratio:
    """Paired runs of the same requests, after a pair to warm up."""
    ratios: list[float] = []
    speeds: list[float] = []
    rounds: list[float] = []
    for pair in range(pairs + 1):
        prompts, params = _requests(case, tokens, pair, seed)
        slow, quick = _in_turns((plain, fast), _cut(plain, prompts, min(case.prompt, plain.max_model_len - tokens)), params)
        if pair:
            ratios.append(slow.seconds / quick.seconds)
            speeds.append(slow.emitted / slow.seconds)
            rounds.append(quick.emitted / quick.rounds)
    low, high = _interval(ratios)
    return Ratio(**asdict(case), ratio=statistics.median(ratios), low=low, high=high, plain_tok_s=statistics.median(speeds),
                 tokens_per_round=statistics.mean(rounds))  # fmt: skip


def _in_turns(llms: Sequence[LLM], prompts: Prompts, params: Sequence[SamplingParams]) -> list[Contestant]:
    """All run the same requests in turns of a round."""
    runners = [_contestant(llm, prompts, params) for llm in llms]
    run_in_turns(runners)
    return runners


def _contestant(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> Contestant:
    prepared = [llm.intake.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    return Contestant(llm.engine, [(requests[0], method) for requests, method in prepared], llm.device.is_gpu)


def show_ratios(rows: Sequence[Ratio], console: Console) -> None:
    table = Table("workload", "T", "method", "prompt", "answer", "batch", "plain tok/s", "÷ plain", "95 %", "tokens/round")
    for row in rows:
        interval = f"{row.low:.2f} to {row.high:.2f}"
        style = "red" if row.lost else "green" if row.low > 1 else ""
        ratio = f"[{style}]{row.ratio:.2f}[/]" if style else f"{row.ratio:.2f}"
        table.add_row(
            row.workload, f"{row.temperature:g}", row.method, str(row.prompt or ""), str(row.tokens or ""), str(row.batch),
            f"{row.plain_tok_s:.0f}", ratio, interval, f"{row.tokens_per_round:.2f}",
        )  # fmt: skip
    console.print(table)


def as_rows(rows: Sequence[Ratio]) -> list[dict[str, Any]]:
    return [{name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(row).items()} for row in rows]


def _requests(case: Case, tokens: int, pair: int, first_seed: int) -> tuple[Prompts, list[SamplingParams]]:
    seeds = (first_seed + pair * case.batch + i for i in range(case.batch))
    params = [SamplingParams(temperature=case.temperature, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in seeds]
    return _prompts(case, pair), params


def _prompts(case: Case, pair: int) -> Prompts:
    if case.workload == "random":
        rng = random.Random(f"{pair} {case.batch}")
        return [[rng.randrange(_IDS) for _ in range(64)] for _ in range(case.batch)]
    code = read_prompts(_WORKLOADS / "code.jsonl")
    return [code[(pair * case.batch + i) % len(code)] for i in range(case.batch)]


def _cut(llm: LLM, prompts: Prompts, tokens: int) -> Prompts:
    """The prompts as ids, repeated and cut to so many; as they are where that is 0."""
    if not tokens or llm.tokenizer is None:
        return prompts
    ids = [list(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    return [(one * (tokens // len(one) + 1))[-tokens:] for one in ids]


def _interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Where the median of such runs lies, 95 times of 100."""
    rng = random.Random(0)
    medians: Callable[[], float] = lambda: statistics.median(rng.choices(ratios, k=len(ratios)))  # noqa: E731
    sorted_medians = sorted(medians() for _ in range(draws))
    return sorted_medians[int(0.025 * draws)], sorted_medians[int(0.975 * draws)]
