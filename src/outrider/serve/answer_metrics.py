"""The `metrics` field of an answer: speculation and times, over all of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from outrider.engine.outputs import CompletionOutput

__all__ = ["metrics_of"]


def metrics_of(outputs: Sequence[CompletionOutput], draft_tokens: int) -> dict[str, Any]:
    """Speculation statistics, with vLLM's names and some further ones, and times; over all outputs."""
    stats = [output.speculation for output in outputs]
    drafted_at, accepted_at = (_sum([row[f"{kind}_by_position"] for row in stats]) for kind in ("drafted", "accepted"))
    drafted, accepted = sum(row["drafted"] for row in stats), sum(row["accepted"] for row in stats)
    steps = drafted_at[0] if drafted_at else 0
    rounds, tokens = sum(row["rounds"] for row in stats), sum(len(output.token_ids) for output in outputs)
    reached = [steps, *accepted_at, 0]
    first = stats[0] if stats else {}
    total = max((output.timings.total_s for output in outputs), default=0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(1 + accepted / steps, 4) if steps else 0.0,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "acceptance_histogram": [a - b for a, b in pairwise(reached)] if steps else [],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": draft_tokens,
            "method": first.get("method", "none"),
            "rounds": rounds,
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_by_position": [round(a / d, 4) for a, d in zip(accepted_at, drafted_at, strict=False)],
            "off_reason": first.get("off_reason"),
            "fallback_reason": first.get("fallback_reason"),
        },
        "timings": {
            "first_token_ms": round(1000 * min((output.timings.first_token_s for output in outputs), default=0.0), 3),
            "queue_ms": round(1000 * max((output.timings.queued_s for output in outputs), default=0.0), 3),
            "total_ms": round(1000 * total, 3),
            "tokens_per_s": round(tokens / total, 3) if total > 0 else 0.0,
            "draft_n": drafted,
            "draft_n_accepted": accepted,
        },
    }


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    out = [0] * max(map(len, rows), default=0)
    for row in rows:
        for i, value in enumerate(row):
            out[i] += value
    return out
