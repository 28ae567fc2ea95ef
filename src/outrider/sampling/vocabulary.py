"""What the tokens of a tokenizer spell, as masks need to know it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from outrider.sampling.reasoning import Markers

__all__ = ["Vocabulary"]


class Vocabulary:
    """The bytes of every token, and tokens by their bytes. Sequences share one; everything in it is computed on first use."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer  # an LLTokenizer
        self._size = size  # of the model's logits
        self._overshooting: dict[tuple[bytes, int], list[int]] = {}

    @cached_property
    def spellings(self) -> list[bytes]:
        """The bytes of each token, by id; those of a control token are its name."""
        decode: Callable[[list[int]], bytes] = self._tokenizer.decode_bytes
        known = min(self._size, self._tokenizer.vocab_size)
        return [decode([token]) for token in range(known)] + [b""] * (self._size - known)

    @cached_property
    def _by_spelling(self) -> dict[bytes, list[int]]:
        tokens: defaultdict[bytes, list[int]] = defaultdict(list)
        for token, spelled in enumerate(self.spellings):
            tokens[spelled].append(token)
        return dict(tokens)

    def bytes_of(self, token: int) -> bytes:
        return self.spellings[token] if token < len(self.spellings) else b""

    def spell(self, text: bytes) -> list[int]:
        """The tokens that spell a text; empty where there are none."""
        tokens: Sequence[int] = (
            self._tokenizer.tokenize_bytes(text) if text not in self._by_spelling else self._by_spelling[text][:1]
        )
        spelled = b"".join(self.bytes_of(token) for token in tokens)
        return list(tokens) if spelled == text else []

    def beginnings(self, text: bytes) -> list[int]:
        """Tokens that spell a first part of a text, or all of it."""
        return [token for size in range(1, len(text) + 1) for token in self._by_spelling.get(text[:size], ())]

    def overshooting(self, markers: Markers, matched: int) -> list[int]:
        """Tokens that complete the end marker, of which some bytes stand already, and go on after it."""
        key = (markers.end, matched)
        if key not in self._overshooting:
            last = markers.end[-1:]
            self._overshooting[key] = [
                token
                for token, spelled in enumerate(self.spellings)
                if last in spelled[:-1] and markers.overshoots(matched, spelled)
            ]
        return self._overshooting[key]
