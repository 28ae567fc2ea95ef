"""Sampled tokens of both sides against the model's distribution, and against each other."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.audit.records import Answer, AuditRequest, Side
from outrider.bench.audit.run import Runner
from outrider.bench.audit.statistics import ChiSquare, estimate_temperature, goodness_of_fit, homogeneity

__all__ = ["SIGNIFICANCE", "SampledPrompt", "sample_prompts", "sampling_result"]

SIGNIFICANCE = 1e-4  # of every test; a sound engine fails one of the four about once in 2,500 audits
_CANDIDATES = 12  # prompts of the workload from which those that say most are taken
_OPEN = ("The ", "# ", "import ", "def ", "self.", "from ")  # after these many tokens may follow, in every model
_ALTERNATIVES = (20, 5)  # alternatives to ask for; some engines return five at most
_LENGTH = 4
_LATER = (1, 3)  # positions, from 0, compared between the sides; the first token is rarely speculated
_UNKNOWN = "\ufffd"  # part of a character: different tokens have this text


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """Tokens drawn after one prompt, a row for each sample, and the log probabilities of the first one's likeliest values."""

    reference: Mapping[str, float]
    plain: Sequence[tuple[str, ...]]
    speculative: Sequence[tuple[str, ...]]


async def sample_prompts(
    runner: Runner, prompts: Sequence[str], count: int, samples: int, seed: int
) -> AsyncIterator[SampledPrompt]:
    """Draw from both sides after the prompts whose first token says most of the temperature. No seed is used twice."""
    chosen = []
    for group, size in ((_OPEN, count // 2), (list(dict.fromkeys(prompts))[:_CANDIDATES], count - count // 2)):
        references = [(await _reference(runner, prompt), prompt) for prompt in group]
        chosen += sorted(references, key=lambda pair: -_information(pair[0]))[:size]
    has_names = all(reference for reference, _ in chosen) and await _names_tokens(runner, prompts[0])
    has_ids = not has_names and await _numbers_tokens(runner, prompts[0])
    shape = AuditRequest("", _LENGTH if has_names or has_ids else 1, temperature=1.0, logprobs=1 if has_names else None)
    for number, (reference, prompt) in enumerate(chosen):
        first = seed + 10_000 * (number + 1)
        rows = [
            await _draw(runner, side, replace(shape, prompt=prompt), range(first + offset, first + offset + samples))
            for side, offset in ((runner.plain, 0), (runner.speculative, 5_000))
        ]
        yield SampledPrompt(reference if has_names else {}, *rows)


async def _names_tokens(runner: Runner, prompt: str) -> bool:
    """Whether the speculative side, too, returns log probabilities; with speculation some engines do not."""
    answer = await runner.send(runner.speculative, AuditRequest(prompt, 1, temperature=1.0, seed=1, logprobs=1))
    return answer.good and bool(answer.choices[0].tokens)


async def _numbers_tokens(runner: Runner, prompt: str) -> bool:
    """Whether both sides return the ids of their tokens."""
    request = AuditRequest(prompt, 1, temperature=1.0, seed=1)
    answers = [await runner.send(side, request) for side in (runner.plain, runner.speculative)]
    return all(answer.good and answer.choices[0].ids for answer in answers)


async def _reference(runner: Runner, prompt: str) -> Mapping[str, float]:
    """Log probabilities of the first token; empty where the engine returns none."""
    for alternatives in _ALTERNATIVES:
        answer = await runner.send(runner.plain, AuditRequest(prompt, 1, temperature=1.0, seed=1, logprobs=alternatives))
        tokens = answer.choices[0].tokens if answer.good else None
        if tokens and len(tokens[0].top) > 1:
            return _continuing(tokens[0].top)
    return {}


def _continuing(logprobs: Mapping[str, float]) -> dict[str, float]:
    """The distribution of the first token where the text does not end at once: engines differ in how they show an end."""
    ended = sum(math.exp(logprob) for text, logprob in logprobs.items() if _is_end(text))
    shift = math.log1p(-min(ended, 0.999))
    return {text: logprob - shift for text, logprob in logprobs.items() if not _is_end(text) and _UNKNOWN not in text}


def _is_end(text: str) -> bool:
    return not text or (text.startswith("<") and text.endswith(">"))


def _information(logprobs: Mapping[str, float]) -> float:
    """What one sample says of the temperature: the variance of its log probability."""
    mass = sum(math.exp(value) for value in logprobs.values())
    mean = sum(math.exp(value) * value for value in logprobs.values()) / (mass or 1.0)
    return sum(math.exp(value) * (value - mean) ** 2 for value in logprobs.values())


async def _draw(runner: Runner, side: Side, shape: AuditRequest, seeds: range) -> list[tuple[str, ...]]:
    """A row of tokens for every seed."""
    requests = [replace(shape, seed=seed) for seed in seeds]
    by_text = shape.max_tokens == 1
    return [row for answer in await runner.flood(side, requests) if (row := _row(answer, by_text))]


def _row(answer: Answer, by_text: bool) -> tuple[str, ...]:
    """The tokens by their texts, or by their ids where these are not known, or the text of the only one."""
    if not answer.good:
        return ()
    choice = answer.choices[0]
    if choice.tokens:
        row = tuple(token.text for token in choice.tokens)
    else:
        row = (choice.text,) if by_text else tuple(map(str, choice.ids or ()))
    return () if not row or _is_end(row[0]) else row


def sampling_result(drawn: Sequence[SampledPrompt]) -> dict[str, Any]:
    """The tests as plain data; of each its statistic, degrees of freedom and p-value. Empty where nothing was drawn."""
    if not any(prompt.plain and prompt.speculative for prompt in drawn):
        return {}
    result: dict[str, Any] = {
        "prompts": len(drawn),
        "samples": min(sum(len(prompt.plain) for prompt in drawn), sum(len(prompt.speculative) for prompt in drawn)),
        "significance": SIGNIFICANCE,
        "first_tokens_between_sides": _data(_sum(homogeneity(_at(p.plain, 0), _at(p.speculative, 0)) for p in drawn)),
    }
    later = [_sum(homogeneity(_at(p.plain, place), _at(p.speculative, place)) for p in drawn) for place in _LATER]
    if any(test.df for test in later):
        worst = min(later, key=lambda test: test.p_value)
        result["later_tokens_between_sides"] = _data(worst) | {"p_value": min(1.0, worst.p_value * len(later))}
    if all(prompt.reference for prompt in drawn):
        for side in ("plain", "speculative"):
            rows = [(_at(getattr(prompt, side), 0), prompt.reference) for prompt in drawn]
            result[f"first_tokens_{side}"] = _data(_sum(goodness_of_fit(*row) for row in rows))
            if (temperature := estimate_temperature(rows)) is not None:
                result[f"temperature_{side}"] = {
                    "value": temperature.value, "error": temperature.error, "p_value": temperature.p_value,
                }  # fmt: skip
    return result


def _at(rows: Sequence[tuple[str, ...]], place: int) -> list[str]:
    return [row[place] for row in rows if len(row) > place]


def _sum(tests: Any) -> ChiSquare:
    return sum(tests, ChiSquare())


def _data(test: ChiSquare) -> dict[str, float]:
    return {"chi_square": test.statistic, "df": test.df, "p_value": test.p_value}
