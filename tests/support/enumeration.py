"""Toy models small enough to enumerate, and the exact law of the text a rule makes of them.

A model is a function from a prefix (tuple of tokens) to the law of the next token, (V,) float64.
"""

from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.sampling import Row, SamplingParams, probs_of

PARAMS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "warm, top_k": SamplingParams(temperature=1.4, top_k=2),
    "cool, top_p": SamplingParams(temperature=0.8, top_p=0.7),
    "every filter": SamplingParams(temperature=1.1, top_k=3, top_p=0.85, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3, top_p=0.9),
    "greedy": SamplingParams(temperature=0.0),
}
PROMPT = (0,)


def dirichlet(vocab, seed):
    """A model of random conditionals."""

    @cache
    def model(prefix):
        rng = np.random.default_rng([seed, vocab, len(prefix), *prefix])
        return torch.from_numpy(rng.dirichlet(np.ones(vocab)))

    return model


def processed(model, params):
    """A model seen through the engine's own sampling parameters."""

    @cache
    def target(prefix):
        history = (*PROMPT, *prefix)
        row = Row(params, 0, 0, len(history), len(PROMPT), history, frozenset())
        return probs_of(model(prefix).log(), row)

    return target


def drafters(target, vocab, seed):
    """Drafters of every kind for a target: unrelated, close, equal, deterministic, half blind."""
    free = dirichlet(vocab, seed)
    seen = (torch.arange(vocab) % 2).double()
    return {
        "free": free,
        "near": lambda prefix: 0.7 * target(prefix) + 0.3 * free(prefix),
        "same": target,
        "point": lambda prefix: torch.eye(vocab, dtype=torch.float64)[int(free(prefix).argmax())],
        "narrow": lambda prefix: free(prefix) * seen / (free(prefix) * seen).sum(),
    }


class Rule(NamedTuple):
    """A verification rule: `acceptance(p, q, tokens)` and `count(acceptance, coins)`."""

    acceptance: Any
    count: Any


def judged(rule, target, drafter, tokens):
    """The rule's verdict on one draft, before its coins."""
    prefixes = [tuple(tokens[:i]) for i in range(len(tokens) + 1)]
    p = torch.stack([target(prefix) for prefix in prefixes])
    q = torch.stack([drafter(prefix) for prefix in prefixes[:-1]])
    return rule.acceptance(p, q, torch.tensor(tokens))


def drafts(drafter, vocab, length):
    """Every draft with its chance."""
    for tokens in product(range(vocab), repeat=length):
        chance = prod(float(drafter(tokens[:i])[token]) for i, token in enumerate(tokens))
        if chance > 0:
            yield tokens, chance


def counts(rule, verdict):
    """Every outcome of the coins: how many tokens it accepts, and its chance."""
    chances = verdict.accept.tolist()
    for fates in product((True, False), repeat=len(chances)):
        weight = prod(a if kept else 1 - a for a, kept in zip(chances, fates, strict=True))
        if weight > 0:
            coins = [a / 2 if kept else (1 + a) / 2 for a, kept in zip(chances, fates, strict=True)]
            yield rule.count(verdict, torch.tensor(coins, dtype=torch.float64)), weight


def emitted(rule, target, drafter, vocab, length):
    """{text of one round: chance}."""
    texts = {}
    for tokens, chance in drafts(drafter, vocab, length):
        verdict = judged(rule, target, drafter, tokens)
        after = verdict.next.tolist()
        for accepted, weight in counts(rule, verdict):
            for token in range(vocab):
                text = (*tokens[:accepted], token)
                texts[text] = texts.get(text, 0.0) + chance * weight * after[accepted][token]
    return texts


def continued(texts, target, length):
    """The law of texts after the target sampled them on to a length, as an array of V^length."""
    level = {(): texts.get((), 0.0)}
    for _ in range(length):
        level = {
            (*text, token): texts.get((*text, token), 0.0) + chance * p
            for text, chance in level.items()
            for token, p in enumerate(target(text).tolist())
        }
    return np.array([level[text] for text in sorted(level)])


def joint(target, length):
    """The target's own law over texts of a length."""
    return continued({(): 1.0}, target, length)


def error(rule, target, drafter, vocab, length):
    """How far the law of one round, continued by the target, is from the target's own."""
    texts = emitted(rule, target, drafter, vocab, length)
    got = continued(texts, target, length + 1)
    return float(np.abs(got - joint(target, length + 1)).max())
