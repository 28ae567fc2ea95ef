"""What is logged when a draft model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider import LLM
from outrider.draft.related import describe
from outrider.draft.vocabulary import SameTokens, Side, relate
from outrider.model.bundled import bundled_model
from outrider.text import Tokenizer
from tests.draft.test_vocabulary import CODE, spaced, trained


def side(directory: Path) -> Side:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return Side(directory.name, tokenizer, len(tokenizer.table()))


def test_same_shared_and_by_text(tmp_path: Path) -> None:
    target = side(trained(tmp_path / "target", CODE, 330))
    assert describe(target, target, relate(target, target)).startswith(
        f"same tokens ({target.vocab}); special tokens: same; EOS: same"
    )
    other = side(trained(tmp_path / "other", CODE, 330, end="<|stop|>"))
    text = describe(target, other, relate(target, other, "shared"))
    assert text.startswith("shared tokens: ")
    assert f"of the target's {target.vocab} tokens" in text
    assert "special tokens: differ (2: <|end|>, <|stop|>)" in text
    assert "EOS: <|end|> 0, of the draft <|stop|> 0" in text
    foreign = side(spaced(tmp_path / "foreign"))
    assert describe(target, foreign, None).startswith("by text: ")
    assert "missing" in describe(target, Side("bare", None, target.vocab), SameTokens())


def test_loading_a_draft_says_how_it_relates_and_warns_of_a_large_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        LLM(speculation="draft_model:2:adaptive=false")
        small = caplog.text
        caplog.clear()
        LLM(speculation={"method": "draft_model", "model": str(bundled_model()), "adaptive": False})
    assert "same tokens (8192); special tokens: same; EOS: same" in small
    assert "of the target's weights" not in small
    assert [record.levelname for record in caplog.records if "100 % of the target's weights" in record.message] == ["WARNING"]
