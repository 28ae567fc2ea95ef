"""Parses tool calls from a model's text: complete, or as a stream."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Generator, Sequence, Set
from dataclasses import dataclass

from outrider.serve.tools import FORMATS, Format, Tool

__all__ = ["CallDelta", "ToolCall", "ToolStream", "parse_tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A change in a stream: new text, or new arguments of call `index`. Its first delta has the id and the name."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def parse_tool_calls(text: str, tools: Sequence[Tool], family: str, cut: bool = False) -> tuple[str | None, list[ToolCall]]:
    """The text of an answer (None if there are only calls) and its tool calls. A malformed call stays text.

    `cut`: the output was cut off, so that an incomplete opening of a call at the end is dropped.
    """
    stream = ToolStream(tools, family)
    content = ""
    calls: list[ToolCall] = []
    for delta in [*stream.push(text), *stream.finish(cut)]:
        if delta.index is None:
            content += delta.content
        elif delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name or "", delta.arguments))
        else:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + delta.arguments)
    return (content if content or not calls else None), calls


class ToolStream:
    """Parses tool calls from a stream of text. Text that may be the beginning of a call is held back.

    A call is announced when its name is known to be a tool's. From then on its arguments are streamed. White space
    around calls is dropped.
    """

    def __init__(self, tools: Sequence[Tool], family: str) -> None:
        self._format = FORMATS[family]
        self._names = {tool["function"]["name"] for tool in tools}
        self._short_ids = family.startswith("mistral")
        self._buffer = ""  # text that may still become part of a call
        self._call: _CallReader | None = None
        self._after = False  # a call has just ended, and another may follow without an opening
        self._calls = 0
        self._fresh = True  # only white space so far

    @property
    def called(self) -> bool:
        """Whether there was a call. The finish reason is then "tool_calls"."""
        return self._calls > 0

    def push(self, text: str) -> list[CallDelta]:
        """The deltas of new text."""
        self._buffer += text
        out: list[CallDelta] = []
        while self._step(out):
            pass
        return out

    def finish(self, cut: bool = False) -> list[CallDelta]:
        """The deltas of text that was held back, at the end of the output. `cut` drops an incomplete opening."""
        out: list[CallDelta] = []
        if cut:
            held = self._buffer if self._call is None and not self._after else ""
            opened = _overlap(held, self._format.opening)
            held = held[:-opened].rstrip() if opened else held
            self._add_text(held if held.strip() or not self.called else "", out)
            self._buffer, self._call = "", None
            return out
        if self._call is not None and not self._call.announced:
            self._buffer = self._call.text + self._buffer
            self._call = None
        closing = self._after and self._format.closing.strip().startswith(self._buffer.strip())
        if not closing and (self._buffer.strip() or not self.called):
            self._add_text(self._buffer, out)
        self._buffer = ""
        return out

    def _step(self, out: list[CallDelta]) -> bool:
        """Parse the front of the buffer. Returns False if more text is needed."""
        if not self._buffer:
            return False
        if self._call is not None:
            return self._read(self._call, out)
        if self._after:
            return self._between()
        return self._look(out)

    def _look(self, out: list[CallDelta]) -> bool:
        """Find the next opening. Text before it belongs to the answer."""
        marker = self._format.opening
        bare = self._format.bare and self._fresh and self._buffer.lstrip().startswith("{")
        start = 0 if bare else self._buffer.find(marker)
        if start >= 0:
            text, after = self._buffer[:start], self._buffer[start + (0 if bare else len(marker)) :]
            if text.strip():
                self._add_text(text.rstrip(), out)
            self._call = _CallReader(self._format, "" if bare else marker, self._names)
            self._buffer = after
            return True
        safe = len(self._buffer) - _overlap(self._buffer, marker)
        safe = len(self._buffer[:safe].rstrip())  # white space before a call is dropped
        self._add_text(self._buffer[:safe], out)
        self._buffer = self._buffer[safe:]
        return False

    def _read(self, call: _CallReader, out: list[CallDelta]) -> bool:
        """Pass text to a call until it ends. A malformed call becomes text again."""
        used = call.take(self._buffer)
        self._buffer = self._buffer[used:]
        if not call.valid:
            self._call, self._fresh = None, False
            self._add_text("" if call.announced else call.text, out)
            return True
        if call.name is not None:
            first = not call.announced
            new_text = call.new_arguments()
            if first:
                out.append(CallDelta(index=self._calls, id=_new_id(self._short_ids), name=call.name, arguments=new_text))
                self._calls += 1
            elif new_text:
                out.append(CallDelta(index=self._calls - 1, arguments=new_text))
        if call.done:
            self._call, self._after = None, True
        return call.done

    def _between(self) -> bool:
        """Parse what follows a call: its closing, and perhaps another call."""
        form, text = self._format, self._buffer.lstrip()
        closing, between = form.closing.strip(), form.between.strip()
        if not text:
            return False
        if form.listed and (text.startswith("{") or (between and text.startswith(between))):
            self._call = _CallReader(form, "", self._names)
            self._buffer = text.removeprefix(between)
        elif closing and closing.startswith(text) and text != closing:
            return False
        elif closing and text.startswith(closing):
            self._buffer = text.removeprefix(closing)
        self._after = False
        return True

    def _add_text(self, text: str, out: list[CallDelta]) -> None:
        text = text.lstrip() if self._fresh and self.called else text
        if text:
            out.append(CallDelta(content=text))
            self._fresh = self._fresh and not text.strip()


class _Malformed(Exception):
    """The text is not a call."""


class _CallReader:
    """Parses one call letter by letter: {"name": ..., "arguments": {...}}, or name[ARGS]{...}."""

    def __init__(self, form: Format, opening: str, names: Set[str]) -> None:
        self.text = opening  # the whole text until the call is announced, in case it is malformed
        self.valid = True
        self.done = False
        self.announced = False
        self.name: str | None = None  # set when the call may be announced
        self._format = form
        self._names = names
        self._called: str | None = None  # the name of the tool, when it is known
        self._arguments: list[str] = []  # letters of the arguments that were not streamed yet
        self._parser = self._read_named() if form.named else self._read_object()
        next(self._parser)

    def take(self, text: str) -> int:
        """Parse more text. Returns how many letters belong to the call."""
        used = 0
        while used < len(text) and self.valid and not self.done:
            used += 1
            try:
                self._parser.send(text[used - 1])
            except StopIteration:
                self.done = True
            except _Malformed:
                self.valid = False
        if not self.announced:
            self.text += text[:used]
            self._decide()
        return used

    def new_arguments(self) -> str:
        """The arguments that were parsed since the last call of this function."""
        text, first, self.announced = "".join(self._arguments), not self.announced, True
        self._arguments.clear()
        return (text.lstrip() or "{}") if first else text

    def _decide(self) -> None:
        """Decide whether the call may be announced: it names a tool, and its arguments have started or there are none."""
        if self._called is not None:
            arguments = "".join(self._arguments).lstrip()
            self.valid = self.valid and self._called in self._names and (not arguments or arguments.startswith("{"))
            self.name = self._called if self.valid and (arguments or self.done) else None
        elif self.done:
            self.valid = False

    def _read_named(self) -> Generator[None, str, None]:
        word = ""
        while not word.endswith("[ARGS]"):
            if len(word) >= _LONGEST_NAME:
                raise _Malformed
            word += yield
        self._called = word.removesuffix("[ARGS]").strip()
        yield from self._read_value(self._arguments, "")

    def _read_object(self) -> Generator[None, str, None]:
        letter = yield
        while letter.isspace() or (letter == "[" and self._format.listed):
            letter = yield
        if letter != "{":
            raise _Malformed
        end, keys = ",", set[str]()
        while end == ",":
            word: list[str] = []
            end = yield from self._read_value(word, ",:")
            key = _text_of(word)
            if end != ":" or key not in _KEYS or key in keys:
                raise _Malformed
            is_arguments = key in _ARGUMENTS and keys.isdisjoint(_ARGUMENTS)
            keys.add(key)
            value = self._arguments if is_arguments else []
            end = yield from self._read_value(value, ",")
            if is_arguments:
                value[:] = "".join(value).rstrip()
            elif key == "name":
                self._called = _text_of(value)
                if self._called is None:
                    raise _Malformed

    def _read_value(self, letters: list[str], ends: str) -> Generator[None, str, str]:
        """Read letters up to one that ends the value. Returns that one."""
        depth, in_string, escaped = 0, False, False
        while True:
            letter = yield
            if in_string:
                in_string = escaped or letter != '"'
                escaped = letter == "\\" and not escaped
            elif letter == '"':
                in_string = True
            elif depth == 0 and letter in f"{ends}}}]":
                return letter
            elif letter in "{[":
                depth += 1
            elif letter in "}]":
                depth -= 1
            letters.append(letter)
            if self._format.named and depth == 0 and letter == "}":
                return letter


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_LONGEST_NAME = 80


def _text_of(raw: Sequence[str]) -> str | None:
    try:
        value = json.loads("".join(raw))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, marker: str) -> int:
    """How many letters at the end of the text may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _new_id(short: bool) -> str:
    """A new call id. Mistral's templates expect nine letters and digits."""
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return "call_" + secrets.token_hex(12)
