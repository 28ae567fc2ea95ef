"""Parses tool calls from a model's text: complete, or as a stream."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence, Set
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


class _CallReader:
    """Parses one call letter by letter: {"name": ..., "arguments": {...}}, or name[ARGS]{...}."""

    def __init__(self, form: Format, opening: str, names: Set[str]) -> None:
        self.valid = True
        self.done = False
        self.announced = False
        self.name: str | None = None  # set when the call may be announced
        self._format = form
        self._names = names
        self._text = [opening]  # the whole text until the call is announced, in case it is malformed
        self._depth = 0
        self._string = self._escaped = False
        self._key: str | None = None  # the property being read
        self._word: list[str] = []  # the property's name, or the part of its value that was not streamed yet
        self._values: dict[str, str] = {}

    @property
    def text(self) -> str:
        return "".join(self._text)

    def take(self, text: str) -> int:
        """Parse more text. Returns how many letters belong to the call."""
        used = 0
        while used < len(text) and self.valid and not self.done:
            self._letter(text[used])
            if not self.announced:
                self._text.append(text[used])
            used += 1
        self._decide()
        return used

    def new_arguments(self) -> str:
        """The arguments that were parsed since the last call of this function."""
        first, self.announced = not self.announced, True
        if self._key in _ARGUMENTS:
            new_text = "".join(self._word)
            self._word.clear()
        else:
            new_text = next((self._values.pop(key) for key in _ARGUMENTS if key in self._values), "{}" if first else "")
        return new_text.lstrip() if first else new_text

    def _decide(self) -> None:
        """Decide whether the call may be announced: it names a tool, and its arguments have started or there are none."""
        if self.announced or not self.valid:
            return
        name = self._values.get("name")
        if name is None:
            self.valid = not self.done
            return
        reading = "".join(self._word) if self._key in _ARGUMENTS else ""
        arguments = next((self._values[key] for key in _ARGUMENTS if key in self._values), reading).lstrip()
        self.valid = name in self._names and (not arguments or arguments.startswith("{"))
        if self.valid and (arguments or self.done):
            self.name = name

    def _letter(self, letter: str) -> None:
        if self._depth == 0:
            self._open(letter)
            return
        if self._string:
            self._word.append(letter)
            self._string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
            return
        if letter == '"':
            self._string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if self._depth == 0 or (self._depth == 1 and letter == ","):
            self._end_value()
            self.done = self._depth == 0
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._begin_value()
        else:
            self._word.append(letter)
            if self._format.named and self._depth == 1 and letter == "}":
                self._end_value()
                self.done = True

    def _open(self, letter: str) -> None:
        """Parse what precedes the object: white space, the bracket of a list, or a name."""
        if self._format.named:
            self._word.append(letter)
            if letter == "]" and (name := "".join(self._word)).endswith("[ARGS]"):
                self._values["name"], self._key, self._depth = name.removesuffix("[ARGS]").strip(), "arguments", 1
                self._word.clear()
            self.valid = len(self._word) < _LONGEST_NAME
        elif letter == "{":
            self._depth = 1
        elif not (letter.isspace() or (letter == "[" and self._format.listed)):
            self.valid = False

    def _begin_value(self) -> None:
        self._key = _text_of(self._word)
        self._word.clear()
        self.valid = self._key in _KEYS and self._key not in self._values

    def _end_value(self) -> None:
        if self._key is None:  # an empty object, or an extra comma
            self.valid = False
            return
        value = _text_of(self._word) if self._key == "name" else "".join(self._word).rstrip()
        self.valid = value is not None
        self._values[self._key] = value or ""
        self._word.clear()
        self._key = None


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
