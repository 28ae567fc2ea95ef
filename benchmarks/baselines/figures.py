"""The numbers of the comparison, computed from measurements: rows, without loops too, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.engine.acceptance import loops

__all__ = ["MIN_PROMPTS", "Measured", "PromptRun", "Reference", "ratios", "record"]

MIN_PROMPTS = 3  # prompts a ratio is given for
_AGREE = 32  # leading tokens compared with Outrider's
_FILES = {"bf16": "BF16", "int8": "Q8_0"}  # what llama.cpp calls each kind
_BASELINES = ("transformers", "llama.cpp", "openvino")


class PromptRun(NamedTuple):
    """One prompt, once."""

    decode_s: float  # after the first token
    total_s: float
    ids: list[int]


@dataclass(slots=True)
class Measured:
    """One engine, kind of weights and mode."""

    engine: str
    kind: str
    mode: str
    runs: list[list[PromptRun]] = field(default_factory=list)  # of every repeat, by prompt
    prefill: list[float] = field(default_factory=list)  # seconds
    failure: str | None = None

    @property
    def texts(self) -> list[list[int]]:
        return [run.ids for run in self.runs[0]] if self.runs else []


@dataclass(frozen=True, slots=True)
class Reference:
    """Outrider's plain outputs in one kind of weights, with which all others are compared."""

    texts: Sequence[Sequence[int]]
    top: Sequence[Sequence[Mapping[int, float]]] = ()  # log probabilities of the likeliest tokens at each of their positions
    finds_loops: bool = True  # whether loops are counted; texts of random weights are meaningless

    def steady(self) -> list[int]:
        """The prompts whose output does not loop."""
        return [i for i, ids in enumerate(self.texts) if not loops(ids)]


def record(model: str, measured: Measured, reference: Reference | None) -> dict[str, Any]:
    """One row as plain data. `steady` is about the prompts whose plain output in these weights does not loop."""
    everything = list(range(len(measured.texts)))
    steady = reference.steady() if reference is not None and reference.finds_loops else None
    speeds = _speeds(measured, everything)
    steady_speeds = _speeds(measured, steady) if steady is not None and len(steady) >= MIN_PROMPTS else []
    walls = [sum(len(run.ids) for run in runs) / sum(run.total_s for run in runs) for runs in measured.runs]
    return {
        "model": model,
        "peer": measured.engine,
        "kind": measured.kind,
        "mode": measured.mode,
        "tok_s": _median(speeds),
        "spread": _spread(speeds),
        "tok_s_steady": _median(steady_speeds),
        "spread_steady": _spread(steady_speeds),
        "wall_tok_s": _median(walls),
        "prefill_s": _median(measured.prefill, 5),
        "prompts": len(everything),
        "tokens": max(map(len, measured.texts), default=0),
        "steady": None if steady is None else len(steady),
        "looping": [i for i, ids in enumerate(measured.texts) if loops(ids)],
        "agrees": _agrees(measured.texts, reference.texts) if reference is not None else None,
        "parts_at": _parts_at(measured.texts, reference) if reference is not None else None,
        "decode_s": [
            round(statistics.median(run.decode_s for run in of_prompt), 5) for of_prompt in zip(*measured.runs, strict=True)
        ],
        "failure": measured.failure,
    }


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Outrider over the baselines, above 1 where it is faster. None: not run, or on fewer than MIN_PROMPTS prompts."""
    out: dict[str, float | None] = {}
    finds_loops = any(row["steady"] is not None for row in rows)
    for speed, suffix in (("tok_s", ""), ("tok_s_steady", ", no loops"))[: 1 + finds_loops]:
        out |= {name + suffix: ratio for name, ratio in _ratios_of(speed, rows).items()}
    for kind, file in _FILES.items():
        times = {row["peer"]: row["prefill_s"] for row in rows if row["kind"] == kind and row["prefill_s"]}
        out[f"prefill {kind} over llama.cpp {file}"] = _over(times.get("llama.cpp"), times.get("outrider"))
    return out


def _ratios_of(speed: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The ratios of one of the rows' speeds."""
    eligible = [row for row in rows if row[speed] and row["prompts"] >= MIN_PROMPTS]

    def best(engines: Sequence[str], kind: str, *modes: str) -> float | None:
        matching = [row for row in eligible if row["peer"] in engines and row["kind"] == kind]
        return max((row[speed] for row in matching if not modes or row["mode"] in modes), default=None)

    out: dict[str, float | None] = {}
    if any(row["mode"] == "compiled" for row in rows):  # on a GPU
        for mode, name in (("plain", "eager"), ("compiled", "compiled")):
            theirs = best(["transformers"], "bf16", mode)
            out[f"plain bf16 over Transformers {name}"] = _over(best(["outrider"], "bf16", "none"), theirs)
    for kind, file in _FILES.items():
        ours = best(["outrider"], kind)
        plain = best(["outrider"], kind, "none")
        out[f"plain {kind} over llama.cpp {file}"] = _over(plain, best(["llama.cpp"], kind, "plain"))
        out[f"best {kind} over the fastest peer's best mode in {kind}"] = _over(ours, best(_BASELINES, kind))
        out[f"best {kind} over Transformers' best mode"] = _over(ours, best(["transformers"], "bf16"))
    return out


def _speeds(measured: Measured, prompts: Sequence[int]) -> list[float]:
    """Tokens after the first over the time after it, of every repeat."""
    kept = [[runs[i] for i in prompts] for runs in measured.runs]
    return [sum(len(run.ids) - 1 for run in runs) / sum(run.decode_s for run in runs) for runs in kept]


def _agrees(texts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float | None:
    """The share of the leading tokens before a text parts from Outrider's."""
    shares = [_parting(a[:_AGREE], b) / len(a[:_AGREE]) for a, b in zip(texts, ours, strict=False)]
    return round(statistics.mean(shares), 3) if shares else None


def _parts_at(texts: Sequence[Sequence[int]], reference: Reference) -> float | None:
    """The largest lead, in nats, that Outrider's choice had over another engine's where their texts part; None: none of them do.

    Rounding turns near ties; a fault would choose what the model holds far less likely. A choice that is not among the
    likeliest counts as the last of them.
    """
    leads = []
    for theirs, ours, top in zip(texts, reference.texts, reference.top, strict=False):
        place = _parting(theirs, ours)
        if place < min(len(theirs), len(ours)):
            known = top[place]
            leads.append(known[ours[place]] - known.get(theirs[place], min(known.values())))
    return round(max(leads), 3) if leads else None


def _parting(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _over(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, 3) if ours and theirs else None


def _spread(values: Sequence[float]) -> list[float] | None:
    return [round(min(values), 2), round(max(values), 2)] if values else None


def _median(values: Sequence[float], digits: int = 2) -> float | None:
    return round(statistics.median(values), digits) if values else None
