"""The terminal of a chat: typed or piped messages, streamed text, live statistics in the last row, and summary lines."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

from outrider.serve.chat_partner import Summary

__all__ = ["LiveStats", "Screen", "StatusRow", "TypedMessages", "finished", "piped_message", "printable", "totals"]

_BLOCK = '"""'
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REFRESH_S = 0.1


def printable(text: str) -> str:
    """Model text without control characters that would affect the terminal."""
    return _CONTROL.sub("\ufffd", text)


@dataclass(slots=True)
class LiveStats:
    """Statistics of a growing answer. A round is a run of accepted draft tokens and the target's token after them."""

    tokens: int = 0
    rounds: int = 0
    guessed: int = 0
    first: float = 0.0
    last: float = 0.0
    _open: bool = False

    def add(self, guessed: Sequence[bool]) -> None:
        if not guessed:
            return
        self.last = perf_counter()
        self.first = self.first or self.last
        for guess in guessed:
            self.rounds += not self._open
            self._open = guess
        self.tokens += len(guessed)
        self.guessed += sum(guessed)

    def line(self) -> str:
        spent = self.last - self.first
        speed = f"{(self.tokens - 1) / spent:.1f}" if spent > 0 else "…"
        per_round, share = self.tokens / max(self.rounds, 1), self.guessed / max(self.tokens, 1)
        return f"{self.tokens} tokens · {speed} tok/s · {per_round:.2f} per round · {share:.0%} guessed · Ctrl-C stops"


class StatusRow:
    """The terminal's last row, kept free while text scrolls above it."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._rows = 0
        self._shown = 0.0

    def __enter__(self) -> StatusRow:
        if self._on:
            self._rows = os.get_terminal_size(sys.stdout.fileno()).lines
            _write(f"\n\x1b7\x1b[1;{self._rows - 1}r\x1b8\x1b[1A")  # frees the last row, then limits scrolling to those above
        return self

    def show(self, text: str) -> None:
        now = perf_counter()
        if not self._on or now - self._shown < _REFRESH_S:
            return
        self._shown = now
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        region = "" if rows == self._rows else f"\x1b[1;{rows - 1}r"
        self._rows = rows
        _write(f"\x1b7{region}\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on:
            _write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")


class Screen:
    """Answers go to standard output. Notes go to the terminal, or to standard error if there is none."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def status(self) -> StatusRow:
        return StatusRow(self.live)

    def text(self, text: str) -> None:
        _write(printable(text))

    def note(self, text: str) -> None:
        """Show a message of the program."""
        if self.live:
            _write(f"\x1b[2m{printable(text)}\x1b[0m\n")
        else:
            print(printable(text), file=sys.stderr, flush=True)


def totals(summaries: Sequence[Summary]) -> str:
    """Readable statistics of a conversation."""
    if not summaries:
        return "nothing has been answered yet"
    tokens, rounds = sum(s.tokens for s in summaries), sum(s.rounds for s in summaries)
    drafted, accepted = sum(s.drafted for s in summaries), sum(s.accepted for s in summaries)
    last = summaries[-1]
    lines = [f"{len(summaries)} answer{'s' * (len(summaries) > 1)}, {tokens} tokens, {tokens / max(rounds, 1):.2f} per round"]
    if drafted:
        lines.append(f"drafted {drafted} tokens, {accepted} accepted ({accepted / drafted:.0%})")
    lines.append(f"last: {finished(last)}")
    if last.by_position:
        lines.append("acceptance by position: " + " ".join(f"{share:.0%}" for share in last.by_position))
    return "\n".join(lines)


def finished(summary: Summary) -> str:
    """One line of statistics for an answer."""
    parts = [f"{summary.tokens} tokens", f"{summary.tokens_per_s:.1f} tok/s"]
    if summary.method != "none":
        parts.append(f"{summary.method}: {summary.tokens / max(summary.rounds, 1):.2f} tokens per round")
    if summary.drafted:
        parts.append(f"{summary.accepted / summary.drafted:.0%} of {summary.drafted} guesses accepted")
    if summary.off_reason:
        parts.append(f"speculation off: {summary.off_reason}")
    return " · ".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def is_open(text: str) -> bool:
    """Whether a message continues in the next line: its block of triple quotes is open, or it ends in a backslash."""
    if text.startswith(_BLOCK):
        return len(text) < 2 * len(_BLOCK) or not text.endswith(_BLOCK)
    return text.endswith("\\")


def message_of(text: str) -> str:
    """The message without the quotes or backslashes that continue it over several lines."""
    if text.startswith(_BLOCK):
        return text.removeprefix(_BLOCK).removesuffix(_BLOCK).removeprefix("\n").removesuffix("\n")
    return text.replace("\\\n", "\n")


def piped_message() -> str | None:
    """The next message of standard input; None at its end."""
    text = sys.stdin.readline()
    if not text:
        return None
    text = text.removesuffix("\n")
    while is_open(text) and (line := sys.stdin.readline()):
        text += "\n" + line.removesuffix("\n")
    return message_of(text)


class TypedMessages:
    """Messages typed at a terminal. Enter sends a complete message. The arrow keys edit and recall."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition

        self._session: PromptSession[str] = PromptSession(
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)), prompt_continuation="… "
        )

    def read(self) -> str | None:
        """The next message; None when the user leaves with Ctrl-D, empty when Ctrl-C discards what was typed."""
        try:
            return message_of(self._session.prompt("> "))
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("(Ctrl-D or /quit leaves)")
            return ""
