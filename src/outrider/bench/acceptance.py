"""`outrider bench acceptance`: every method on the same prompts, one row for each temperature and batch size."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.config import WITH_WEIGHTS, SpeculationConfig, pinned
from outrider.core import RoundReport
from outrider.draft import check_speculation
from outrider.engine.acceptance import summarise
from outrider.engine.intake import model_name
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter, ModelError
from outrider.model import locate, read_spec
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["EVERY_METHOD", "Workload", "available_methods", "bench_methods", "show_rows"]

_TREE = "beam=3:branch=6:depth=9"
EVERY_METHOD = (
    "ngram:8,suffix:8,recycle:24,lookahead:31,draft_model:5,cascade:8:levels=ngram+draft_model,medusa:24,"
    f"eagle:5,eagle:24:{_TREE},mtp:4,dflash:16,early_exit:4,mixture:24:members=suffix+(eagle:{_TREE}),auto"
)
_SHAPES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.15, "presence_penalty": 0.2},
    {"stop": ["\n\n\n", "return"]},
    {"frequency_penalty": 0.3, "min_p": 0.02, "stop": ["\n\ndef"]},
)


def available_methods(model: str | None) -> str:
    """The drafters of EVERY_METHOD that the model has weights for, without `auto`."""
    directory = locate(str(model or bundled_model()))
    needs = {**WITH_WEIGHTS, "cascade": "draft", "mixture": "eagle"}
    folders = {method: needs.get(method.split(":")[0]) for method in EVERY_METHOD.removesuffix(",auto").split(",")}
    return ",".join(method for method, name in folders.items() if name is None or (directory / name / "config.json").exists())


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests: each prompt, and some of them again with penalties and stop strings."""

    prompts: Sequence[str]
    max_tokens: int = 256
    shaped: int = 0  # further requests, counted for equality alone
    seed: int = 0

    def requests(self, temperature: float) -> list[tuple[str, SamplingParams]]:
        params = SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens)
        shapes = [replace(params, **_SHAPES[i % len(_SHAPES)]) for i in range(self.shaped)]
        again = [(self.prompts[i % len(self.prompts)], params) for i, params in enumerate(shapes)]
        return [*((prompt, params) for prompt in self.prompts), *again]


class _DrafterTimes:
    """Seconds of each proposal, and of each commit of the drafter."""

    def __init__(self) -> None:
        self.proposals: list[float] = []
        self.commits: list[float] = []

    def observe(self, report: RoundReport) -> None:
        if any(report.plan.lengths):
            self.proposals.append(report.phases.propose)
        self.commits.append(report.phases.record)


def bench_methods(
    workload: Workload,
    model: str | None,
    methods: str,
    cases: Iterable[tuple[float, int]],
    check: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for every (temperature, batch size) and method, as it is measured.

    With `check`, every output is compared with plain decoding, one request at a time. A drafter that cannot be loaded
    gives a row with the reason. Prompts that do not fit the context are left out and counted.
    """
    workload, skipped = _fitting(workload, locate(model_name(model)))
    drafters = [(method, SpeculationConfig.parse(pinned(method))) for method in methods.split(",")]
    for _, speculation in drafters:
        check_speculation(speculation)
    plain: dict[float, list[list[int]]] = {}
    for temperature, batch in cases:
        requests = workload.requests(temperature)
        if check and temperature not in plain:
            outputs = _generate(LLM(model, speculation="none", max_num_seqs=1), requests)
            plain[temperature] = [output.token_ids for output in outputs]
        for method, speculation in drafters:
            try:
                llm = LLM(model, speculation=speculation, max_num_seqs=batch, share=False)
            except (InvalidParameter, ModelError) as error:  # the model has no such drafter; the others are measured
                yield {"method": method, "batch": batch, "temperature": temperature, "missing": str(error)}
                continue
            times = _DrafterTimes()
            llm.engine.listen(times)
            outputs = _generate(llm, requests)
            row = {"method": method, "batch": batch} | summarise(outputs[: len(workload.prompts)], temperature).as_dict()
            row |= {"propose_ms": _median_ms(times.proposals), "commit_ms": _median_ms(times.commits)}
            row |= {"skipped": skipped, "fallbacks": sum(output.speculation["fallback_reason"] is not None for output in outputs)}
            if check:
                same = [output.token_ids == ids for output, ids in zip(outputs, plain[temperature], strict=True)]
                row |= {"compared": len(same), "equal": sum(same) / len(same)}
            yield row


def _fitting(workload: Workload, folder: Path) -> tuple[Workload, int]:
    """The workload without prompts that leave no room for their output, and how many those are."""
    context, tokenizer = read_spec(folder).context, Tokenizer.load(folder)
    if tokenizer is None:
        raise ModelError(f"{folder} has no tokenizer, and the prompts are texts")
    kept = [prompt for prompt in workload.prompts if len(tokenizer.encode(prompt)) + workload.max_tokens <= context]
    if not kept:
        raise InvalidParameter("data", f"no prompt leaves room for {workload.max_tokens} tokens in a context of {context}")
    return replace(workload, prompts=kept), len(workload.prompts) - len(kept)


def show_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The rows as a table."""
    table = Table("method", "T", "batch", "tokens/round", "all", "loop", "accept", "accepted by position", "propose ms", "equal")
    for row in rows:
        if "missing" in row:
            table.add_row(row["method"], f"{row['temperature']:g}", str(row["batch"]), Text("missing", style="yellow"))
            continue
        table.add_row(
            row["method"],
            f"{row['temperature']:g}",
            str(row["batch"]),
            _number(row["tokens_per_round"]),
            _number(row["tokens_per_round_all"]),
            f"{row['looping']:.0%}",
            _number(row["acceptance_rate"]),
            " ".join(f"{share:.2f}" for share in row["by_position"][:6]),
            _number(row["propose_ms"]),
            f"{row['equal']:.0%}" if "equal" in row else "-",
        )
    console.print(table)
    if skipped := max((row.get("skipped", 0) for row in rows), default=0):
        console.print(f"prompts left out because they do not fit the context: {skipped}", markup=False, highlight=False)
    for method, reason in {row["method"]: row["missing"] for row in rows if "missing" in row}.items():
        console.print(f"{method} was left out: {reason}", markup=False, highlight=False, soft_wrap=True)


def _generate(llm: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[CompletionOutput]:
    """All requests, as many at a time as the engine runs."""
    prompts, params = [prompt for prompt, _ in requests], [params for _, params in requests]
    return [result.outputs[0] for result in llm.generate(prompts, params)]


def _median_ms(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) * 1e3 if seconds else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
