"""Settings: aliases, defaults, and errors that name what is allowed."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig, SpeculationConfig
from outrider.control import FixedLength, Load
from outrider.errors import InvalidParameter


@pytest.mark.parametrize(
    ("given", "method", "model", "tokens"),
    [
        (None, "none", None, 5),
        ("ngram", "ngram", None, 5),
        ({"method": "ngram", "num_speculative_tokens": 8}, "ngram", None, 8),
        ({"model": "a/b", "num_speculative_tokens": 3}, "draft_model", "a/b", 3),
        ({"method": "draft_model", "model": "x", "draft_tokens": 2}, "draft_model", "x", 2),
        ({"model": "[ngram]", "prompt_lookup_max": 3}, "ngram", None, 5),
    ],
)
def test_spellings(given, method, model, tokens) -> None:  # type: ignore[no-untyped-def]
    config = SpeculationConfig.parse(given)
    assert (config.method, config.model, config.draft_tokens) == (method, model, tokens)


def test_options_reach_the_drafter() -> None:
    config = SpeculationConfig.parse({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    assert dict(config.options) == {"ngram_min": 1, "ngram_max": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "typo": 1}, "unknown setting 'typo'.*ngram_min"),
        ({"method": "ngram", "draft_tokens": -1}, r"draft_tokens.*\[0, 256\]"),
        ({"method": "ngram", "draft_tokens": True}, "draft_tokens"),
        ({"method": "ngram", "rule": "typical"}, "rule: unknown 'typical'; known: block, lossy_typical, match"),
        (7, "speculation: must be a method's name"),
    ],
)
def test_bad_speculation(given, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameter, match=message):
        SpeculationConfig.parse(given)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_rows", "page_size", "max_model_len"])
def test_bad_sizes(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        EngineConfig(**{name: 0})


def test_fixed_length_fits_the_room() -> None:
    plan = FixedLength(5, "block").plan(Load([9, 3, 0]))
    assert plan.lengths == (5, 3, 0)
    assert plan.keep_q
    assert not FixedLength(5).plan(Load([1])).keep_q
