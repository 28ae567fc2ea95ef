"""Acceptance on a set of prompts: how many tokens a round emits, measured through the engine."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core import acceptance_rate
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = [
    "Acceptance",
    "acceptance_totals",
    "accepted_by_position",
    "loops",
    "measure_acceptance",
    "read_items",
    "read_prompts",
    "summarise",
]

_GRAM, _TIMES = 8, 3
_TEXTS = ("prompt", "question", "text")  # fields of a row that hold its only turn
_UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # what SPEED-Bench publishes in place of texts it may not pass on


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a drafter over outputs that do not loop (and over all outputs, for comparison)."""

    temperature: float
    outputs: int
    looping: float  # share of outputs in which some 8-gram occurs more than three times
    tokens_per_round: float | None  # over rounds that could draft, without looping outputs; None if all outputs loop
    tokens_per_round_all: float | None
    acceptance_rate: float | None  # as `core.acceptance_rate` defines it
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
        acceptance_rate=acceptance_totals(steady)["acceptance_rate"],
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
    """The category (or None) and the user's turns of every row of a JSONL file (perhaps in gzip), or of a parquet file.

    A row has `turns` (Spec-Bench, MT-bench, SPEED-Bench), `messages`, `prompt` (HumanEval), `question` (GSM8K) or `text`.
    """
    rows = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    items = [_item(f"{path}:{number}", row) for number, row in rows]
    if not items:
        raise InvalidParameter("data", f"{path} holds no prompts")
    return items


def _jsonl(path: Path) -> list[tuple[int, bytes]]:
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidParameter("data", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parquet(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidParameter("data", f"{path} needs pyarrow: pip install pyarrow; or pass the rows as JSONL") from None
    try:
        return list(enumerate(parquet.read_table(path).to_pylist(), 1))
    except (OSError, arrow.ArrowException) as error:
        raise InvalidParameter("data", f"{path} cannot be read: {error}") from None


def _item(place: str, row: bytes | dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    try:
        item = json.loads(row) if isinstance(row, bytes) else row
        turns, category = _turns(item), item.get("category")
        if not isinstance(turns, list) or not turns or not all(isinstance(text, str) and text for text in turns):
            raise TypeError
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        keys = ", ".join(f'"{key}"' for key in _TEXTS)
        raise InvalidParameter(
            "data", f'{place} is not a row with "turns" or "messages" (lists), or a text in one of {keys}'
        ) from None
    if any(_UNRESOLVED in turn for turn in turns):
        raise InvalidParameter(
            "data", f"{place} is a placeholder of SPEED-Bench, not a prompt; write the file with its prepare_data.py first"
        )
    return None if category is None else str(category), tuple(turns)


def _turns(item: dict[str, Any]) -> Any:
    """The user's turns of one row."""
    if "turns" in item:
        return item["turns"]
    if item.get("messages"):
        return [message["content"] for message in item["messages"] if message["role"] == "user"]
    return [item[key] for key in _TEXTS if item.get(key)][:1]


def _rate(outputs: Sequence[CompletionOutput]) -> float | None:
    """Tokens per round. The round that reads the prompt drafts nothing and is not counted."""
    rounds = sum(o.speculation["rounds"] - 1 for o in outputs)
    return sum(len(o.token_ids) - 1 for o in outputs) / rounds if rounds else None


def acceptance_totals(outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Counts, the acceptance rate and the mean acceptance length (tokens of a round that drafted, the bonus token included).

    The last two are None where nothing was drafted.
    """
    stats = [output.speculation for output in outputs]
    drafted, accepted = (sum(row[name] for row in stats) for name in ("drafted", "accepted"))
    drafts = sum(sum(row["drafted_by_position"][:1]) for row in stats)  # rounds of a sequence that drafted
    length = round(1 + accepted / drafts, 4) if drafts else None
    rates = {"acceptance_rate": acceptance_rate(accepted, drafted), "mean_acceptance_length": length}
    return {"drafted": drafted, "accepted": accepted} | rates


def accepted_by_position(outputs: Sequence[CompletionOutput]) -> list[float]:
    """For each draft position: of the drafts at least this long, the share accepted up to it."""
    drafted, accepted = Counter[int](), Counter[int]()
    for output in outputs:
        drafted.update(dict(enumerate(output.speculation["drafted_by_position"])))
        accepted.update(dict(enumerate(output.speculation["accepted_by_position"])))
    return [round(accepted[i] / drafted[i], 4) for i in range(len(drafted)) if drafted[i]]
