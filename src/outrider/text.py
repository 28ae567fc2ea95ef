"""Text and tokens: the tokenizer, incremental detokenisation, and stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from outrider import checks
from outrider.errors import InvalidParameter, ModelError
from outrider.gguf import Gguf, find_gguf, read_tokenizer

__all__ = ["Span", "StopStrings", "TextStream", "Tokenizer", "byte_letters"]

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_UNKNOWN = "\ufffd"
_CONTEXT = 4  # tokens decoded before those that are new
_LONGEST_CHARACTER = 4  # bytes, and so tokens
_LONG_RUN = 64  # byte-fallback tokens
_LONG = 1024  # tokens: more are decoded as a batch, which lets go of the interpreter lock


class Span(NamedTuple):
    """A token and the characters it covers. Tokens of one character overlap."""

    token: int
    start: int
    end: int


class Tokenizer:
    """A fast tokenizer with its chat template."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.fast = hf_tokenizer.backend_tokenizer
        self.reasoning_parser = "auto"  # how the server separates reasoning: serve/reasoning.py has the names
        self._plain: Any = None  # a copy that knows no control tokens
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """From a model directory or a GGUF file; None where it holds no tokenizer."""
        if (gguf := find_gguf(directory)) is not None:
            found = read_tokenizer(Gguf(gguf))
            return None if found is None else cls(found)
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
        return self._ids(checks.text("prompt", text), add_special_tokens=True)

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Ids of a part of a text, without special tokens."""
        return tuple(self._ids(text, add_special_tokens=False))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of parts of texts, on all cores, without special tokens."""
        try:
            return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as error:  # as in `_ids`
            raise InvalidParameter("corpus", f"this model's tokenizer cannot encode the text: {error}") from None

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._hf(text, add_special_tokens=add_special_tokens)["input_ids"]  # type: ignore[no-any-return]
        except Exception as error:  # tokenizers raise what they like about text outside their vocabulary
            raise InvalidParameter("prompt", f"this model's tokenizer cannot encode the text: {error}") from None

    @property
    def chat_template(self) -> str | None:
        return self._hf.chat_template  # type: ignore[no-any-return]

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_chars: int | None = None, **settings: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        Control tokens come from the template alone. Where a message spells one, a private character replaces it while the
        template is rendered, and its letters are encoded afterwards. `settings` are variables of the template, and `tools`.
        A text of more than `max_chars` characters is refused before it is encoded.
        """
        if not self._hf.chat_template:
            raise InvalidParameter("messages", "this model has no chat template; use plain prompts, or give it a template")
        tools = settings.pop("tools", None)
        escape = _ControlTokenEscape(self._control_tokens(), [messages, tools, settings])
        try:
            text = self._hf.apply_chat_template(
                escape.hide(list(messages)),
                tools=escape.hide(tools),
                tokenize=False,
                **{"add_generation_prompt": True} | {name: escape.hide(value) for name, value in settings.items()},
            )
        except Exception as error:  # templates raise what they like about messages they do not take
            raise InvalidParameter("messages", f"the chat template does not take them: {error}") from None
        if max_chars is not None and len(text) > max_chars:
            raise InvalidParameter(
                "messages",
                f"make {len(text)} characters; the context cannot hold more than {max_chars}",
                "context_length_exceeded",
            )
        ids: list[int] = []
        for part, spelled in escape.split(checks.text("messages", text)):
            ids += self._letters_of(part) if spelled else self.encode_bare(part)
        return ids

    def use_chat_template(self, template: str) -> None:
        """Replace the model's chat template."""
        self._hf.chat_template = template

    def use_reasoning_parser(self, name: str) -> None:
        """Name the parser of the model's reasoning. By default the template shows which one it is."""
        self.reasoning_parser = name

    def _control_tokens(self) -> list[str]:
        return [token.content for token in self.fast.get_added_tokens_decoder().values() if token.special]

    def _letters_of(self, text: str) -> list[int]:
        """Ids of the letters of a control token, without its meaning."""
        if self._plain is None:
            self._plain = type(self.fast).from_str(self.fast.to_str())
            self._plain.encode_special_tokens = True
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if not self.special_ids.isdisjoint(ids):
            raise InvalidParameter("messages", f"{text!r} is a control token, and this tokenizer cannot spell it")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) > _LONG:
            return self.fast.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]  # type: ignore[no-any-return]
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def token_text(self, token: int) -> str:
        """The text of a single token, special ones included. Each is decoded once: log probabilities name very many."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self.decode([token], skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        """The whole tokenizer as tokenizers' JSON, without padding and truncation."""
        bare = copy(self.fast)
        bare.no_padding()
        bare.no_truncation()
        return bare.to_str()  # type: ignore[no-any-return]

    def table(self) -> dict[str, int]:
        """Every token and its id. Two models with equal tables have the same tokens."""
        return self.fast.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    def token_id(self, token: str) -> int | None:
        """The id of a token; None where the tokenizer has none of this name."""
        return self.fast.token_to_id(token)  # type: ignore[no-any-return]

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {token: spelled for token, (_, spelled) in self.spellings().items()}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none where they are not known."""
        return self._bytes.get(token, b"")

    @cached_property
    def longest(self) -> int:
        """Letters of the longest token."""
        return max(map(len, self.table()))

    @property
    def bos_ids(self) -> list[int]:
        """The ids that `encode` puts before every text."""
        first, around = self._hf.bos_token_id, self.encode("")
        return [first] if first is not None and around[:1] == [first] else []

    def spans(self, text: str) -> list[Span]:
        """Tokens of a part of a text with the characters they cover, without special tokens."""
        encoding = self.fast.encode(text, add_special_tokens=False)
        return [Span(token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True)]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` omits where special tokens are skipped."""
        return frozenset(i for i, token in self.fast.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens of one byte each, by which SentencePiece writes characters without a token."""
        if "ByteFallback" not in self._decoders():
            return frozenset()
        return frozenset(i for token, i in self.fast.get_vocab(with_added_tokens=False).items() if _BYTE.fullmatch(token))

    def _decoders(self) -> set[str]:
        decoder = json.loads(getattr(self.fast.decoder, "__getstate__", bytes)() or b"{}")
        return {part.get("type", "") for part in decoder.get("decoders", [decoder])}  # one, or a sequence of several

    def spellings(self) -> dict[int, tuple[bool, bytes]]:
        """The bytes of each token, and whether it is an added one, such as a control token.

        Byte-level tokens spell bytes. Tokens of SentencePiece spell one byte, or text with marked spaces. Tokens of other
        kinds are omitted.
        """
        added = {i: token.content for i, token in self.fast.get_added_tokens_decoder().items()}
        kinds = self._decoders()
        out: dict[int, tuple[bool, bytes]] = {}
        for token, i in self.table().items():
            if i in added:
                out[i] = True, added[i].encode()
            elif "ByteLevel" in kinds and all(letter in byte_letters() for letter in token):
                out[i] = False, bytes(byte_letters()[letter] for letter in token)
            elif kinds & {"Metaspace", "Replace"}:
                byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
                out[i] = False, bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
        return out


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letter by which byte-level tokenizers write each byte: itself where it is printable, else one past 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class _ControlTokenEscape:
    """Replaces the control tokens that messages spell by private characters, and finds them again."""

    def __init__(self, control: Sequence[str], seen: Any) -> None:
        self._control = list(dict.fromkeys(sorted(control, key=len, reverse=True)))
        used = set(json.dumps(seen, ensure_ascii=False, skipkeys=True, default=str))
        free = (
            placeholder
            for placeholder in map(chr, chain(range(0xF0000, 0x10FFFE), range(0xE000, 0xF900)))
            if placeholder not in used
        )
        self._placeholders = dict(zip(self._control, free, strict=False))  # private characters that do not occur in the messages
        if len(self._placeholders) < len(self._control):
            raise InvalidParameter("messages", "use up the private characters of Unicode; leave some of them out")
        self._tokens = {placeholder: token for token, placeholder in self._placeholders.items()}

    def hide(self, value: Any) -> Any:
        """The value with the control tokens in every string replaced."""
        if isinstance(value, str):
            for token, placeholder in self._placeholders.items():
                value = value.replace(token, placeholder)
            return value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The text in parts, each with whether it is a replaced control token, which is restored."""
        parts = re.split(f"([{''.join(self._tokens)}])", text) if self._tokens else [text]
        return [(self._tokens.get(part, part), part in self._tokens) for part in parts if part]


class TextStream:
    """Tokens in, text out, never half a character.

    The text of an output is what its tokens add to the text of its prompt: the decoded text of both together, without the
    prefix that the decoded prompt shares with it. A character that the prompt leaves open belongs to the output that
    completes it; where none does, its U+FFFD belongs to the prompt. The pushed texts and the flushed one concatenate to
    this text.

    Tokens are decoded with a few tokens before them, because their text may depend on those. Text that could still change
    is held back: after an open character of a byte-level tokenizer, and during a run of byte-fallback tokens, which the
    tokenizer writes as U+FFFD throughout when one byte in it is wrong. A run longer than `_LONG_RUN` is written early where
    it is valid so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._before = self._end_of(prompt_ids)  # tokens that are written already
        self._written = self._decode(self._before)
        self._pending: list[int] = []

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, with the whole run of bytes where it ends in one."""
        tokens: list[int] = []
        for token in reversed(prompt):
            if len(tokens) >= _CONTEXT and tokens[-1] not in self._tokenizer.byte_ids:
                break
            if self._writes(token):
                tokens.append(token)
        return tokens[::-1]

    def _writes(self, token: int) -> bool:
        return token not in self._skipped and self._tokenizer.fast.id_to_token(token) is not None

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is open."""
        if not self._writes(token):
            return ""
        pending = self._pending
        pending.append(token)
        byte = token in self._tokenizer.byte_ids
        if byte and (len(pending) < _LONG_RUN or len(pending) % _LONG_RUN >= _LONGEST_CHARACTER):
            return ""
        whole = self._decode(self._before + pending)
        if not whole.endswith(_UNKNOWN):
            return self._write(whole, len(pending))
        return "" if byte else self._write_before_the_open_character(whole)

    def _write_before_the_open_character(self, whole: str) -> str:
        pending = self._pending
        for cut in range(len(pending) - 1, max(len(pending) - _LONGEST_CHARACTER, 0), -1):
            complete = self._decode(self._before + pending[:cut])
            if complete + self._decode(pending[cut:]) == whole:
                return self._write(complete, cut)
        return ""

    def _write(self, whole: str, tokens: int) -> str:
        """Write the first `tokens` pending tokens. `whole` is the text of the tokens before and of these."""
        text = whole[_shared(self._written, whole) :]
        self._before += self._pending[:tokens]
        del self._pending[:tokens]
        self._written = whole
        if len(self._before) > 2 * _CONTEXT:
            self._before = self._end_of_written()
            self._written = self._decode(self._before)
        return text

    def _end_of_written(self) -> list[int]:
        """The last few written tokens; of an unfinished run of bytes, those of its last character."""
        before = self._before
        if before[-1] not in self._tokenizer.byte_ids:
            return before[-_CONTEXT:]
        characters = (before[-size:] for size in range(1, _LONGEST_CHARACTER + 1))
        return next((tokens for tokens in characters if _UNKNOWN not in self._decode(tokens)), before)

    @property
    def pending(self) -> Sequence[int]:
        """Tokens of a character that is still open."""
        return self._pending

    def flush(self) -> str:
        """The text held back, at the end of the output, with open characters as U+FFFD."""
        return self._write(self._decode(self._before + self._pending), len(self._pending)) if self._pending else ""


def _shared(a: str, b: str) -> int:
    """How many leading characters two texts have in common."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StopStrings:
    """Finds the stop string that completes first in growing text, and the part that may already be shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)

    def find(self, text: str, checked: int) -> tuple[int, str] | None:
        """(start, stop) of the stop string that completes first past `checked` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(checked - len(stop) + 1, 0))
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None else min(best, match)
        return None if best is None else (best[1], best[2])

    def safe(self, text: str) -> int:
        """Length of the prefix that cannot be part of a stop string any more."""
        for held in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - held :]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(text) - held
        return len(text)
