"""Incremental text: never half a character, never a leaked stop string."""

from __future__ import annotations

from copy import copy
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidParameter, ModelError
from outrider.model.bundled import bundled_model
from outrider.text import StopStrings, TextStream, Tokenizer, byte_letters
from tests.support import write_tokenizer
from tests.support.examples import examples


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


@pytest.mark.parametrize("skip", [False, True])
def test_long_lists_of_ids_are_decoded_without_the_interpreter_lock(tokenizer: Tokenizer, skip: bool) -> None:
    """`decode` of tokenizers holds it for as long as it takes, `decode_batch` does not."""

    class Unlocked:
        def decode_batch(self, batch: list[list[int]], skip_special_tokens: bool) -> list[str]:
            return tokenizer.fast.decode_batch(batch, skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    ids = [1 + i % 299 for i in range(5000)]
    other = copy(tokenizer)
    other.fast = Unlocked()
    assert other.decode(ids, skip) == tokenizer.fast.decode(ids, skip_special_tokens=skip)


def test_a_token_is_decoded_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities of a long prompt name tens of thousands of tokens."""
    wanted = [tokenizer.decode([token], skip_special_tokens=False) for token in range(300)]
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **how: decoded.extend(ids) or decode(ids, **how))
    for _ in range(3):
        assert [tokenizer.token_text(token) for token in range(300)] == wanted
    assert decoded == list(range(300))


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


# what the two kinds of tokenizers make of characters, whole and cut, beside tokens that nobody wrote on purpose
LETTERS = ["a", " b", "é", "€", "🙂", "日", "\ufffd", "\n", " "]


def sentencepiece(legacy: bool) -> Tokenizer:
    """Llama's kind: marked spaces, and bytes for what has no token."""
    pieces = ["▁", "▁▁", "a", "▁a", "▁the", "é", "\ufffd", "\n", "ab", "▁b"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    fast = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens(["<s>", "</s>"])
    fast.add_tokens(["<tool>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


KINDS = ["byte level", "pyrite", "byte fallback", "metaspace"]


@pytest.fixture(scope="module")
def kinds(tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    pyrite = Tokenizer.load(bundled_model())
    assert pyrite is not None
    return dict(zip(KINDS, (tokenizer, pyrite, sentencepiece(True), sentencepiece(False)), strict=True))


@cache
def chunks_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Characters, broken characters, special tokens, ids without a token, and anything else."""
    table = tokenizer.table()
    parts = [list(tokenizer.encode_bare(letter)) for letter in LETTERS]
    if tokenizer.byte_ids:
        parts += [[table[f"<0x{byte:02X}>"] for byte in letter.encode()] for letter in LETTERS]
    part = st.sampled_from([chunk for letters in parts for chunk in (letters, letters, letters[:-1], letters[1:])])
    special = st.sampled_from([sorted(tokenizer.special_ids), [len(table) + 5]])
    return st.one_of(part, part, part, special, st.lists(st.integers(0, len(table) - 1), max_size=2))


def random_ids(tokenizer: Tokenizer, data: st.DataObject, least: int, chunks: int) -> list[int]:
    drawn = data.draw(st.lists(chunks_of(tokenizer), min_size=least, max_size=chunks))
    return [token for chunk in drawn for token in chunk] or [0] * least


def added(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The reference: the text that the ids add to the text of the prompt."""
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    shared = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    return whole[shared:]


@pytest.mark.parametrize("kind", KINDS)
@examples(300)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_what_the_tokens_add_to_the_prompt(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = kinds[kind]
    prompt, ids = random_ids(tokenizer, data, 1, 6), random_ids(tokenizer, data, 0, 12)
    stream = TextStream(tokenizer, prompt, skip)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == added(tokenizer, prompt, ids, skip)
    assert not stream.pending


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_prompt_is_not_repeated(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]

    def spelled(text: str) -> list[int]:
        """Byte by byte, whatever the tokenizer would merge."""
        table = tokenizer.table()
        letters = {byte: letter for letter, byte in byte_letters().items()}
        return [table[f"<0x{byte:02X}>"] if tokenizer.byte_ids else table[letters[byte]] for byte in text.encode()]

    def after(prompt: list[int], ids: list[int]) -> str:
        stream = TextStream(tokenizer, prompt, True)
        return "".join(map(stream.push, ids)) + stream.flush()

    word = list(tokenizer.encode_bare("a"))
    assert after([*word, *spelled("\ufffd")], word) == "a"
    assert after([*word, *spelled("é")[:1]], word) == "a", "its U+FFFD is the prompt's"
    assert after([*word, *spelled("é")[:1]], spelled("é")[1:]) == "é", "who completes a character has written it"
    assert after([*word, *spelled("🙂")[:2]], spelled("🙂")[2:3]) in ("", "\ufffd")


@pytest.mark.parametrize("kind", ["byte fallback", "metaspace"])
def test_a_long_run_of_bytes_is_written_as_it_comes(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    text = "日本語🙂é " * 60
    ids = [tokenizer.table()[f"<0x{byte:02X}>"] for byte in text.encode()]
    stream = TextStream(tokenizer, [4], True)
    shown, held = "", 0
    for token in ids:
        shown += stream.push(token)
        held = max(held, len(stream.pending))
    assert held <= 70
    assert shown + stream.flush() == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_long_the_text_is(kinds: dict[str, Tokenizer], kind: str) -> None:
    """Each token decodes only a few tokens around it, whatever they are."""
    tokenizer = kinds[kind]
    broken = tokenizer.table()["<0xFF>" if tokenizer.byte_ids else "ÿ"]
    word, special = tokenizer.encode_bare("a")[0], min(tokenizer.special_ids)
    for ids in ([word], [broken, word], [word, special, special], [broken] if not tokenizer.byte_ids else [word]):
        stream, decoded = TextStream(tokenizer, [word], True), []
        decode = stream._decode
        stream._decode = lambda tokens, decode=decode, seen=decoded: seen.append(len(tokens)) or decode(tokens)  # type: ignore
        for token in ids * 300:
            stream.push(token)
        assert sum(decoded) < 40 * 300 * len(ids)


TEXT = st.text(alphabet="ab", max_size=12)


@given(chunks=st.lists(TEXT, max_size=8), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_the_definition(chunks: list[str], stops: list[str]) -> None:
    """The stop string that completes first wins, and no part of it was shown before."""
    finder, text, shown = StopStrings(stops), "", 0
    whole = "".join(chunks)
    ends = {i for i in range(1, len(whole) + 1) if any(whole[:i].endswith(stop) for stop in stops)}
    for chunk in chunks:
        checked, text = len(text), text + chunk
        match = finder.find(text, checked)
        if match is not None:
            start, stop = match
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
