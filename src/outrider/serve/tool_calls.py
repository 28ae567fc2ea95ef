"""Parses tool calls from a model's text: complete, or as a stream."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.serve.call_readers import READERS, Call, Malformed
from outrider.serve.tool_formats import FORMATS, Format, Tool

__all__ = ["CallDelta", "ToolCall", "ToolStream", "collect", "new_id", "overlap"]


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
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def collect(deltas: Iterable[CallDelta]) -> tuple[str | None, list[ToolCall]]:
    """The whole text and the whole calls of a stream. The text is None if there are only calls."""
    content = ""
    calls: list[ToolCall] = []
    for delta in deltas:
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
        self._tools = tools
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
            opened = overlap(held, self._format.opening)
            held = held[:-opened].rstrip() if opened else held
            self._add_text(held if held.strip() or not self.called else "", out)
            self._buffer, self._call = "", None
            return out
        if self._call is not None and not self._call.announced:
            self._buffer = self._call.text + self._buffer
            self._call = None
        closing = self._after and any(mark.startswith(self._buffer.strip()) for mark in ("", *self._format.closings))
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
        form, marker = self._format, self._format.opening
        bare = bool(form.bare) and self._fresh and self._buffer.lstrip().startswith(form.bare)
        start = 0 if bare else self._buffer.find(marker)
        if start >= 0:
            text, after = self._buffer[:start], self._buffer[start + (0 if bare else len(marker)) :]
            if text.strip():
                self._add_text(text.rstrip(), out)
            self._call = _CallReader(form, self._tools, "" if bare else marker, form.before.strip())
            self._buffer = after
            return True
        safe = len(self._buffer) - overlap(self._buffer, marker)
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
            if not call.announced:
                self._add_text(call.text, out)
            elif rest := call.new_arguments():  # of a call that went wrong after it was announced
                out.append(CallDelta(index=self._calls - 1, arguments=rest))
            return True
        if call.name is not None:
            first = not call.announced
            new_text = call.new_arguments()
            if first:
                out.append(CallDelta(index=self._calls, id=new_id(self._format), name=call.name, arguments=new_text))
                self._calls += 1
            elif new_text:
                out.append(CallDelta(index=self._calls - 1, arguments=new_text))
        if call.done:
            self._call, self._after = None, True
        return call.done or bool(self._buffer)

    def _between(self) -> bool:
        """Parse what follows a call: its closing, and perhaps another call."""
        form, text = self._format, self._buffer.lstrip()
        between = form.between.strip()
        if not text:
            return False
        if form.listed and any(start and text.startswith(start) for start in (form.start, between)):
            self._call = _CallReader(form, self._tools)
            self._buffer = text.removeprefix(between)
        elif any(mark.startswith(text) and text != mark for mark in (*form.closings, form.start if form.listed else "")):
            return False
        else:
            closing = next((mark for mark in form.closings if text.startswith(mark)), "")
            self._buffer = text.removeprefix(closing) if closing else self._buffer
        self._after = False
        return True

    def _add_text(self, text: str, out: list[CallDelta]) -> None:
        text = text.lstrip() if self._fresh and self.called else text
        if text:
            out.append(CallDelta(content=text))
            self._fresh = self._fresh and not text.strip()


class _CallReader:
    """Passes letters to the reader of a syntax, and decides when the call may be announced."""

    def __init__(self, form: Format, tools: Sequence[Tool], opening: str = "", bracket: str = "") -> None:
        self.text = opening  # the whole text until the call is announced, in case it is malformed
        self.valid = True
        self.done = False
        self.announced = False
        self.name: str | None = None  # set when the call may be announced
        self._bracket: str | None = bracket  # may stand before the first call; None once the call has begun
        self._found = Call({tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools})
        self._reader = READERS[form.syntax](form, self._found)
        next(self._reader)

    def take(self, text: str) -> int:
        """Parse more text, up to a letter at which a decision is due. Returns how many letters belong to the call."""
        used = 0
        while used < len(text) and self.valid and not self.done:
            used += 1
            self._send(text[used - 1])
            if not self.announced and self._found.name is not None:
                break  # decided at the same letter however the text is split
        if not self.announced:
            self.text += text[:used]
            self._decide()
        return used

    def new_arguments(self) -> str:
        """The arguments that were parsed since the last call of this function."""
        parts = self._found.arguments
        text, first, self.announced = "".join(parts), not self.announced, True
        parts.clear()
        return (text.lstrip() or "{}") if first else text

    def _send(self, letter: str) -> None:
        if self._bracket is not None:
            if letter.isspace():
                return
            is_bracket, self._bracket = letter == self._bracket, None
            if is_bracket:
                return
        try:
            self._reader.send(letter)
        except StopIteration:
            self.done = True
        except Malformed:
            self.valid = False

    def _decide(self) -> None:
        """Decide whether the call may be announced: it names a tool, and its arguments have started or there are none."""
        called = self._found.name
        if called is not None:
            arguments = "".join(self._found.arguments).lstrip()
            self.valid = self.valid and called in self._found.schemas and (not arguments or arguments.startswith("{"))
            self.name = called if self.valid and (arguments or self.done) else None
        elif self.done:
            self.valid = False


def overlap(text: str, marker: str) -> int:
    """How many letters at the end of the text may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def new_id(form: Format) -> str:
    """A new call id."""
    if form.short_ids:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return "call_" + secrets.token_hex(12)
