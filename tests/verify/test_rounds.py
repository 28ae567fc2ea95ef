"""Several rounds of the engine's own verification with the real generator: the text has the target's law."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from outrider.core import Batch, Drafts, Plan, Request, Scores, Sequence
from outrider.sampling import Key, Row, SamplingParams, Stream, draw, probs_of
from outrider.sampling.noise import bits, gumbel, keys_of
from outrider.verify import verify
from tests.support.chi_square import UNLIKELY, p_value
from tests.support.enumeration import PROMPT, joint

VOCAB, LENGTH = 3, 4  # of the text whose law is tested
PARAMS = {
    "plain": SamplingParams(max_tokens=None),
    "filtered": SamplingParams(temperature=0.8, top_k=2, presence_penalty=0.4, max_tokens=None),
}
# Logits after each token, of laws that tell shared noise from independent noise.
TARGET = torch.stack([torch.tensor([0.2, 0.5, 0.3]).roll(i) for i in range(VOCAB)]).log()
DRAFTER = torch.stack([torch.tensor([0.6, 0.38, 0.02], dtype=torch.float64).roll(i) for i in range(VOCAB)]).log()


def target(params):
    """The toy target as a model of prefixes, for the expected law."""

    def model(prefix):
        history = (*PROMPT, *prefix)
        return probs_of(TARGET[history[-1]], Row(params, 0, 0, len(history), len(PROMPT), history, frozenset()))

    return model


def sampled_chains(sequences, length, stream=Stream.DRAFT):
    """Chains drawn from the drafter with noise of their own, and the laws they were drawn from."""
    chains = [[] for _ in sequences]
    laws = []
    for _ in range(length):
        q = torch.stack([DRAFTER[(seq.tokens + chain)[-1]] for seq, chain in zip(sequences, chains, strict=True)])
        keys = [
            Key(seq.request.seed, len(seq.tokens) + len(chain), seq.request.index, stream, seq.stats.rounds)
            for seq, chain in zip(sequences, chains, strict=True)
        ]
        for chain, token in zip(chains, draw(q, keys), strict=True):
            chain.append(token)
        laws.append(q.exp())
    return Drafts.chains(chains, torch.stack(laws, dim=1))


def point_chains(sequences, length):
    """The target's most probable chain: no q."""
    chains = [[] for _ in sequences]
    for _ in range(length):
        for seq, chain in zip(sequences, chains, strict=True):
            chain.append(int(TARGET[(seq.tokens + chain)[-1]].argmax()))
    return Drafts.chains(chains)


def coupled_trees(sequences, length):
    """The two largest of log q + the target's own noise at each depth, all below the largest one above."""
    trees = []
    for seq in sequences:
        tokens, parents, chain = [], [], []
        for depth in range(length):
            words = keys_of([Key(seq.request.seed, len(seq.tokens) + depth, seq.request.index)])
            score = DRAFTER[(seq.tokens + chain)[-1]].numpy() + gumbel(bits(words, VOCAB))[0]
            first, second = np.argsort(-score)[:2].tolist()
            below = 2 * depth - 2 if depth else -1
            tokens += [first, second]
            parents += [below, below]
            chain.append(first)
        trees.append((tokens, parents))
    return Drafts.trees(trees)


def scored(sequences, drafts):
    """The target's logits at every root and node."""
    rows, roots = [], []
    for seq, tree in zip(sequences, drafts.per_sequence, strict=True):
        roots.append(len(rows))
        rows += [TARGET[seq.tokens[-1]], *(TARGET[token] for token in tree.tokens)]
    return Scores(torch.stack(rows), roots)


def texts(rule, propose, params, samples, turn=1):
    """The first tokens of many sequences, and how many tokens their rounds accepted.

    The rounds are numbered in steps of `turn`; 0 leaves the number out of every key.
    """
    sequences = [Sequence(Request(str(i), PROMPT, params, i // 2, frozenset(), 10**6, index=i % 2)) for i in range(samples)]
    accepted = Counter()
    while active := [seq for seq in sequences if seq.output_len < LENGTH]:
        drafts = propose(active, 2)
        plan = Plan(tuple(drafts.counts), rule, keep_q=drafts.q is not None)
        verdicts = verify(drafts, scored(active, drafts), Batch(active, [1] * len(active)), plan)
        for seq, length, tokens in zip(active, [len(v.path) for v in verdicts], [v.tokens for v in verdicts], strict=True):
            accepted[length] += 1
            seq.tokens += tokens[: length + 1]
            seq.stats.rounds += turn
    return [tuple(seq.tokens[1 : LENGTH + 1]) for seq in sequences], accepted


def likelihood(got, params):
    """p value of texts against the target's law."""
    counts = np.zeros((VOCAB,) * LENGTH)
    for text in got:
        counts[text] += 1
    return p_value(counts, joint(target(params), LENGTH))


CASES = {
    "rejection": ("rejection", sampled_chains),
    "rejection of point drafts": ("rejection", point_chains),
    "block": ("block", sampled_chains),
    "match of coupled trees": ("match", coupled_trees),
    "match of sampled chains": ("match", sampled_chains),
}


@pytest.mark.grid(once=["case"])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_rounds_have_the_target_s_law(case, params):
    got, accepted = texts(*CASES[case], PARAMS[params], 2000)
    assert likelihood(got, PARAMS[params]) > UNLIKELY
    assert all(accepted[n] > 0 for n in range(3)), "runs of every length occur"


@pytest.mark.parametrize("params", PARAMS)
def test_match_emits_the_same_text_whatever_is_drafted(params):
    plain, _ = texts("match", lambda sequences, _: Drafts.empty(len(sequences)), PARAMS[params], 300)
    for propose in (sampled_chains, point_chains, coupled_trees):
        got, accepted = texts("match", propose, PARAMS[params], 300)
        assert got == plain
        assert accepted[2] > 0


def test_coupled_drafts_are_accepted_more_than_independent_ones():
    rates = []
    for propose in (coupled_trees, sampled_chains):
        _, accepted = texts("match", propose, PARAMS["plain"], 1000)
        rates.append(sum(n * times for n, times in accepted.items()) / accepted.total())
    assert rates[0] > rates[1] + 0.2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_share_the_correction_s_noise_are_found(rule):
    got, _ = texts(rule, partial(sampled_chains, stream=Stream.RESIDUAL), PARAMS["plain"], 2000)
    assert likelihood(got, PARAMS["plain"]) < UNLIKELY


def test_streams_that_repeat_from_round_to_round_are_found():
    """`block` looks at draws beyond what it accepts, so the next round must not meet them again."""
    got, _ = texts("block", sampled_chains, PARAMS["plain"], 6000, turn=0)
    assert likelihood(got, PARAMS["plain"]) < UNLIKELY
