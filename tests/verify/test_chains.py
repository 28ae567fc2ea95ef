"""`rejection` and `block` on chains: the emitted text has the target's law, and wrong rules do not."""

import math

import numpy as np
import pytest
import torch

from outrider.sampling import CORRUPTED, Key, Stream, draw, uniform
from outrider.verify import block, rejection
from outrider.verify.rejection import AcceptanceTest
from tests.support.chi_square import UNLIKELY, p_value
from tests.support.enumeration import PARAMS, Rule, counts, dirichlet, drafters, drafts, error, judged, processed

RULES = {"rejection": Rule(rejection.acceptance, rejection.count), "block": Rule(block.acceptance, block.count)}
SIZES = [(vocab, length) for vocab in (2, 3, 4) for length in (1, 2, 3)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("rule", RULES)
def test_the_text_has_the_target_s_law(rule, params):
    for vocab, length in SIZES:
        target = processed(dirichlet(vocab, seed=length), PARAMS[params])
        for kind, drafter in drafters(target, vocab, seed=90 + length).items():
            assert error(RULES[rule], target, drafter, vocab, length) < 1e-12, (vocab, length, kind)


def _accept_always(rule):
    def acceptance(p, q, tokens):
        test = rule.acceptance(p, q, tokens)
        return AcceptanceTest(torch.ones_like(test.accept), test.next)

    return Rule(acceptance, rule.count)


def _with_next(rule, change):
    def acceptance(p, q, tokens):
        test = rule.acceptance(p, q, tokens)
        return AcceptanceTest(test.accept, change(test.next.clone(), p, q))

    return Rule(acceptance, rule.count)


def _with_inputs(rule, change):
    return Rule(lambda p, q, tokens: rule.acceptance(*change(p, q), tokens), rule.count)


def _tempered(q, temperature):
    return torch.softmax(q.log() / temperature, -1)


MUTANTS = {
    "accepts always": _accept_always,
    "corrects from p": lambda rule: _with_next(rule, lambda _after, p, _q: p),
    "residual not normalised": lambda rule: _with_next(rule, lambda _after, p, q: torch.cat([(p[:-1] - q).clamp(min=0), p[-1:]])),
    "corrects from q": lambda rule: _with_next(rule, lambda after, _p, q: torch.cat([q, after[-1:]])),
    "p one late": lambda rule: _with_inputs(rule, lambda p, q: (torch.cat([p[1:], p[-1:]]), q)),
    "p one early": lambda rule: _with_inputs(rule, lambda p, q: (torch.cat([p[:1], p[:-1]]), q)),
    "q one late": lambda rule: _with_inputs(rule, lambda p, q: (p, torch.cat([q[1:], q[-1:]]))),
    "q from a lower temperature": lambda rule: _with_inputs(rule, lambda p, q: (p, _tempered(q, 0.8))),
    "q from a higher temperature": lambda rule: _with_inputs(rule, lambda p, q: (p, _tempered(q, 1.25))),
    "p and q swapped": lambda rule: _with_inputs(rule, lambda p, q: (torch.cat([q, p[-1:]]), p[:-1])),
    "bonus from q": lambda rule: _with_next(rule, lambda after, _p, q: torch.cat([after[:-1], q[-1:]])),
    "bonus from the last residual": lambda rule: _with_next(rule, lambda after, _p, _q: torch.cat([after[:-1], after[-2:-1]])),
}


def _worst(rule):
    """The error over a few models."""
    pairs = [(processed(dirichlet(4, seed), PARAMS["plain"]), dirichlet(4, seed + 40)) for seed in range(7)]
    return max(error(rule, target, drafter, 4, 2) for target, drafter in pairs)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("rule", RULES)
def test_wrong_rules_are_found(rule, mutant):
    assert _worst(RULES[rule]) < 1e-12
    assert _worst(MUTANTS[mutant](RULES[rule])) > 1e-3


BLOCK_MUTANTS = {
    "stops at the first failure": Rule(block.acceptance, rejection.count),
    "residual with r = 1": Rule(
        lambda *args: AcceptanceTest(block.acceptance(*args).accept, rejection.acceptance(*args).next), block.count
    ),
    "coins of token-level rejection": Rule(
        lambda *args: AcceptanceTest(rejection.acceptance(*args).accept, block.acceptance(*args).next), block.count
    ),
}


@pytest.mark.parametrize("mutant", BLOCK_MUTANTS)
def test_wrong_block_rules_are_found(mutant):
    assert _worst(BLOCK_MUTANTS[mutant]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_is_plain_sampling(rule):
    p = torch.tensor([[0.2, 0.8]], dtype=torch.float64)
    verdict = RULES[rule].acceptance(p, torch.empty((0, 2), dtype=torch.float64), torch.empty(0, dtype=torch.int64))
    assert RULES[rule].count(verdict, torch.empty(0, dtype=torch.float64)) == 0
    assert torch.equal(verdict.next, p)


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_accept_everything_and_fall_back_to_p(rule):
    p = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
    verdict = RULES[rule].acceptance(p, p[:-1], torch.tensor([1, 0]))
    assert verdict.accept.tolist() == [1.0, 1.0]
    assert torch.equal(verdict.next, p)
    assert RULES[rule].count(verdict, torch.tensor([0.99, 0.99], dtype=torch.float64)) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_token_q_could_not_draw_is_refused(rule):
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    verdict = RULES[rule].acceptance(p, q, torch.tensor([1]))
    assert verdict.accept.tolist() == [0.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_broken_target_row_is_told_and_never_passed(rule, broken):
    p = torch.full((3, 2), 0.5, dtype=torch.float64)
    p[broken] = float("nan")
    q = torch.full((2, 2), 0.5, dtype=torch.float64)
    verdict = RULES[rule].acceptance(p, q, torch.tensor([0, 1]))
    accepted = RULES[rule].count(verdict, torch.full((2,), 1e-9, dtype=torch.float64))
    assert accepted <= broken
    assert draw(verdict.next[broken].log()[None], [Key(0, 0)]) == [CORRUPTED]


def test_counts_by_hand():
    verdict = AcceptanceTest(torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64), torch.empty((4, 2)))
    table = {
        (0.1, 0.1, 0.1): (3, 3),
        (0.1, 0.9, 0.1): (1, 3),
        (0.9, 0.1, 0.9): (0, 2),
        (0.9, 0.9, 0.9): (0, 0),
        (0.5, 0.6, 0.9): (1, 1),
    }
    for coins, want in table.items():
        tossed = torch.tensor(coins, dtype=torch.float64)
        assert (rejection.count(verdict, tossed), block.count(verdict, tossed)) == want


@pytest.mark.parametrize("params", PARAMS)
def test_rejection_accepts_each_position_with_one_minus_total_variation(params):
    target = processed(dirichlet(4, seed=1), PARAMS[params])
    for drafter in drafters(target, 4, seed=2).values():
        chances = [0.0, 0.0]
        for tokens, chance in drafts(drafter, 4, 2):
            accept = judged(RULES["rejection"], target, drafter, tokens).accept.tolist()
            chances[0] += chance * accept[0]
            if tokens[0] == 0:
                chances[1] += chance * accept[1]
        reach = float(drafter(())[0])
        for prefix, got, weight in (((), chances[0], 1.0), ((0,), chances[1], reach)):
            overlap = float(torch.minimum(target(prefix), drafter(prefix)).sum())
            assert got == pytest.approx(weight * overlap, abs=1e-12)


def _accepted(rule, target, drafter, vocab, length):
    """Chances that at least 1, 2, .. K tokens are accepted."""
    at_least = np.zeros(length + 1)
    for tokens, chance in drafts(drafter, vocab, length):
        verdict = judged(rule, target, drafter, tokens)
        for accepted, weight in counts(rule, verdict):
            at_least[: accepted + 1] += chance * weight
    return at_least[1:]


def test_block_accepts_what_theory_says_and_never_less_than_rejection():
    gains = []
    for seed in range(12):
        vocab, length = 2 + seed % 3, 1 + seed % 3
        target = processed(dirichlet(vocab, seed), PARAMS["cool, top_p" if seed % 2 else "plain"])
        for kind, drafter in drafters(target, vocab, seed + 50).items():
            token, whole = (_accepted(RULES[name], target, drafter, vocab, length) for name in ("rejection", "block"))
            running = np.zeros(length)
            for tokens, chance in drafts(drafter, vocab, length):
                r = 1.0
                for i, x in enumerate(tokens):
                    r = min(1.0, r * float(target(tokens[:i])[x] / drafter(tokens[:i])[x]))
                    running[i] += chance * r
            assert whole == pytest.approx(running, abs=1e-12)
            assert whole.sum() >= token.sum() - 1e-12
            if length == 1 or kind == "point":
                assert whole == pytest.approx(token, abs=1e-12)
            elif kind == "free":
                gains.append(whole.sum() - token.sum())
    assert max(gains) > 0.01


P, Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)


def _one_round(rule, residual_stream, samples=20_000):
    """First tokens of many rounds with the real generator."""

    def noise(law, stream):
        return draw(law.log(), [Key(seed, 7, 0, stream, 3) for seed in range(samples)])

    drafted = noise(Q.expand(samples, -1), Stream.DRAFT)
    verdicts = [rule.acceptance(torch.stack([P, P]), Q[None], torch.tensor([x])) for x in range(3)]
    corrected = noise(verdicts[0].next[0].expand(samples, -1), residual_stream)
    out = np.zeros(3)
    for seed, (x, y) in enumerate(zip(drafted, corrected, strict=True)):
        coin = torch.tensor([uniform(Key(seed, 7, 0, Stream.COIN, 3))], dtype=torch.float64)
        out[x if rule.count(verdicts[x], coin) else y] += 1
    return out


@pytest.mark.parametrize("rule", RULES)
def test_noise_shared_by_draft_and_residual_is_found(rule):
    assert p_value(_one_round(RULES[rule], Stream.RESIDUAL), P) > UNLIKELY
    shared = _one_round(RULES[rule], Stream.DRAFT)
    assert p_value(shared, P) < UNLIKELY
    assert shared / shared.sum() == pytest.approx([0.201, 0.444, 0.355], abs=5 * math.sqrt(0.25 / shared.sum()))
