"""Incremental text: never half a character, never a leaked stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidParameter, ModelError
from outrider.text import StopStrings, TextStream, Tokenizer
from tests.support import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok")))
    assert loaded is not None
    return loaded


@given(text=st.text(min_size=1, max_size=40))
def test_streaming_text_gives_it_back(tokenizer: Tokenizer, text: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    stream = TextStream(tokenizer, [], True)
    pieces = [stream.push(token) for token in tokenizer.encode_bare(text)]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(1, 299), max_size=30))
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer, [], True)
    assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_an_open_character_waits(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_bare("é🙂")
    stream = TextStream(tokenizer, [], True)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        assert "\ufffd" not in shown
    assert shown == "é🙂"
    half = TextStream(tokenizer, [], True)
    partial = tokenizer.encode_bare("🚀")
    assert len(partial) > 1
    assert half.push(partial[0]) == ""
    assert half.flush() == "\ufffd"


TEXT = st.text(alphabet="ab", max_size=12)


@given(chunks=st.lists(TEXT, max_size=8), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_the_definition(chunks: list[str], stops: list[str]) -> None:
    """The stop that completes first wins; what was shown before never belongs to it."""
    finder, text, shown = StopStrings(stops), "", 0
    whole = "".join(chunks)
    ends = {i for i in range(1, len(whole) + 1) if any(whole[:i].endswith(stop) for stop in stops)}
    for chunk in chunks:
        checked, text = len(text), text + chunk
        found = finder.find(text, checked)
        if found is not None:
            start, stop = found
            first = min(ends)
            assert start + len(stop) == first
            assert shown <= start
            assert start == min(first - len(s) for s in stops if whole[:first].endswith(s))
            return
        assert not any(end <= len(text) for end in ends)
        shown = max(finder.safe(text), shown)
        tail = text[shown:]
        assert all(not any(s.startswith(text[i:]) for s in stops) for i in range(max(len(text) - 3, 0), shown)) or tail
    assert not ends


def test_chat_and_missing_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "[user]hi[assistant]"
    directory = write_tokenizer(tmp_path)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}')
    bare = Tokenizer.load(directory)
    assert bare is not None
    with pytest.raises(InvalidParameter, match="no chat template"):
        bare.chat([{"role": "user", "content": "hi"}])


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer in"):
        Tokenizer.load(tmp_path)
