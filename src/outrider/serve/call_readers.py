"""Reads one tool call letter by letter, in each syntax.

A reader is a generator that is sent the letters of a call. It gives its findings to a `Call`, and raises `Malformed` where
the text is not a call.
"""

# ruff: noqa: ARG001  (every reader takes the same arguments)

from __future__ import annotations

import ast
import json
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from outrider.serve.tool_formats import Format

__all__ = ["READERS", "Call", "Malformed", "Reader"]

Reader = Generator[None, str, None]
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_LONGEST_NAME = 80
_NAME_LETTERS = frozenset(string.ascii_letters + string.digits + "_.-")
_CONSTANTS = {"true": True, "false": False, "null": None}


class Malformed(Exception):
    """The text is not a call."""


class Call:
    """What is known of a call while it is read."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []  # parts of the JSON text that were not streamed yet
        self.schemas = schemas  # the tools and the schemas of their arguments

    def types_of(self, parameter: str) -> Any:
        """The type or types that a schema gives to a parameter; None where it does not say."""
        properties = self.schemas.get(self.name or "", {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema.get("type") if isinstance(schema, Mapping) else None


def read_object(form: Format, call: Call) -> Reader:
    """{"name": ..., "arguments": {...}}, in any order."""
    yield from _expect("{")
    end, keys = ",", set[str]()
    while end == ",":
        word: list[str] = []
        end = yield from _read_value(word, ",:")
        key = _text_of(word)
        if end != ":" or key not in _KEYS or key in keys:
            raise Malformed
        is_arguments = key in _ARGUMENTS and keys.isdisjoint(_ARGUMENTS)
        keys.add(key)
        value = call.arguments if is_arguments else []
        end = yield from _read_value(value, ",")
        if key == "name":
            call.name = _text_of(value)
            if call.name is None:
                raise Malformed


def read_named(form: Format, call: Call) -> Reader:
    """A name, a separator and the arguments as a JSON object, such as name[ARGS]{...}."""
    yield from _expect(form.head)
    separator = form.separator.strip()
    word = yield from _until(separator, _LONGEST_NAME)
    call.name = word.partition(form.call_id)[0].strip() if form.call_id else word.strip()
    yield from _read_brackets(call.arguments)
    yield from _expect(form.tail.strip())


def read_tagged(form: Format, call: Call) -> Reader:
    """A name, and one tagged text for each parameter. Texts become JSON by the type that the schema gives them."""
    tags = form.tags
    assert tags is not None
    yield from _expect(form.head)
    if tags.name_end:
        call.name = (yield from _until(tags.name_end, _LONGEST_NAME)).strip()
        letter = ""
    else:
        call.name, letter = yield from _read_name()
    keys: set[str] = set()
    while (yield from _which(letter, tags.key, form.tail)) == tags.key:
        key = yield from _until(tags.value[0])
        for tag in tags.value[1:]:
            yield from _expect(tag)
        text = yield from _until(tags.value_end)
        if key in keys:
            raise Malformed
        text = text.removeprefix("\n").removesuffix("\n") if tags.lines else text
        call.arguments.append(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: {_typed(text, call.types_of(key))}")
        keys.add(key)
        letter = ""
    call.arguments.append("}" if keys else "{}")


def read_python(form: Format, call: Call) -> Reader:
    """name(key=value, ...), with values as Python or JSON writes them."""
    call.name, letter = yield from _read_name()
    if letter != "(":
        raise Malformed
    letters: list[str] = []
    end = yield from _read_value(letters, ")", quotes="\"'")
    if end != ")":
        raise Malformed
    call.arguments.append(_python_arguments("".join(letters)))


READERS: dict[str, Callable[[Format, Call], Reader]] = {
    "object": read_object,
    "named": read_named,
    "tagged": read_tagged,
    "python": read_python,
}


def _expect(text: str) -> Reader:
    """Take exactly this text, after white space."""
    for place, expected in enumerate(text):
        letter = yield
        while place == 0 and letter.isspace():
            letter = yield
        if letter != expected:
            raise Malformed


def _until(marker: str, most: int | None = None) -> Generator[None, str, str]:
    """The text before a marker."""
    letters: list[str] = []
    while "".join(letters[-len(marker) :]) != marker:
        if most is not None and len(letters) >= most + len(marker):
            raise Malformed
        letters.append((yield))
    return "".join(letters[: -len(marker)])


def _read_name() -> Generator[None, str, tuple[str, str]]:
    """A function's name after white space, and the letter after it."""
    letter = yield
    while letter.isspace():
        letter = yield
    name = ""
    while letter in _NAME_LETTERS:
        name += letter
        if len(name) > _LONGEST_NAME:
            raise Malformed
        letter = yield
    if not name:
        raise Malformed
    return name, letter


def _which(letter: str, *texts: str) -> Generator[None, str, str]:
    """Which of these texts comes next, after white space. `letter` was read already."""
    word = letter.strip()
    while word not in texts:
        if not any(text.startswith(word) for text in texts):
            raise Malformed
        letter = yield
        word += letter if word else letter.strip()
    return word


def _read_value(letters: list[str], ends: str, quotes: str = '"') -> Generator[None, str, str]:
    """Read letters up to one that ends the value. Returns that one."""
    depth, quote, escaped, closed = 0, "", False, False
    while True:
        letter = yield
        if closed and depth == 0 and letter.isspace():
            continue  # white space after an object
        if quote:
            quote = quote if escaped or letter != quote else ""
            escaped = letter == "\\" and not escaped
        elif letter in quotes:
            quote = letter
        elif depth == 0 and letter in f"{ends}}}]":
            return letter
        elif letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
            closed = depth == 0
        letters.append(letter)


def _read_brackets(letters: list[str]) -> Reader:
    """Read an object, up to the bracket that ends it."""
    depth, in_string, escaped = 0, False, False
    while True:
        letter = yield
        letters.append(letter)
        if in_string:
            in_string = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
            if depth <= 0:
                return
        elif depth == 0 and not letter.isspace():
            raise Malformed


def _text_of(raw: Sequence[str]) -> str | None:
    try:
        value = json.loads("".join(raw))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _typed(text: str, types: Any) -> str:
    """A parameter's text as JSON: as it stands where it is JSON and not meant as a string, and else as a string."""
    allowed = types if isinstance(types, list) else [types]
    if "string" in allowed:
        return "null" if text == "null" and "null" in allowed else json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _CONSTANTS.get(text.strip().lower(), text)
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _python_arguments(text: str) -> str:
    """The keyword arguments of a call as JSON."""
    try:
        node = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(node, ast.Call)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise Malformed
        values = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (AssertionError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, in which true, false and null are constants too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON")
    return value
