"""Prompts by name or from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.acceptance import read_items
from outrider.errors import InvalidParameter
from outrider.text import Tokenizer

__all__ = ["BUNDLED", "PromptSet", "Prompts", "find_prompts", "is_random", "load_prompts"]

BUNDLED = {
    "code": "beginnings of Python functions and classes",
    "editing": "code, then a comment that asks for it again with a small change, and the beginning of the copy",
    "json": "JSON documents and Python dictionaries, cut in the middle",
}
_RANDOM, _RANDOM_COUNT, _RANDOM_TOKENS = "random", 32, 64
Prompts = Sequence[str | tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A workload: its prompts, texts or token ids, by category."""

    name: str
    categories: dict[str, Prompts]

    def tokenized(self, tokenizer: Tokenizer | None, chat: bool = False) -> PromptSet:
        """The same with token ids for texts."""

        def ids(prompt: str | tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(prompt, str):
                return prompt
            if tokenizer is None:
                raise InvalidParameter("workload", f"{self.name!r} holds text, and the model has no tokenizer; use random")
            return tuple(tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt))

        return PromptSet(self.name, {name: [ids(own) for own in prompts] for name, prompts in self.categories.items()})


def find_prompts(name: str) -> Path:
    """The file of a bundled workload, or the path itself."""
    return Path(__file__).parent / f"{name}.jsonl" if name in BUNDLED else Path(name)


def is_random(name: str) -> bool:
    """Whether a workload is made of token ids nobody wrote, which needs the size of a vocabulary."""
    return name.partition(":")[0] == _RANDOM


def load_prompts(name: str, vocab: int | None = None) -> PromptSet:
    """A bundled workload, `random` or `random:TOKENS` (needs the vocabulary's size), or a JSONL file by its path."""
    length = name.partition(":")[2]
    if is_random(name):
        if vocab is None:
            raise InvalidParameter("workload", "random tokens need a model at hand; name a text workload or a file")
        if length and not (length.isdigit() and int(length)):
            raise InvalidParameter("workload", f"{name!r}: random takes a number of tokens, as in random:256")
        rng, tokens = random.Random(0), int(length or _RANDOM_TOKENS)
        return PromptSet(name, {name: [tuple(rng.randrange(vocab) for _ in range(tokens)) for _ in range(_RANDOM_COUNT)]})
    path = find_prompts(name)
    if name not in BUNDLED and not path.exists():
        known = ", ".join((*BUNDLED, _RANDOM))
        raise InvalidParameter("workload", f"{name!r} is neither a workload ({known}) nor a JSONL file")
    stem = name if name in BUNDLED else path.stem
    categories: dict[str, list[str]] = {}
    for category, text in read_items(path):
        categories.setdefault(category or stem, []).append(text)
    return PromptSet(stem, dict(categories))
