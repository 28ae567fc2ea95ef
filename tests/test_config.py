"""Settings: aliases, defaults, and errors that name what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import EngineConfig, SpeculationConfig, parse_method, resolve_speculation
from outrider.control import FixedLength, Load
from outrider.errors import InvalidParameter


@pytest.mark.parametrize(
    ("given", "method", "model", "tokens"),
    [
        (None, "auto", None, 256),
        (True, "auto", None, 256),
        (False, "none", None, 5),
        ({"draft_tokens": 3}, "auto", None, 3),
        ("ngram", "ngram", None, 5),
        ({"method": "ngram", "num_speculative_tokens": 8}, "ngram", None, 8),
        ({"model": "a/b", "num_speculative_tokens": 3}, "draft_model", "a/b", 3),
        ({"method": "draft_model", "model": "x", "draft_tokens": 2}, "draft_model", "x", 2),
        ({"model": "[ngram]", "prompt_lookup_max": 3}, "ngram", None, 5),
        ("eagle:24:beam=6:model=some/dir", "eagle", "some/dir", 24),
    ],
)
def test_spellings(given, method, model, tokens) -> None:  # type: ignore[no-untyped-def]
    config = SpeculationConfig.parse(given)
    assert (config.method, config.model, config.draft_tokens) == (method, model, tokens)


@pytest.mark.parametrize(
    ("speculation", "others", "settings"),
    [
        (None, {}, ("auto", None, 256, {})),
        (None, {"num_speculative_tokens": None}, ("auto", None, 256, {})),
        (None, {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, ("eagle", None, 3, {})),
        (None, {"speculative_model": "a/b", "num_speculative_tokens": 3}, ("draft_model", "a/b", 3, {})),
        (None, {"assistant_model": "a/b", "num_assistant_tokens": 4}, ("draft_model", "a/b", 4, {})),
        (None, {"prompt_lookup_num_tokens": 7}, ("ngram", None, 7, {})),
        (None, {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3}, ("ngram", None, 7, {"ngram_max": 3})),
        ("ngram", {"num_speculative_tokens": 3, "prompt_lookup_max": 5}, ("ngram", None, 3, {"ngram_max": 5})),
        ("eagle:9:beam=2", {"num_assistant_tokens": 3}, ("eagle", None, 3, {"beam": 2})),
    ],
)
def test_spellings_of_other_engines(speculation: Any, others: dict[str, Any], settings: tuple[object, ...]) -> None:
    config = resolve_speculation(speculation, others)
    assert (config.method, config.model, config.draft_tokens, dict(config.options)) == settings


@pytest.mark.parametrize(
    ("speculation", "others", "message"),
    [
        ("eagle", {"speculative_model": "a/b"}, "speculative_model: was given beside speculation; pass one"),
        ("eagle", {"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens: was given beside speculation"),
        ("eagle", {"speculative_config": {}}, "speculative_config: was given beside speculation"),
        (None, {"assistant_model": "a", "speculative_model": "b"}, "was given beside"),
        (None, {"num_assistant_tokens": 3, "num_speculative_tokens": 4}, "both mean 'draft_tokens'; pass one"),
        (None, {"speculative_config": "eagle"}, "must be a mapping"),
        (None, {"num_speculative_tokens": "x"}, "draft_tokens: must be an integer"),
    ],
)
def test_spellings_that_contradict_each_other(speculation: Any, others: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        resolve_speculation(speculation, others)


def test_options_reach_the_drafter() -> None:
    config = SpeculationConfig.parse({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    assert dict(config.options) == {"ngram_min": 1, "ngram_max": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "draft_tokens": -1}, r"draft_tokens.*\[0, 256\]"),
        ({"method": "ngram", "draft_tokens": True}, "draft_tokens"),
        ({"method": "ngram", "rule": "typical"}, "rule: unknown 'typical'; known: block, lossy_typical, match"),
        (7, "speculation: must be a method's name"),
    ],
)
def test_bad_speculation(given, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameter, match=message):
        SpeculationConfig.parse(given)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("ngram", {"method": "ngram"}),
        ("suffix:8:min_prob=0.2:branch=2", {"method": "suffix", "draft_tokens": 8, "min_prob": 0.2, "branch": 2}),
        ("package.module:Class:4:size=3", {"method": "package.module:Class", "draft_tokens": 4, "size": 3}),
        ("module:Class:model=1", {"method": "module:Class", "model": "1"}),
        ("cascade:8:levels=ngram+draft_model", {"method": "cascade", "draft_tokens": 8, "levels": ["ngram", "draft_model"]}),
        (
            "mixture:24:members=(suffix:16:min_match=2)+(cascade:levels=(ngram:4)+draft_model)",
            {
                "method": "mixture",
                "draft_tokens": 24,
                "members": [
                    {"method": "suffix", "draft_tokens": 16, "min_match": 2},
                    {"method": "cascade", "levels": [{"method": "ngram", "draft_tokens": 4}, "draft_model"]},
                ],
            },
        ),
    ],
)
def test_methods_in_one_word(text: str, settings: dict[str, object]) -> None:
    assert parse_method(text) == settings


@pytest.mark.parametrize("text", ["eagle:many", "eagle:2.5", "mixture:members=(suffix", "mixture:members=suffix)+(eagle"])
def test_words_that_are_no_methods(text: str) -> None:
    with pytest.raises(InvalidParameter, match="neither a number|do not match"):
        parse_method(text)


def test_drafters_made_of_drafters() -> None:
    config = SpeculationConfig.parse("mixture:24:members=(suffix:8)+(cascade:levels=ngram+draft_model)")
    suffix, cascade = config.nested()
    assert (suffix.method, suffix.draft_tokens) == ("suffix", 8)
    assert cascade.draft_tokens == 256  # no limit of its own
    assert [config.method for config in cascade.nested()] == ["ngram", "draft_model"]
    assert list(config.methods()) == ["mixture", "suffix", "cascade", "ngram", "draft_model"]
    assert SpeculationConfig.parse({"method": "mixture", "members": "ngram"}).nested()[0].method == "ngram"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "mixture", "members": []}, "members: must name drafters"),
        ("mixture:members=suffix+auto", "'auto' chooses among drafters itself"),
        ({"method": "cascade", "levels": []}, "levels"),
        ({"method": "cascade", "levels": ["ngram", 7]}, "7 is neither"),
        ("mixture:members=(ngram:rule=block)", "'rule' belongs to 'mixture'"),
        ("cascade:levels=ngram+(draft_model:dtype=float32)", "'dtype' belongs to 'cascade'"),
    ],
)
def test_bad_parts(given, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameter, match=message):
        SpeculationConfig.parse(given)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_rows", "page_size", "max_model_len"])
def test_bad_sizes(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        EngineConfig(**{name: 0})


def test_fixed_length_fits_the_room() -> None:
    plan = FixedLength(5, "block").plan(Load([9, 3, 0], "abc", 3, 30, 3))
    assert plan.lengths == (5, 3, 0)
    assert plan.keep_q
    assert not FixedLength(5).plan(Load([1], "a", 1, 10, 1)).keep_q
