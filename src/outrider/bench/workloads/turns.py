"""A prompt of a workload as requests: one, or one for each turn of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidParameter
from outrider.text import Tokenizer

__all__ = ["Conversation", "Prompt", "TurnReader"]

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn; the answers between are the model's."""

    turns: tuple[str, ...]


Prompt = str | Ids | Conversation


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
        said: list[str] = []  # turns and answers, alternating
        requests: list[Ids] = []
        for number, turn in enumerate(turns, 1):
            ids = self._encode([*said, turn])
            if len(ids) > self.room:
                return requests, len(turns) - number + 1
            requests.append(ids)
            if number < len(turns):
                said += [turn, self.answer(ids)]
        return requests, 0

    def _encode(self, said: Sequence[str]) -> Ids:
        if self.tokenizer is None:
            raise InvalidParameter("workload", "it holds text, and the model has no tokenizer; use random")
        if not self.chat:
            return tuple(self.tokenizer.encode("\n\n".join(said)))
        roles = ("user", "assistant")
        return tuple(self.tokenizer.chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]))
