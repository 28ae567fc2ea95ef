"""The attacks: what one client sends, how often and over how many connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

__all__ = ["SCENARIOS", "Scenario", "Shot", "padded"]

BODY = 4 * 2**20  # the server's default limit
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_AMBIGUOUS = 'start: a\na: a a | "x" | "x" a "x" | b\nb: b b | "x" | a b | b a'
_VOCAB = 8000  # ids below it are tokens of the bundled model
_CONTEXT = 2000  # tokens that fit it with some to spare


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, ready to be sent."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Scenario:
    """An attack. Each connection sends its share of the shots, over and over or once, while the time lasts."""

    name: str
    about: str
    shots: Callable[[], list[Shot]]
    connections: int = 4
    again: bool = True
    max_slowdown: float | None = None  # bar for another client's request, as a multiple of its time alone


def padded(before: str, item: str, after: str, size: int = BODY) -> bytes:
    """A list written out to just below some size: before[item,item,...]after."""
    count = (size - len(before) - len(after) - 2) // (len(item) + 1)
    return f"{before}[{','.join(repeat(item, count))}]{after}".encode()


def _one(path: str, make: Callable[[], bytes]) -> Callable[[], list[Shot]]:
    return lambda: [Shot(path, make())]


def _many(path: str, bodies: Callable[[], Iterator[dict[str, Any]]]) -> Callable[[], list[Shot]]:
    return lambda: [Shot(path, json.dumps(body).encode()) for body in bodies()]


def _ids(start: int, count: int) -> list[int]:
    """Ids that no other prompt begins with, so that the prefix cache is of no use."""
    return list(chain([10 + start], (10 + (start + 7 * i) % (_VOCAB - 10) for i in range(1, count))))


def _logit_bias() -> bytes:
    entries = ",".join(f'"{i}":"x"' for i in range(BODY // 14))
    return f'{{"prompt":"x","logit_bias":{{{entries}}}}}'.encode()


def _text_chat(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{number} " + "def f(x): return x\n" * (BODY // 21)}], "max_tokens": 4}


def _schemas() -> Iterator[dict[str, Any]]:
    for i in range(12):
        schema = {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 199933}}, "required": [f"p{i}"]}
        yield {"prompt": "x", "max_tokens": 8, "guided_json": schema}


def _long_prompts(count: int, **more: Any) -> Callable[[], Iterator[dict[str, Any]]]:
    return lambda: ({"prompt": _ids(31 * i, _CONTEXT), "max_tokens": 4, "temperature": 0} | more for i in range(count))


def _prompt_logprobs() -> Iterator[dict[str, Any]]:
    yield {"prompt": [_ids(31 * i, _CONTEXT) for i in range(64)], "max_tokens": 1, "prompt_logprobs": 20}


def _crowd(**more: Any) -> Callable[[], Iterator[dict[str, Any]]]:
    body = {"max_tokens": 400, "temperature": 0.8, "ignore_eos": True}
    return lambda: (body | {"prompt": f"def f{i}(x):\n", "seed": i} | more for i in range(110))


def _grammar() -> Iterator[dict[str, Any]]:
    for i in range(4):
        yield {"prompt": f"x{i}", "max_tokens": 256, "guided_grammar": _AMBIGUOUS, "temperature": 1.0, "seed": i}


_LIST = [
    Scenario("empty_prompts", "4 MiB of empty prompts", _one(_COMPLETIONS, lambda: padded('{"prompt":', '""', "}"))),
    Scenario("negative_ids", "4 MiB of token ids below zero", _one(_COMPLETIONS, lambda: padded('{"prompt":', "-1", "}"))),
    Scenario(
        "tool_calls",
        "4 MiB of empty tool calls",
        _one(_CHAT, lambda: padded('{"messages":[{"role":"assistant","tool_calls":', "{}", "}]}")),
    ),
    Scenario("logit_bias", "4 MiB of logit_bias that is no number", _one(_COMPLETIONS, _logit_bias)),
    Scenario(
        "content",
        "4 MiB of parts of a message that have no text",
        _one(_CHAT, lambda: padded('{"messages":[{"role":"user","content":', '{"type":"text"}', "}]}")),
    ),
    Scenario("detokenize", "the same for /detokenize", _one("/detokenize", lambda: padded('{"tokens":', "-1", "}"))),
    Scenario(
        "detokenize_valid",
        "as many valid ids as /detokenize takes",
        _many("/detokenize", lambda: iter([{"tokens": _ids(0, 2**17)}])),
    ),
    Scenario("valid_ids", "4 MiB of valid token ids, too many", _one(_COMPLETIONS, lambda: padded('{"prompt":', "4321", "}"))),
    Scenario(
        "valid_texts",
        "64 prompts of 54 KB, valid but too long",
        _many(_COMPLETIONS, lambda: iter([{"prompt": ["a = b\n" * 9_000] * 64, "max_tokens": 4}])),
    ),
    Scenario("tokenize", "4 MiB of text for /tokenize", _many("/tokenize", lambda: iter([{"prompt": "a = b\n" * 590_000}]))),
    Scenario("long_chats", "ten chats of 4 MiB", _many(_CHAT, lambda: map(_text_chat, range(10))), connections=10),
    Scenario(
        "ambiguous_grammar",
        "a grammar of 84 bytes with very many derivations",
        _many(_COMPLETIONS, _grammar),
        max_slowdown=3.0,
    ),
    Scenario("multiple_of", "twelve schemas with multipleOf 199933", _many(_COMPLETIONS, _schemas), connections=12, again=False),
    Scenario("prompt_logprobs", "log probabilities of 64 long prompts", _many(_COMPLETIONS, _prompt_logprobs), connections=2),
    Scenario(
        "prompt_logprobs_allowed",
        "log probabilities of one long prompt at a time, which the server allows",
        _many(_COMPLETIONS, _long_prompts(8, prompt_logprobs=20)),
    ),
    Scenario("long_prompts", "64 long prompts", _many(_COMPLETIONS, _long_prompts(64)), connections=64, again=False),
    Scenario("priority", "110 connections that ask to go first", _many(_COMPLETIONS, _crowd(priority=-100)), connections=110),
    Scenario("crowd", "110 connections that generate 400 tokens each", _many(_COMPLETIONS, _crowd()), connections=110),
]
SCENARIOS = {scenario.name: scenario for scenario in _LIST}
