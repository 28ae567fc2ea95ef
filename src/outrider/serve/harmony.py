"""Reads the messages of gpt-oss: reasoning, answers and tool calls, each in a channel of its own.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.serve.tool_calls import CallDelta, new_id, overlap
from outrider.serve.tool_formats import FORMATS, Tool

__all__ = ["HarmonyStream"]

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STARTS = ("<|start|>", "<|channel|>")
_HEADERS = (*_STARTS, "to=", "assistant")  # how a header may begin
_LONGEST_HEADER = 256
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")


class HarmonyStream:
    """Parses messages from a stream of text. A header is held back until it is complete.

    Text of the channel `analysis` is reasoning, messages to a tool are calls, and everything else is the answer. A message
    to an unknown tool stays text.
    """

    def __init__(self, tools: Sequence[Tool], reasoning: bool = True) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._splits = reasoning  # without it reasoning is part of the answer
        self._buffer = ""
        self._channel = ""  # of the message that is read: reasoning, content or call; empty in a header
        self._name = ""  # of the tool of a call that is not announced yet
        self._header = ""  # of that call
        self._gap = {"reasoning": "", "content": ""}  # before the next message of a channel
        self._calls = 0
        self._begun = False  # a header has been read

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._calls > 0

    def push(self, text: str) -> list[CallDelta]:
        """The deltas of new text."""
        self._buffer += text
        out: list[CallDelta] = []
        while self._buffer and (self._in_message(out) if self._channel else self._in_header(out)):
            pass
        return out

    def finish(self, cut: bool = False) -> list[CallDelta]:
        """The deltas of text that was held back, at the end of the output. `cut` drops an incomplete header or marker."""
        out: list[CallDelta] = []
        if cut:
            held = overlap_of(self._buffer, (*_ENDS, *_STARTS)) if self._channel else len(self._buffer)
            self._add(self._buffer[: len(self._buffer) - held], out)
        elif self._channel:
            self._add(self._buffer, out)
            self._end(out)
        elif self._buffer.strip() or not self._begun:
            self._channel = "content"
            self._add(self._buffer, out)
        self._buffer = ""
        return out

    def _in_header(self, out: list[CallDelta]) -> bool:
        """Read a header up to its end. Text that begins like none is an answer without a channel."""
        text = self._buffer.lstrip()
        if not any(text.startswith(start) or start.startswith(text) for start in _HEADERS):
            self._channel = "content"
            return True
        place = self._buffer.find(_MESSAGE)
        if place < 0 and len(self._buffer) < _LONGEST_HEADER + len(_MESSAGE):
            return False
        is_header = 0 <= place <= _LONGEST_HEADER
        end = place + len(_MESSAGE) if is_header else _LONGEST_HEADER
        header, self._buffer = self._buffer[:end], self._buffer[end:]
        if is_header:
            self._open(header, out)
        else:
            self._channel = "content"
            self._add(header, out)
        return True

    def _open(self, header: str, out: list[CallDelta]) -> None:
        self._begun = True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._channel, self._name, self._header = "call", recipient[1], header
            if self._name not in self._names:
                self._give_up(out)
        elif channel is not None and channel[1] == "analysis" and self._splits:
            self._channel = "reasoning"
        else:
            self._channel = "content"

    def _in_message(self, out: list[CallDelta]) -> bool:
        """Read a message up to its end."""
        places = [(place, mark) for mark in (*_ENDS, *_STARTS) if (place := self._buffer.find(mark)) >= 0]
        if not places:
            safe = len(self._buffer) - overlap_of(self._buffer, (*_ENDS, *_STARTS))
            text, self._buffer = self._buffer[:safe], self._buffer[safe:]
            self._add(text, out)
            return False
        place, mark = min(places)
        self._add(self._buffer[:place], out)
        self._buffer = self._buffer[place:] if mark in _STARTS else self._buffer[place + len(mark) :]
        self._end(out)
        return True

    def _add(self, text: str, out: list[CallDelta]) -> None:
        if self._channel == "call" and self._name:
            text = text.lstrip()
            if text and not text.startswith("{"):
                self._give_up(out)
        if not text:
            return
        if self._channel == "call":
            self._write_arguments(text, out)
        elif self._channel == "reasoning":
            out.append(CallDelta(reasoning=self._gap["reasoning"] + text))
            self._gap["reasoning"] = ""
        else:
            out.append(CallDelta(content=self._gap["content"] + text))
            self._gap["content"] = ""

    def _write_arguments(self, text: str, out: list[CallDelta]) -> None:
        if self._name:
            out.append(CallDelta(index=self._calls, id=new_id(FORMATS["harmony"]), name=self._name, arguments=text))
            self._name = ""
            self._calls += 1
        else:
            out.append(CallDelta(index=self._calls - 1, arguments=text))

    def _give_up(self, out: list[CallDelta]) -> None:
        """What looked like a call is text."""
        self._channel, self._name = "content", ""
        out.append(CallDelta(content=self._gap["content"] + self._header))
        self._gap["content"] = ""

    def _end(self, out: list[CallDelta]) -> None:
        if self._channel == "call" and self._name:
            self._write_arguments("{}", out)
        if self._channel in self._gap:
            self._gap[self._channel] = "\n"
        self._channel = ""


def overlap_of(text: str, marks: Sequence[str]) -> int:
    """How many letters at the end of the text may be the beginning of one of the marks."""
    return max(overlap(text, mark) for mark in marks)
