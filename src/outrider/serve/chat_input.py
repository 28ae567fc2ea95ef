"""Messages of a terminal chat: typed with history and editing, or read line by line from a pipe."""

from __future__ import annotations

import sys

__all__ = ["TypedMessages", "message_of", "piped_message"]

_BLOCK = '"""'


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
