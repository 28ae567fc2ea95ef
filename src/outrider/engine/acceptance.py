"""Acceptance on a set of prompts: how many tokens a round emits, measured through the engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = ["Acceptance", "accepted_by_position", "loops", "measure_acceptance", "read_items", "read_prompts", "summarise"]

_GRAM, _TIMES = 8, 3


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a drafter over outputs that do not loop (and over all outputs, for comparison)."""

    temperature: float
    outputs: int
    looping: float  # share of outputs in which some 8-gram occurs more than three times
    tokens_per_round: float | None  # over rounds that could draft, without looping outputs; None if all outputs loop
    tokens_per_round_all: float | None
    by_position: list[float]  # of the drafts at least this long, the share accepted up to this position
    tok_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_acceptance(llm: LLM, prompts: Sequence[str | tuple[int, ...]], params: SamplingParams) -> Acceptance:
    """Generate for one prompt (text or ids) at a time, and summarise the acceptance."""
    return summarise([llm.generate([prompt], params)[0].outputs[0] for prompt in prompts], params.temperature)


def summarise(outputs: Sequence[CompletionOutput], temperature: float) -> Acceptance:
    """The acceptance over these outputs."""
    steady = [output for output in outputs if not loops(output.token_ids)]
    decode = sum((len(o.token_ids) - 1) / o.timings.decode_tokens_per_s for o in outputs if o.timings.decode_tokens_per_s)
    return Acceptance(
        temperature=temperature,
        outputs=len(outputs),
        looping=1 - len(steady) / len(outputs),
        tokens_per_round=_rate(steady),
        tokens_per_round_all=_rate(outputs),
        by_position=accepted_by_position(steady),
        tok_s=sum(len(o.token_ids) - 1 for o in outputs) / decode if decode else 0.0,
    )


def loops(tokens: Sequence[int]) -> bool:
    """Whether some 8-gram occurs more than three times."""
    grams = Counter(tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1))
    return any(count > _TIMES for count in grams.values())


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """First turns (or `prompt`, `text` fields) of a JSONL file."""
    return [turns[0] for _, turns in read_items(path)][:limit]


def read_items(path: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    """The category (or None) and turns of every line of a JSONL file. A line has `turns`, `prompt` or `text`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidParameter("data", f"{path} cannot be read: {error.strerror}") from None
    items = [_item(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise InvalidParameter("data", f"{path} holds no prompts")
    return items


def _item(path: Path, number: int, line: bytes) -> tuple[str | None, tuple[str, ...]]:
    try:
        item = json.loads(line)
        turns = item["turns"] if "turns" in item else [item.get("prompt") or item["text"]]
        if not isinstance(turns, list) or not turns or not all(isinstance(text, str) and text for text in turns):
            raise TypeError
        category = item.get("category")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise InvalidParameter(
            "data", f'{path}:{number} is not {{"turns": [...]}}, {{"prompt": ...}} or {{"text": ...}} with text in it'
        ) from None
    return None if category is None else str(category), tuple(turns)


def _rate(outputs: Sequence[CompletionOutput]) -> float | None:
    """Tokens per round. The round that reads the prompt drafts nothing and is not counted."""
    rounds = sum(o.speculation["rounds"] - 1 for o in outputs)
    return sum(len(o.token_ids) - 1 for o in outputs) / rounds if rounds else None


def accepted_by_position(outputs: Sequence[CompletionOutput]) -> list[float]:
    """For each draft position: of the drafts at least this long, the share accepted up to it."""
    drafted, accepted = Counter[int](), Counter[int]()
    for output in outputs:
        drafted.update(dict(enumerate(output.speculation["drafted_by_position"])))
        accepted.update(dict(enumerate(output.speculation["accepted_by_position"])))
    return [round(accepted[i] / drafted[i], 4) for i in range(len(drafted)) if drafted[i]]
