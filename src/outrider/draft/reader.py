"""A draft model's memory of what it has read: which tokens lie in which slots, and where."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from outrider.cache import OutOfPages, PageTable
from outrider.core import Sequence
from outrider.draft.pagebook import PageBook
from outrider.model import Feed, Runner
from outrider.model.runner import Chances, Tokens
from outrider.sampling import Row

__all__ = ["Reader", "Text"]

Chains = tuple[list[list[int]], list[list[float]]]  # tokens and chances of each


class Text(NamedTuple):
    """What a draft model is to read for a sequence, in its own token ids."""

    seq: Sequence
    ids: Seq[int]
    settled: int  # leading ids that will not change any more


@dataclass(slots=True)
class _State:
    """What the draft model's KV holds for one sequence."""

    fed: list[int] = field(default_factory=list)  # token in each slot, in order
    checked: int = 0  # leading slots known to hold settled tokens
    pages: list[int] = field(default_factory=list)  # where the model has pages of its own

    def valid(self, ids: Seq[int], settled: int) -> int:
        """Leading slots that hold this text; the others are forgotten.

        After full acceptance the last drafted token was never fed, and after a rejection the slots
        hold what was rejected: comparing tokens covers both, and rounds this drafter sat out. The
        newest token is always fed again, because its prediction is wanted.
        """
        limit = min(len(self.fed), len(ids) - 1)
        keep = min(self.checked, limit)
        while keep < limit and self.fed[keep] == ids[keep]:
            keep += 1
        self.checked = min(keep, settled)
        del self.fed[keep:]
        return keep


class Reader:
    """Feeds a draft model what it has not read yet.

    Its KV lies in the target's pages, slot for slot. A model with another tokenizer has other
    slots, and takes pages from a table of its own.
    """

    def __init__(self, runner: Runner, own_pages: bool = False) -> None:
        self.runner = runner
        self.context = runner.decoder.config.context
        self._states: dict[Sequence, _State] = {}
        self._book = PageBook(runner.pool.page_size)
        self._table = PageTable(runner.pool.pages - 1, runner.pool.page_size) if own_pages else None

    def begin(self, seq: Sequence) -> None:
        """Start a sequence; what its pages hold already is not read again."""
        state = self._states[seq] = _State()
        if self._table is None:
            held = self._book.begin(seq).tokens
            state.fed, state.checked = seq.tokens[:held], held

    def end(self, seq: Sequence) -> None:
        state = self._states.pop(seq, None)
        if state is not None and self._table is not None:
            self._table.release(state.pages)
        self._book.end(seq)

    def pages(self, seq: Sequence) -> list[int]:
        return seq.pages if self._table is None else self._states[seq].pages

    def room(self, seq: Sequence, slots: int) -> bool:
        """Whether that many slots are, or could be made, available."""
        if self._table is None:
            return True  # the engine reserves them with the target's
        try:
            self._table.extend(self._states[seq].pages, slots)
        except OutOfPages:
            return False
        return True

    def read(self, texts: Seq[Text]) -> Tensor:
        """The logits (texts, V) after each text's newest token, feeding what its slots lack."""
        feeds = self._feeds(texts)
        last = [row - 1 for row in accumulate(len(feed.tokens) for feed in feeds)]
        logits = self.runner.logits(self.runner.forward(feeds).last, last)
        self._note_all(texts, feeds)
        return logits

    def draft(
        self, texts: Seq[Text], lengths: Seq[int], sharpness: Seq[float], floor: float = 0.0
    ) -> tuple[list[list[int]], list[list[float]], Tensor | None]:
        """Chains of guesses after each text, their chances, and the logits (steps, texts, V) behind them where there are some."""
        feeds = self._feeds(texts)
        tokens, chances, logits = self.runner.draft(feeds, [Row.at(text.seq) for text in texts], lengths, sharpness, floor)
        return *self._drafted(texts, feeds, lengths, (tokens, chances)), logits

    def draw(self, texts: Seq[Text], lengths: Seq[int]) -> tuple[list[list[int]], Callable[[], Chains]]:
        """The same from a runner that draws ahead: promises of the tokens, and how to wait for the chains and their chances."""
        feeds = self._feeds(texts)
        futures, wait = self.runner.draw(feeds, [Row.at(text.seq) for text in texts], lengths)
        return futures, lambda: self._drafted(texts, feeds, lengths, wait())

    def _drafted(self, texts: Seq[Text], feeds: Seq[Feed], lengths: Seq[int], drawn: tuple[Tokens, Chances]) -> Chains:
        """Note what was drawn, and the part of it that was asked for."""
        self._note_all(texts, feeds)
        tokens = [row[:n] for row, n in zip(drawn[0], lengths, strict=True)]
        chances = [row[:n] for row, n in zip(drawn[1], lengths, strict=True)]
        for (seq, _, _), row in zip(texts, tokens, strict=True):
            self._states[seq].fed += row[:-1]
        return tokens, chances

    def _feeds(self, texts: Seq[Text]) -> list[Feed]:
        """What each text's slots lack."""
        feeds = []
        for seq, ids, settled in texts:
            state, pages = self._states[seq], self.pages(seq)
            start = state.valid(ids, settled)
            self._book.overwrite(pages, start)
            feeds.append(Feed(pages, start, ids[start:]))
            state.fed += ids[start:]
        return feeds

    def _note_all(self, texts: Seq[Text], feeds: Seq[Feed]) -> None:
        for (seq, _, settled), feed in zip(texts, feeds, strict=True):
            self._note(seq, feed.start, settled)

    def extend(self, seq: Sequence, feed: Feed) -> None:
        """Remember nodes about to be fed, as far as they lie where they would as text."""
        fed = self._states[seq].fed
        for slot in range(feed.known, len(feed.parents)):
            if feed.parents[slot] == slot - 1 and len(fed) == feed.start + slot:
                fed.append(feed.nodes[slot - feed.known])

    def _note(self, seq: Sequence, start: int, settled: int) -> None:
        if self._table is None:
            size = self._book.page_size
            for index in range(start // size, settled // size):
                self._book.fill(seq, index)
