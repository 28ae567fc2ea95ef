"""The verdict on an audit, from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DIFFERENT", "LOSSLESS", "SAME", "UNDECIDED", "Verdict", "judge"]

SAME, LOSSLESS, DIFFERENT, UNDECIDED = "same tokens", "lossless up to rounding", "not lossless", "undecided"
_JUDGED = ("greedy", "short", "concurrent", "stop", "logprobs")  # kinds whose divergences have margins
_UNJUDGED = ("repetition", "penalties", "json")  # the returned log probabilities are not those of the choice
_UNLIKELY = 1e-3
_LEAST_LOGPROB_GAP = 0.1  # nats; the tolerance for near ties where that is larger


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of the four words, why, and what else a reader must know."""

    word: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def judge(kinds: Mapping[str, Mapping[str, Any]], sampling: Mapping[str, Any], near_tie: float) -> Verdict:
    """`near_tie` is the largest margin, in nats, that rounding may turn."""
    greedy = {name: row for name, row in kinds.items() if name in _JUDGED and row["compared"]}
    reasons = [*_wrong_tokens(greedy, near_tie), *_too_often(kinds, greedy), *_features(kinds, near_tie), *_sampling(sampling)]
    notes = tuple(_notes(kinds, sampling))
    if reasons:
        return Verdict(DIFFERENT, tuple(reasons), notes)
    if not greedy:
        return Verdict(UNDECIDED, ("no greedy request was answered by both sides",), notes)
    compared = [row for row in kinds.values() if row["compared"]]
    if all(row["equal"] == row["compared"] for row in compared):
        return Verdict(SAME, (), notes)
    differing = [d for row in greedy.values() for d in row["divergences"]]
    unknown = sum(d["margin_nats"] is None for d in differing)
    if unknown and unknown * 2 > len(differing):
        return Verdict(UNDECIDED, (f"{unknown} of {len(differing)} greedy divergences have no margin",), notes)
    return Verdict(LOSSLESS, (), notes)


def _wrong_tokens(greedy: Mapping[str, Mapping[str, Any]], near_tie: float) -> Iterator[str]:
    for name, row in greedy.items():
        margins = [d["margin_nats"] for d in row["divergences"] if d["margin_nats"] is not None]
        if wrong := [margin for margin in margins if margin > near_tie]:
            yield (
                f"{name}: {len(wrong)} of {row['compared']} texts have a token that the model holds less likely by up to "
                f"{max(wrong):.2f} nats"
            )


def _too_often(kinds: Mapping[str, Mapping[str, Any]], greedy: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Kinds without margins whose texts differ more often than those of plain greedy requests do."""
    others = [row for name, row in greedy.items() if name != "stop"]  # a stop string that is missed says nothing of rounding
    differing = sum(row["compared"] - row["equal"] for row in others)
    rate = (differing + 1) / (sum(row["compared"] for row in others) + 2)
    for name in _UNJUDGED:
        row = kinds.get(name)
        if row is None or not row["compared"]:
            continue
        wrong, count = row["differs_where_plain_repeats"], row["compared"]
        tail = sum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(wrong, count + 1))
        if wrong and tail < _UNLIKELY:
            yield f"{name}: {wrong} of {count} texts differ where the plain side repeats itself"


def _features(kinds: Mapping[str, Mapping[str, Any]], near_tie: float) -> Iterator[str]:
    for name, row in kinds.items():
        if row.get("failed"):
            yield f"{name}: {sum(row['failed'].values())} of {row['requests']} requests failed on one side: {min(row['failed'])}"
        if row.get("valid_speculative", 0) < row.get("valid_plain", 0):
            yield f"{name}: {row['valid_speculative']} of {row['ended']} answers fit the schema, {row['valid_plain']} plainly"
        if row.get("kept_stop_speculative", 0) > row.get("kept_stop_plain", 0):
            yield f"{name}: {row['kept_stop_speculative']} texts hold their stop string, {row['kept_stop_plain']} plainly"
        if row.get("choices_missing", 0) > 0:
            yield f"{name}: {row['choices_missing']} choices are missing"
        if row.get("largest_logprob_gap", 0.0) > max(near_tie, _LEAST_LOGPROB_GAP):
            yield f"{name}: log probabilities of the same token differ by up to {row['largest_logprob_gap']:.2f} nats"


def _sampling(result: Mapping[str, Any]) -> Iterator[str]:
    """Tests that the speculative side fails. Where the plain side fails too, it does not draw from the reference."""
    if not result:
        return
    limit = result["significance"]
    for name, meaning in (("first_tokens", "first tokens do not follow"), ("temperature", "temperature is not that of")):
        plain, other = result.get(f"{name}_plain"), result.get(f"{name}_speculative")
        if plain and other and other["p_value"] < limit <= plain["p_value"]:
            seen = f" (looks like {other['value']:.2f})" if "value" in other else ""
            yield f"sampled {meaning} the model's distribution{seen}, p = {other['p_value']:.1e}"
    for name in ("first_tokens_between_sides", "later_tokens_between_sides"):
        if (test := result.get(name)) and test["p_value"] < limit:
            yield f"sampled {name.partition('_')[0]} tokens differ between the sides, p = {test['p_value']:.1e}"


def _notes(kinds: Mapping[str, Mapping[str, Any]], sampling: Mapping[str, Any]) -> Iterator[str]:
    seeded = [row for name, row in kinds.items() if name in ("seeded", "seeded concurrent", "n") and row["compared"]]
    if seeded:
        equal, compared = (sum(row[name] for row in seeded) for name in ("equal", "compared"))
        word = "the same seed gives the same text" if equal == compared else "a seed does not fix the text"
        yield f"{word}: {equal} of {compared} sampled texts are equal with and without speculation"
    if sampling and sampling.get("first_tokens_plain", {}).get("p_value", 1.0) < sampling["significance"]:
        yield "the plain side does not sample from its own log probabilities, so the sides are compared with each other only"
    if not sampling:
        yield "no sampled tokens were compared"
