"""The target's distribution against a naive reference that ranks the whole row in Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Request, Sequence
from outrider.sampling import Row, SamplingParams, probs_of, process
from tests.support.examples import examples

INF = float("inf")
SLACK = 1e-6  # of a cut-off: float32 exp and float64 exp may differ about a token that lies on it


def adjusted(logits, row):
    """Steps before temperature, one token at a time in float32."""
    p, x = row.params, logits.astype(np.float32).copy()
    output = list(row.history[row.prompt_len :])
    for token in range(len(x)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            x[token] = -INF
        for word in p.bad_word_ids:
            if word[-1] == token and (len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]):
                x[token] = -INF
        if token in row.stop_ids and row.position - row.prompt_len < p.min_tokens:
            x[token] = -INF
        x[token] += np.float32((p.logit_bias or {}).get(token, 0.0))
        if token in row.history and p.repetition_penalty != 1.0:
            penalty = np.float32(p.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        if times := output.count(token):
            x[token] -= np.float32(p.frequency_penalty) * np.float32(times)
            x[token] -= np.float32(p.presence_penalty)
    return x


def kept(x, min_p, top_k, top_p):
    """Tokens that survive the three filters, in order of rank. x is already divided by temperature."""
    ranked = sorted((i for i in range(len(x)) if x[i] > -INF), key=lambda i: (-x[i], i))
    if not ranked:
        return []
    weight = {i: math.exp(float(x[i]) - float(x[ranked[0]])) for i in ranked}
    ranked = [i for i in ranked if weight[i] >= min_p] or ranked[:1]
    if top_k > 0:
        ranked = ranked[:top_k]
    total, before, out = math.fsum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if top_p < 1 and out and before >= top_p * total:
            break
        out.append(i)
        before += weight[i]
    return out


def check(logits, row):
    """Compare `process` with the reference; tokens on a cut-off to within rounding may go either way."""
    p = row.params
    got = process(torch.from_numpy(logits.copy()), row).numpy()
    want = adjusted(logits, row)
    if p.greedy:
        assert np.array_equal(got, want)
        return
    want = want / np.float32(p.temperature)
    narrowest = kept(want, p.min_p * (1 + SLACK), p.top_k, p.top_p * (1 - SLACK) if p.top_p < 1 else 1.0)
    widest = kept(want, p.min_p * (1 - SLACK), p.top_k, min(p.top_p * (1 + SLACK), 1.0))
    survivors = np.flatnonzero(got > -INF).tolist()
    assert sorted(narrowest) == survivors or (len(narrowest) < len(widest) and set(narrowest) <= set(survivors) <= set(widest))
    assert np.array_equal(got[survivors], want[survivors])


SHAPES = {
    "normal": lambda rng, v: rng.normal(size=v) * 2,
    "peaked": lambda rng, v: rng.normal(size=v) * 8,
    "flat": lambda _, v: np.zeros(v),
    "nearly flat": lambda rng, v: rng.normal(size=v) * 1e-3,
    "ties": lambda rng, v: rng.integers(-2, 3, size=v),
    "two heights": lambda rng, v: np.where(rng.random(v) < 0.7, 1.0, -1.0),
    "holes": lambda rng, v: np.where(rng.random(v) < 0.5, -INF, rng.normal(size=v)),
}


@st.composite
def cases(draw):
    vocab = draw(st.sampled_from([2, 3, 5, 9, 17, 257, 300, 700, 2500]))
    shape = draw(st.sampled_from(sorted(SHAPES)))
    logits = SHAPES[shape](np.random.default_rng(draw(st.integers(0, 10_000))), vocab).astype(np.float32)
    token = st.integers(0, min(vocab, 20) - 1)
    history = tuple(draw(st.lists(token, min_size=1, max_size=12)))
    prompt_len = draw(st.integers(1, len(history)))
    some = st.booleans()
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 1.0, 1.3, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 0, 1, 2, 5, 100, 256, 257, 400, 5000])),
        top_p=draw(st.one_of(st.just(1.0), st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999]), st.floats(0.01, 0.999))),
        min_p=draw(st.one_of(st.just(0.0), st.sampled_from([1e-9, 0.05, 0.5, 1.0]), st.floats(0.001, 0.9))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.4])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.3, 0.5, 100.0]), max_size=4)) or None,
        allowed_token_ids=draw(st.lists(token, min_size=1, max_size=12)) if draw(some) and draw(some) else None,
        min_tokens=draw(st.sampled_from([0, 0, 3, 100])),
        max_tokens=None,
        bad_word_ids=tuple(tuple(w) for w in draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=4))),
    )
    stop_ids = frozenset(draw(st.lists(token, max_size=3)))
    return logits, Row(params, 0, 0, len(history), prompt_len, history, stop_ids)


@given(cases())
@examples(600)
def test_process_equals_the_reference(case):
    check(*case)


def row_of(params, history=(1, 2), prompt_len=1, stop_ids=frozenset({0})):
    return Row(params, 0, 0, len(history), prompt_len, history, stop_ids)


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [256, 257, 2049, 4999])
@pytest.mark.parametrize("top_p", [0.03, 0.3, 0.5, 0.95, 0.99999])
def test_the_shortlist_grows_as_far_as_it_must(shape, vocab, top_p):
    logits = SHAPES[shape](np.random.default_rng(vocab), vocab).astype(np.float32)
    for others in ({}, {"top_k": vocab // 2}, {"min_p": 0.2}):
        check(logits, row_of(SamplingParams(top_p=top_p, **others)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_on_a_cut_off_go_to_the_lowest_ids(dtype):
    flat = torch.zeros(1000, dtype=dtype)

    def survivors(**params):
        return torch.nonzero(process(flat, row_of(SamplingParams(**params))) > -INF).flatten().tolist()

    assert survivors(top_k=3) == [0, 1, 2]
    assert survivors(top_k=999) == list(range(999))
    assert survivors(top_p=0.5) == list(range(500))
    assert survivors(top_p=0.5001) == list(range(501))
    assert survivors(top_p=1e-9) == [0]
    assert survivors(min_p=1.0) == list(range(1000))
    assert survivors(top_k=10, top_p=0.5) == [0, 1, 2, 3, 4]
    stairs = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 2.0], dtype=dtype)
    for top_k, want in ((1, [1]), (2, [1, 3]), (4, [1, 2, 3, 5])):
        out = process(stairs, row_of(SamplingParams(top_k=top_k)))
        assert torch.nonzero(out > -INF).flatten().tolist() == want


def test_order_of_the_steps():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    # a positive bias turns the sign before the repetition penalty looks at it
    out = process(torch.tensor([-1.0, 0.0]), row_of(SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0), history=(0,)))
    assert out.tolist() == [1.0, 0.0]
    # min_p sees the distribution after temperature: exp(-1/0.5) = 0.135, exp(-2/0.5) = 0.018
    out = process(logits, row_of(SamplingParams(temperature=0.5, min_p=0.1)))
    assert out.tolist() == [6.0, 4.0, -INF, -INF]
    # top_p shares out what top_k left: 0.731, 0.269
    out = process(logits, row_of(SamplingParams(top_k=2, top_p=0.73)))
    assert out.tolist() == [3.0, -INF, -INF, -INF]
    out = process(logits, row_of(SamplingParams(top_p=0.73)))
    assert out.tolist() == [3.0, 2.0, -INF, -INF]
    # a removed token stays removed whatever its bias
    out = process(logits, row_of(SamplingParams(allowed_token_ids=[1, 2], logit_bias={0: 100.0})))
    assert out.tolist() == [-INF, 2.0, 1.0, -INF]


def test_repetition_counts_the_prompt_and_the_other_penalties_the_output():
    history, logits = (1, 1, 2, 2, 3), torch.full((5,), 4.0)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    out = process(logits, row_of(params, history=history, prompt_len=2))
    assert out.tolist() == [4.0, 2.0, 1.0, 1.25, 4.0]


def test_a_bad_word_is_banned_only_where_it_would_end_in_the_output():
    logits = torch.zeros(6)
    params = SamplingParams(bad_word_ids=((5,), (1, 2), (3, 4, 0)))

    def banned(history, prompt_len):
        return torch.nonzero(process(logits, row_of(params, history, prompt_len)) == -INF).flatten().tolist()

    assert banned((0,), 1) == [5]
    assert banned((0, 1), 1) == [2, 5]
    assert banned((0, 3, 4), 1) == [0, 5]
    assert banned((0, 4), 1) == [5]
    assert banned((3, 4), 1) == [5]
    assert banned((0, 1), 2) == [5]


def test_min_tokens_bans_stops_up_to_that_many():
    params = SamplingParams(min_tokens=2)
    for length, removed in ((1, True), (2, True), (3, False)):
        out = process(torch.zeros(3), row_of(params, history=(1,) * length, stop_ids=frozenset({0, 2})))
        assert (out == -INF).tolist() == [removed, False, removed]


def test_greedy_ignores_truncation_and_keeps_the_input():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    assert torch.equal(process(logits, row_of(SamplingParams(temperature=0.0, top_k=1, top_p=0.1))), before)
    process(logits, row_of(SamplingParams(top_k=3, logit_bias={1: 2.0}, repetition_penalty=1.5)))
    assert torch.equal(logits, before)


def test_penalties_without_history():
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0)
    assert process(torch.ones(3), row_of(params, history=(), prompt_len=0)).tolist() == [1.0, 1.0, 1.0]


def test_probs_are_the_softmax_of_the_processed_row():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(2))
    row = row_of(SamplingParams(temperature=0.7, top_p=0.6, presence_penalty=1.0))
    probs = probs_of(logits, row)
    processed = process(logits, row).double().numpy()
    weights = np.exp(processed - processed.max())
    assert probs.dtype == torch.float64
    assert np.abs(probs.numpy() - weights / weights.sum()).max() < 1e-15
    point = probs_of(logits, row_of(SamplingParams(temperature=0.0)))
    assert point.sum() == 1
    assert int(point.argmax()) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("broken", [[0.0, float("nan")], [-INF, -INF], [INF, 0.0]])
def test_probs_of_a_broken_row_are_nan(temperature, broken):
    assert probs_of(torch.tensor(broken), row_of(SamplingParams(temperature=temperature))).isnan().any()


def test_row_at_a_drafted_path():
    params = SamplingParams(presence_penalty=1.0)
    request = Request("r", (4, 5), params, 77, frozenset({9}), 10, index=3)
    seq = Sequence(request)
    seq.tokens.append(6)
    assert Row.at(seq, [7, 8]) == Row(params, 77, 3, 5, 2, [4, 5, 6, 7, 8], frozenset({9}))
    plain = Sequence(Request("r", (4, 5), SamplingParams(), 77, frozenset(), 10))
    assert Row.at(plain, [7]).history == ()
    assert Row.at(plain, [7]).position == 3
