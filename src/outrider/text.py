"""Text and tokens: the tokenizer, incremental detokenisation, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from outrider.errors import InvalidParameter, ModelError

__all__ = ["StopStrings", "TextStream", "Tokenizer"]


class Tokenizer:
    """A fast tokenizer with its chat template."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.fast = hf_tokenizer.backend_tokenizer

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

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the model expects around it."""
        return self._hf(text)["input_ids"]  # type: ignore[no-any-return]

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Ids of a piece of text, without special tokens."""
        return tuple(self._hf(text, add_special_tokens=False)["input_ids"])

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn."""
        if not self._hf.chat_template:
            raise InvalidParameter("messages", "this model has no chat template; use generate with a plain prompt")
        text = self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.encode_bare(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def table(self) -> dict[str, int]:
        """Every token and its id: what two models must share to draft for each other."""
        return self.fast.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]


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
