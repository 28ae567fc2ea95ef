"""Text and tokens: the tokenizer, incremental detokenisation, and stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream

from outrider.errors import InvalidParameter, ModelError

__all__ = ["Span", "StopStrings", "TextStream", "Tokenizer"]


class Span(NamedTuple):
    """A token and the characters it covers; pieces of one character overlap."""

    token: int
    start: int
    end: int


class Tokenizer:
    """A fast tokenizer with its chat template."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.fast = hf_tokenizer.backend_tokenizer
        self._plain: Any = None  # a copy that knows no control tokens

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """From a model directory; None where it holds no tokenizer."""
        if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
            return None
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            return cls(AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False))
        except Exception as error:  # whatever it was, the file is at fault
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {error}") from error

    @property
    def eos_id(self) -> int | None:
        return self._hf.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the model expects around it."""
        return self._hf(text)["input_ids"]  # type: ignore[no-any-return]

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Ids of a piece of text, without special tokens."""
        return tuple(self._hf(text, add_special_tokens=False)["input_ids"])

    @property
    def chat_template(self) -> str | None:
        return self._hf.chat_template  # type: ignore[no-any-return]

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        Control tokens come from the template alone: where a message spells one, a private character stands in
        for it while the template is rendered, and its letters are encoded afterwards. `settings` are the
        template's own variables, and `tools`.
        """
        if not self._hf.chat_template:
            raise InvalidParameter("messages", "this model has no chat template; use plain prompts, or give it a template")
        tools = settings.pop("tools", None)
        veil = _Veil(self._control_tokens(), [messages, tools])
        try:
            text = self._hf.apply_chat_template(
                veil.cover(list(messages)),
                tools=veil.cover(tools),
                tokenize=False,
                **{"add_generation_prompt": True} | settings,
            )
        except Exception as error:  # templates raise what they like about messages they do not take
            raise InvalidParameter("messages", f"the chat template does not take them: {error}") from None
        ids: list[int] = []
        for piece, spelled in veil.split(text):
            ids += self._letters_of(piece) if spelled else self.encode_bare(piece)
        return ids

    def use_chat_template(self, template: str) -> None:
        """Take another chat template than the model's own."""
        self._hf.chat_template = template

    def _control_tokens(self) -> list[str]:
        return [token.content for token in self.fast.get_added_tokens_decoder().values() if token.special]

    def _letters_of(self, text: str) -> list[int]:
        """Ids of a control token's letters, which mean nothing."""
        if self._plain is None:
            self._plain = type(self.fast).from_str(self.fast.to_str())
            self._plain.encode_special_tokens = True
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if any(token.special for i, token in self.fast.get_added_tokens_decoder().items() if i in ids):
            raise InvalidParameter("messages", f"{text!r} is a control token, and this tokenizer cannot spell it")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """The whole tokenizer as tokenizers' JSON, without padding and truncation."""
        bare = copy(self.fast)
        bare.no_padding()
        bare.no_truncation()
        return bare.to_str()  # type: ignore[no-any-return]

    def table(self) -> dict[str, int]:
        """Every token and its id: two models that share it have the same tokens."""
        return self.fast.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    @cached_property
    def longest(self) -> int:
        """Letters of the longest token."""
        return max(map(len, self.table()))

    @property
    def bos_ids(self) -> list[int]:
        """What `encode` puts before every text."""
        first, around = self._hf.bos_token_id, self.encode("")
        return [first] if first is not None and around[:1] == [first] else []

    def spans(self, text: str) -> list[Span]:
        """Tokens of a piece of text with the characters they cover, without special tokens."""
        found = self.fast.encode(text, add_special_tokens=False)
        return [Span(token, *place) for token, place in zip(found.ids, found.offsets, strict=True)]

    def spellings(self) -> dict[int, tuple[bool, bytes]]:
        """What each token writes, and whether it is an added one, such as a control token.

        Byte-level tokens spell bytes, those of SentencePiece spell text with a marked space or one
        byte; tokens of other kinds are left out.
        """
        added = {i: token.content for i, token in self.fast.get_added_tokens_decoder().items()}
        state = getattr(self.fast.decoder, "__getstate__", bytes)() or b"{}"
        kinds = {part.get("type") for part in _parts(json.loads(state))}
        out: dict[int, tuple[bool, bytes]] = {}
        for token, i in self.table().items():
            if i in added:
                out[i] = True, added[i].encode()
            elif "ByteLevel" in kinds and all(letter in _letters() for letter in token):
                out[i] = False, bytes(_letters()[letter] for letter in token)
            elif kinds & {"Metaspace", "Replace"}:
                byte = re.fullmatch("<0x([0-9A-F]{2})>", token) if "ByteFallback" in kinds else None
                out[i] = False, bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
        return out


def _parts(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The letter by which byte-level tokenizers write each byte: itself where it shows, else one past 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class _Veil:
    """Private characters in place of the control tokens that messages spell."""

    def __init__(self, control: Sequence[str], seen: Any) -> None:
        self._control = sorted(control, key=len, reverse=True)
        used = set().union(*map(set, _strings(seen)))
        first = 0xF0000  # a plane of private characters; some of them nobody wrote
        while any(chr(first + i) in used for i in range(len(control))):
            first += len(control)
        self._marks = {token: chr(first + i) for i, token in enumerate(self._control)}
        self._tokens = {mark: token for token, mark in self._marks.items()}

    def cover(self, value: Any) -> Any:
        """The same with every string covered."""
        if isinstance(value, str):
            for token, mark in self._marks.items():
                value = value.replace(token, mark)
            return value
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(own) for key, own in value.items()}
        return [self.cover(own) for own in value] if isinstance(value, list | tuple) else value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Pieces of the text, and of each whether it is a covered token, now bare."""
        pieces = re.split(f"([{''.join(self._tokens)}])", text) if self._tokens else [text]
        return [(self._tokens.get(piece, piece), piece in self._tokens) for piece in pieces if piece]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _strings(key)
            yield from _strings(own)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _strings(own)


class TextStream:
    """Tokens in, text out, never half a character."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pending: list[int] = []
        # the tail of the prompt decides whether the first piece keeps its leading space
        self._stream = self._new(prompt_ids[-8:])

    def _new(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(context), skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is open."""
        try:
            piece = self._stream.step(self._tokenizer.fast, token)
        except Exception as error:
            if "prefix" not in str(error):
                raise
            # the library lost its place (ids that decode differently in context): start over here
            self._stream = self._new(())
            piece = self._stream.step(self._tokenizer.fast, token)
        if piece is None:
            self._pending.append(token)
            return ""
        self._pending.clear()
        return piece

    @property
    def pending(self) -> Sequence[int]:
        """Tokens of a character that is still open."""
        return self._pending

    def flush(self) -> str:
        """What is left at the end, open characters as U+FFFD."""
        left, self._pending = self._pending, []
        return self._tokenizer.decode(left, self._skip) if left else ""


class StopStrings:
    """Finds the first stop string to complete in growing text, and what may be shown meanwhile."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)

    def find(self, text: str, checked: int) -> tuple[int, str] | None:
        """(start, stop) of the stop string that completes first past `checked` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(checked - len(stop) + 1, 0))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[1], best[2])

    def safe(self, text: str) -> int:
        """Length of the text that no stop string can still take back."""
        for held in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - held :]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(text) - held
        return len(text)
