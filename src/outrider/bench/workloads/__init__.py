"""Prompts by name or from a file, and how they become requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.acceptance import read_items
from outrider.errors import InvalidParameter
from outrider.text import Tokenizer

__all__ = ["BUNDLED", "Conversation", "PromptSet", "TurnReader", "find_prompts", "first_turns", "is_random", "load_prompts"]

BUNDLED = {
    "code": "beginnings of Python functions and classes",
    "editing": "code, then a comment that asks for it again with a small change, and the beginning of the copy",
    "json": "JSON documents and Python dictionaries, cut in the middle",
    "constrained": "requests for a JSON record, whose output a schema constrains",
}
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["file", "user", "service", "other"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "active": {"type": "boolean"},
        "owner": {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "role": {"enum": ["admin", "guest"]}},
            "required": ["id", "role"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "size", "active", "owner"],
    "additionalProperties": False,
}
Ids = tuple[int, ...]
Item = tuple[str | None, tuple[str, ...]]  # category and turns
_RANDOM, _RANDOM_COUNT, _RANDOM_TOKENS = "random", 32, 64
# Spec-Bench publishes six figures. The first is over the eight categories of MT-Bench, which its file lists separately.
_CONVERSATION = "multi-turn conversation"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = {
    **dict.fromkeys(_MT_BENCH, _CONVERSATION),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a user. The answers between them are the model's."""

    turns: tuple[str, ...]


Prompt = str | Ids | Conversation


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A workload: its prompts (texts, token ids or conversations) by category."""

    name: str
    categories: dict[str, Sequence[Prompt]]
    schema: dict[str, Any] | None = None  # that every output must meet


def find_prompts(name: str) -> Path:
    """The file of a bundled workload, or the path itself."""
    return Path(__file__).parent / f"{name}.jsonl" if name in BUNDLED else Path(name)


def is_random(name: str) -> bool:
    """Whether a workload consists of random token ids, which needs the size of a vocabulary."""
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
    items = read_items(path)
    published = _SPEC_BENCH if {category for category, _ in items} == set(_SPEC_BENCH) else {}
    categories: dict[str, list[Prompt]] = {}
    for category, turns in _interleaved(items) if published else items:
        shown = published.get(category or "", category or stem)
        categories.setdefault(shown, []).append(turns[0] if len(turns) == 1 else Conversation(turns))
    return PromptSet(stem, dict(categories), _RECORD if name == "constrained" else None)


def first_turns(name: str, count: int) -> list[str]:
    """As many texts: the first turns of a workload, from the beginning again where it has fewer."""
    items = [item for prompts in load_prompts(name).categories.values() for item in prompts]
    texts = [item.turns[0] if isinstance(item, Conversation) else item for item in items if not isinstance(item, tuple)]
    return [texts[i % len(texts)] for i in range(count)]


def _interleaved(items: Sequence[Item]) -> list[Item]:
    """The first item of every category, then the second of every one: a few of what is reported together stand for all of it."""
    ranks: Counter[str | None] = Counter()
    ranked = []
    for category, turns in items:
        ranked.append((ranks[category], (category, turns)))
        ranks[category] += 1
    return [item for _, item in sorted(ranked, key=lambda ranked_item: ranked_item[0])]


@dataclass(frozen=True, slots=True)
class TurnReader:
    """Turns prompts into token ids. `answer` continues a turn, so that the next one has something to follow."""

    tokenizer: Tokenizer | None
    chat: bool
    answer: Callable[[Ids], str]
    room: int  # tokens a request may have before its output

    def requests(self, prompt: Prompt) -> tuple[list[Ids], int]:
        """The requests that fit, and how many do not. A conversation ends at the first turn that does not fit."""
        if not isinstance(prompt, str | Conversation):
            return ([prompt], 0) if len(prompt) <= self.room else ([], 1)
        turns = prompt.turns if isinstance(prompt, Conversation) else (prompt,)
        texts: list[str] = []  # turns and answers, alternating
        requests: list[Ids] = []
        for number, turn in enumerate(turns, 1):
            ids = self._encode([*texts, turn])
            if len(ids) > self.room:
                return requests, len(turns) - number + 1
            requests.append(ids)
            if number < len(turns):
                texts += [turn, self.answer(ids)]
        return requests, 0

    def _encode(self, texts: Sequence[str]) -> Ids:
        if self.tokenizer is None:
            raise InvalidParameter("workload", "it holds text, and the model has no tokenizer; use random")
        if not self.chat:
            return tuple(self.tokenizer.encode("\n\n".join(texts)))
        roles = ("user", "assistant")
        return tuple(self.tokenizer.chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]))
