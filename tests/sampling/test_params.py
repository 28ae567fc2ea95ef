"""SamplingParams: every bad value is refused by name, good ones are kept as vLLM means them."""

import dataclasses

import pytest

from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")

BAD = {
    "n": [0, -1, 129, 1.5, "2", None, True],
    "temperature": [-0.1, 100.5, NAN, INF, -INF, "1", None, True, 10**400],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INF, "0.9", None, False],
    "top_k": [-2, 2.0, "5", None, True, 2**31],
    "min_p": [-0.01, 1.01, NAN, "0", None],
    "repetition_penalty": [0, 0.0, -1.0, NAN, INF, None, "1"],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, None],
    "logit_bias": [
        {-1: 1.0}, {0: 101.0}, {0: -100.5}, {0: NAN}, {0: INF}, {0: "a"}, {0: None}, {0: True}, {0: 10**400},
        {"x": 1.0}, {"-1": 1.0}, {1.5: 1.0}, {True: 1.0}, {None: 1.0}, {2**31: 1.0}, [1, 2], 3, "5",
    ],
    "seed": [2**63, -(2**63) - 1, 1.0, "1", True],
    "stop": [5, b"x", [""], "", ["a", 3], {"a": 1}, [None]],
    "stop_token_ids": [5, "12", [-1], [1.0], ["1"], [2**31], [True], {1: 2}],
    "include_stop_str_in_output": ["no", 1, None],
    "bad_words": ["abc", 4, [""], [7], [None]],
    "allowed_token_ids": [3, "ab", [], [-1], [0.5], [None], [False]],
    "min_tokens": [-1, 1.0, None, "1", True, 17],
    "max_tokens": [0, -1, 1.0, "5", True, 2**31],
    "ignore_eos": ["no", 0, None],
    "logprobs": [-1, 101, 1.0, "1", True],
    "prompt_logprobs": [-1, 101, 1.0, "1", True],
    "skip_special_tokens": [None, 1, "yes"],
    "num_speculative_tokens": [-1, 257, 1.0, "1", True],
    "prompt_lookup_num_tokens": [-1, 257, 1.0, "1", True],
    "structured": ["json", {"type": "object"}, True],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert str(error.value).startswith(f"{name}: ")


def test_the_table_names_every_field():
    fields = {field.name for field in dataclasses.fields(SamplingParams) if field.init} - {"bad_word_ids"}
    assert set(BAD) == fields


GOOD = [
    {"n": 128}, {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 10**9},
    {"min_p": 0}, {"min_p": 1.0}, {"repetition_penalty": 0.5}, {"presence_penalty": -2}, {"frequency_penalty": 2.0},
    {"seed": 0}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"stop": "a"}, {"stop": []}, {"stop": ("a", "b")},
    {"stop_token_ids": {3}}, {"stop_token_ids": None}, {"bad_words": ["x y"]}, {"allowed_token_ids": [0]},
    {"min_tokens": 16}, {"min_tokens": 100, "max_tokens": None}, {"max_tokens": 1}, {"logprobs": 0}, {"prompt_logprobs": 100},
    {"logit_bias": {}}, {"logit_bias": None},
]  # fmt: skip


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_good_values_are_kept(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        if isinstance(value, int | float):
            assert getattr(params, name) == value


def test_lists_become_tuples_and_biases_a_sorted_map():
    params = SamplingParams(stop="a", stop_token_ids=[2, 1], bad_words=["b"], allowed_token_ids=[4], logit_bias={"7": 1, 3: -2})
    assert params.stop == params.stop_strings == ("a",)
    assert params.stop_token_ids == (2, 1)
    assert params.bad_words == ("b",)
    assert params.allowed_token_ids == (4,)
    assert list(params.logit_bias.items()) == [(3, -2.0), (7, 1.0)]
    assert SamplingParams().stop == SamplingParams().stop_token_ids == SamplingParams().bad_words == ()


def test_min_tokens_is_measured_against_max_tokens():
    with pytest.raises(InvalidParameter, match="max_tokens 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize(
    ("values", "adjusts", "truncates", "history"),
    [
        ({}, False, False, False),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, False, False, False),
        ({"top_k": 1}, False, True, False),
        ({"top_p": 0.99}, False, True, False),
        ({"min_p": 0.01}, False, True, False),
        ({"repetition_penalty": 1.1}, True, False, True),
        ({"presence_penalty": -0.1}, True, False, True),
        ({"frequency_penalty": 0.1}, True, False, True),
        ({"bad_word_ids": ((1,),)}, True, False, True),
        ({"logit_bias": {1: 1.0}}, True, False, False),
        ({"allowed_token_ids": [1]}, True, False, False),
        ({"min_tokens": 1}, True, False, False),
    ],
)
def test_derived_flags(values, adjusts, truncates, history):
    params = SamplingParams(**values)
    assert (params.adjusts, params.truncates, params.uses_history) == (adjusts, truncates, history)
