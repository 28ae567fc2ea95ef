"""What the outcomes of a kind of request add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.bench.audit.cases import KINDS
from outrider.bench.audit.compare import divergence, equal, fits_schema, logprob_gap
from outrider.bench.audit.records import Answer, Choice
from outrider.bench.audit.run import Outcome

__all__ = ["not_taken", "summarise_kind", "summarise_kinds"]

_SHOWN = 8  # divergences of a kind that a card lists


def summarise_kinds(outcomes: Sequence[Outcome], skipped: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """A row for every kind, in their order. `skipped` ones cannot be sent to these sides."""
    rows = {}
    for kind, meaning in KINDS.items():
        if kind in skipped:
            rows[kind] = {"meaning": meaning, "compared": 0, "not_supported": "these sides take one request at a time"}
        elif chosen := [outcome for outcome in outcomes if outcome.case.kind == kind]:
            rows[kind] = {"meaning": meaning} | summarise_kind(chosen)
    return rows


def summarise_kind(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, divergences, margins, speed and what the kind is about."""
    good = [outcome for outcome in outcomes if outcome.plain.good and outcome.speculative.good and not not_taken(outcome)]
    pairs = [pair for outcome in good for pair in zip(outcome.plain.choices, outcome.speculative.choices, strict=False)]
    again = [outcome for outcome in good if outcome.again is not None]
    row: dict[str, Any] = {
        "requests": len(outcomes),
        "compared": len(pairs),
        "equal": sum(equal(*pair) for pair in pairs),
        "ids_compared": sum(a.ids is not None and b.ids is not None for a, b in pairs),
        "tokens": sum(outcome.speculative.tokens for outcome in good),
        "plain_s": sum(outcome.plain.seconds for outcome in good),
        "speculative_s": sum(outcome.speculative.seconds for outcome in good),
        "plain_tokens": sum(outcome.plain.tokens for outcome in good),
        "differs_where_plain_repeats": sum(_repeats(outcome) for outcome in again),
        "sent_again": len(again),
        "divergences": [row for outcome in good for row in _divergences(outcome)],
    }
    row["shown"] = row["divergences"][:_SHOWN]
    return row | _reasons(outcomes) | _special(good, pairs)


def not_taken(outcome: Outcome) -> str | None:
    """What the request wanted and a good answer lacks: an engine may ignore a field without a word."""
    request, sides = outcome.case.request, (outcome.plain, outcome.speculative)
    if not all(side.good for side in sides):
        return None
    if request.logprobs is not None and not all(_has_logprobs(side) for side in sides):
        return "answered without log probabilities"
    if request.n > 1 and all(len(side.choices) != request.n for side in sides):
        return f"answered with {len(outcome.plain.choices)} of {request.n} choices"
    if request.schema is not None and not any(fits_schema(side.choices[0].text, request.schema) for side in sides):
        return "answered without regard to the schema"
    return None


def _has_logprobs(answer: Answer) -> bool:
    return all(choice.tokens for choice in answer.choices)


def _repeats(outcome: Outcome) -> bool:
    """Whether the plain side gave its text once more."""
    assert outcome.again is not None
    return [choice.text for choice in outcome.again.choices] == [choice.text for choice in outcome.plain.choices]


def _divergences(outcome: Outcome) -> list[dict[str, Any]]:
    margins = iter(outcome.margins)
    rows = []
    for plain, other in zip(outcome.plain.choices, outcome.speculative.choices, strict=False):
        if equal(plain, other):
            continue
        place, margin = divergence(plain, other), next(margins, None)
        rows.append(
            {
                "prompt": outcome.case.request.prompt[-40:],
                "character": place.character,
                "plain": place.plain,
                "speculative": place.speculative,
                "margin_nats": None if margin is None else margin.nats,
                "at_least": margin is not None and margin.at_least,
            }
        )
    return rows


def _reasons(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Requests without a comparison, by reason: not supported by the engine, not with speculation, or failed."""
    out: dict[str, Counter[str]] = {"not_supported": Counter(), "not_with_speculation": Counter(), "failed": Counter()}
    for outcome in outcomes:
        plain, other = outcome.plain, outcome.speculative
        if reason := not_taken(outcome):
            out["not_supported"][reason] += 1
        elif not plain.good:
            is_failure = plain.failed is not None and other.good
            out["failed" if is_failure else "not_supported"][plain.refused or plain.failed or ""] += 1
        elif not other.good:
            out["not_with_speculation" if other.refused else "failed"][other.refused or other.failed or ""] += 1
    return {name: dict(counts.most_common(3)) for name, counts in out.items() if counts}


def _special(good: Sequence[Outcome], pairs: Sequence[tuple[Choice, Choice]]) -> dict[str, Any]:
    """What only some kinds have: validity, stop strings that were kept, choices, log probabilities."""
    if not good:
        return {}
    request, out = good[0].case.request, dict[str, Any]()
    if schema := request.schema:
        ended = [pair for pair in pairs if pair[0].finish != "length"]
        out["valid_plain"] = sum(fits_schema(plain.text, schema) for plain, _ in ended)
        out["valid_speculative"] = sum(fits_schema(other.text, schema) for _, other in ended)
        out["ended"] = len(ended)
    if request.stop:
        out["kept_stop_plain"] = sum(any(stop in plain.text for stop in request.stop) for plain, _ in pairs)
        out["kept_stop_speculative"] = sum(any(stop in other.text for stop in request.stop) for _, other in pairs)
    if request.n > 1:
        out["choices_missing"] = sum(len(o.plain.choices) - len(o.speculative.choices) for o in good)
    if request.logprobs is not None:
        gaps = [logprob_gap(*pair) for pair in pairs]
        out["largest_logprob_gap"] = max((gap for gap, _ in gaps), default=0.0)
        out["logprobs_compared"] = sum(count for _, count in gaps)
    return out
