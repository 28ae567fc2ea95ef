"""Random JSON schemas whose texts are all short: bounded strings and arrays, and nothing beside what is named."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "size", "path", "kind", "line", "value", "index", "état", "a b", 'quo"te', "x")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object of a few properties, some optional."""
    return _object(rng, depth=2)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _pattern, _integer, _number, _enum, _const, _boolean]
    if depth > 0:
        makers += [_array, _array, _nested, _nested, _either]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _pattern(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-z]{2,6}$", "^\\d{4}-\\d{2}$", "^(0x)?[0-9a-f]{1,8}$"])}


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    """A range would leave the digits after the point unbounded, so the digits are spelled out."""
    return {"enum": [round(rng.uniform(-10, 10), rng.randint(0, 4)) for _ in range(rng.randint(1, 5))]}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "", "naïve 🙂", 7, -1.5, None, True, "a\nb"], rng.randint(1, 5))}


def _const(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 12, False, None])}


def _boolean(_rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 1)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _nested(rng: random.Random, depth: int) -> dict[str, Any]:
    return _object(rng, depth)


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1), _value(rng, depth - 1)]}
