"""The verdict follows from the numbers: what is rounding, what is a fault, what cannot be told."""

from __future__ import annotations

from typing import Any

from outrider.bench.audit.verdict import DIFFERENT, LOSSLESS, SAME, UNDECIDED, judge

NEAR_TIE = 0.1


def kind(compared: int = 12, margins: tuple[float | None, ...] = (), **more: Any) -> dict[str, Any]:
    divergences = [{"margin_nats": margin, "at_least": False} for margin in margins]
    base = {"requests": compared, "compared": compared, "equal": compared - len(margins), "divergences": divergences}
    return base | {"differs_where_plain_repeats": len(margins)} | more


def sampled(plain: float = 0.5, speculative: float = 0.5, between: float = 0.5) -> dict[str, Any]:
    return {
        "significance": 1e-4,
        "first_tokens_plain": {"p_value": plain},
        "first_tokens_speculative": {"p_value": speculative},
        "first_tokens_between_sides": {"p_value": between},
        "later_tokens_between_sides": {"p_value": 0.5},
    }


def word(sampling: dict[str, Any] | None = None, **kinds: dict[str, Any]) -> str:
    return judge(kinds, sampled() if sampling is None else sampling, NEAR_TIE).word


def test_equal_texts_are_the_same_tokens() -> None:
    assert word(greedy=kind(), seeded=kind(), json=kind(valid_plain=6, valid_speculative=6, ended=6)) == SAME


def test_near_ties_are_rounding_and_larger_margins_are_not() -> None:
    assert word(greedy=kind(margins=(0.02, 0.09))) == LOSSLESS
    assert word(greedy=kind(margins=(0.02, 0.2))) == DIFFERENT
    assert word(concurrent=kind(500, margins=(3.0,))) == DIFFERENT


def test_texts_that_only_differ_under_a_seed_are_no_fault() -> None:
    verdict = judge({"greedy": kind(), "seeded": kind(margins=(None,) * 12)}, sampled(), NEAR_TIE)
    assert verdict.word == LOSSLESS
    assert "a seed does not fix the text: 0 of 12" in verdict.notes[0]


def test_divergences_without_margins_cannot_be_judged() -> None:
    assert word(greedy=kind(margins=(None, None))) == UNDECIDED
    assert word() == UNDECIDED
    assert word(greedy=kind(0)) == UNDECIDED


def test_penalties_that_speculation_drops_are_a_fault_and_one_near_tie_is_not() -> None:
    assert word(greedy=kind(60), penalties=kind(6, margins=(None,) * 6)) == DIFFERENT
    assert word(greedy=kind(60, margins=(0.01,) * 4), penalties=kind(6, margins=(None,))) == LOSSLESS


def test_samples() -> None:
    assert word(sampled(speculative=1e-6), greedy=kind()) == DIFFERENT
    assert word(sampled(between=1e-6), greedy=kind()) == DIFFERENT
    assert word(sampled(plain=1e-9, speculative=1e-9), greedy=kind()) == SAME  # the reference is another distribution
    assert any("compared with each other only" in note for note in judge({}, sampled(plain=1e-9), NEAR_TIE).notes)


def test_features() -> None:
    assert word(greedy=kind(), json=kind(valid_plain=6, valid_speculative=5, ended=6)) == DIFFERENT
    assert word(greedy=kind(), stop=kind(kept_stop_plain=0, kept_stop_speculative=1)) == DIFFERENT
    assert word(greedy=kind(), n=kind(choices_missing=1)) == DIFFERENT
    assert word(greedy=kind(), logprobs=kind(largest_logprob_gap=0.5)) == DIFFERENT
    assert word(greedy=kind(), logprobs=kind(largest_logprob_gap=0.05)) == SAME
    assert word(greedy=kind(), n=kind(0, failed={"HTTP 500: broken": 2})) == DIFFERENT
    assert word(greedy=kind(), n=kind(0, not_with_speculation={"HTTP 400: n": 2})) == SAME
