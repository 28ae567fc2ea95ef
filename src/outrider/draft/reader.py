"""A drafter's memory of what lies in its KV: which text filled which pages, and which tokens lie in which slots."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from outrider.cache import OutOfPages, PageTable, SequenceState
from outrider.core import FutureTokens, Sequence, Tree, Verdict
from outrider.draft.window import AHEAD
from outrider.model import Feed, Runner
from outrider.model.runner import Chances, PendingChains, Tokens, TreeGrowth, Verified
from outrider.sampling import Row

__all__ = ["Chains", "Held", "PageBook", "Reader", "Text", "committed_rows"]

Chains = tuple[list[list[int]], list[list[float]]]  # tokens and chances of each


class Held(NamedTuple):
    """What a sequence finds in its pages when it begins."""

    tokens: int = 0  # leading tokens whose entries are there
    feature: Tensor | None = None  # the target's at the last of them


class PageBook:
    """For each full page, the text that a drafter filled it for (as a running hash) and the last feature in it.

    Drafters keep their KV under the target's page ids, so a page that a new sequence finds filled (a prefix-cache hit)
    may hold the drafter's entries too. It does where the drafter filled it for the same text; where it did not, the
    drafter reads that text again or does without it. A hash that met another text's would cost acceptance, never a token.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[int, tuple[int, Tensor | None]] = {}
        self._hashes: dict[Sequence, list[int]] = {}  # of the text up to the end of each page

    def begin(self, seq: Sequence) -> Held:
        """What the pages a sequence starts with hold; nothing where they are empty."""
        self._hashes[seq] = []
        held = Held()
        for index in range(seq.cached // self.page_size):
            text, feature = self._pages.get(seq.pages[index], (None, None))
            if text != self._hash(seq, index):
                break
            held = Held((index + 1) * self.page_size, feature)
        return held

    def end(self, seq: Sequence) -> None:
        self._hashes.pop(seq, None)

    def overwrite(self, pages: Seq[int], start: int) -> None:
        """Slots from `start` on are about to be written."""
        for page in pages[start // self.page_size :]:
            self._pages.pop(page, None)

    def fill(self, seq: Sequence, start: int, stop: int, features: Tensor | None = None) -> None:
        """Slots of a sequence now hold the entries of its committed tokens; the features are those of tokens from `start` on."""
        for index in range(start // self.page_size, stop // self.page_size):
            feature = None if features is None else features[(index + 1) * self.page_size - 1 - start].clone()
            self._pages[seq.pages[index]] = (self._hash(seq, index), feature)

    def _hash(self, seq: Sequence, index: int) -> int:
        known, size = self._hashes[seq], self.page_size
        while len(known) <= index:
            place = len(known) * size
            known.append(hash((known[-1] if known else seq.request.adapter, *seq.tokens[place : place + size])))
        return known[index]


class Text(NamedTuple):
    """What a draft model is to read for a sequence, in its own token ids."""

    seq: Sequence
    ids: Seq[int]
    settled: int  # leading ids that will not change any more


@dataclass(slots=True)
class _Slots:
    """What the draft model's KV holds for one sequence."""

    fed: list[int] = field(default_factory=list)  # token in each slot, in order
    first: int = 0  # slot of the first token that was read; what lies before is out of sight
    checked: int = 0  # leading slots known to hold settled tokens
    pages: list[int] = field(default_factory=list)  # where the model does not use the target's
    state: SequenceState | None = None  # of the draft model's recurrent layers
    drawn: tuple[Feed, FutureTokens] | None = None  # what a chain on the device was drawn after, and the chain

    def valid(self, ids: Seq[int], settled: int, limit: int) -> int:
        """Leading slots, at most `limit`, that hold this text; the others are forgotten.

        After full acceptance the last drafted token was never fed, and after a rejection the slots
        hold what was rejected: comparing tokens covers both, and rounds this drafter sat out.
        """
        limit = min(len(self.fed), limit)
        keep = min(self.checked, limit)
        while keep < limit and self.fed[keep] == ids[keep]:
            keep += 1
        if self.state is not None and self.state.at(keep) is None:  # recurrent layers cannot go on from there
            keep = 0
            self.state.restart()
        self.checked = min(keep, settled)
        del self.fed[keep:]
        return keep


class Reader:
    """Feeds a draft model what it has not read yet.

    A text that outgrows the model's context is read again from its last half on, as if it began there.

    Its KV lies in the target's pages, slot for slot. A model with another tokenizer has other
    slots, and takes pages from a separate table.
    """

    def __init__(self, runner: Runner, separate_pages: bool = False) -> None:
        self.runner = runner
        self.context = runner.decoder.spec.context
        self.positions = runner.decoder.reach  # tokens that a text may have
        self._sight = self.context - min(AHEAD, self.context // 4) if self.positions > self.context else self.positions
        self._states: dict[Sequence, _Slots] = {}
        self._recurrent = bool(runner.decoder.spec.recurrent)
        self._book = PageBook(runner.pool.page_size)
        self._table = PageTable(runner.pool.pages - 1, runner.pool.page_size) if separate_pages else None

    def begin(self, seq: Sequence) -> None:
        """Start a sequence; what its pages hold already is not read again."""
        state = self._states[seq] = _Slots()
        held = 0 if self._table is not None else self._book.begin(seq).tokens
        if self._recurrent:  # no page keeps their states
            state.state = SequenceState()
        elif held:
            state.fed, state.checked = seq.tokens[:held], held

    def end(self, seq: Sequence) -> None:
        state = self._states.pop(seq, None)
        if state is not None and self._table is not None:
            self._table.release(state.pages)
        self._book.end(seq)

    def first_key(self, seq: Sequence) -> int:
        """The first slot that rows after the text see."""
        return self._states[seq].first

    def pages(self, seq: Sequence) -> list[int]:
        return seq.pages if self._table is None else self._states[seq].pages

    def state(self, seq: Sequence) -> SequenceState | None:
        """The state of the draft model's recurrent layers."""
        return self._states[seq].state

    def rotary_start(self, seq: Sequence) -> int:
        """The first row of the draft model's rotary table for the request's length."""
        return self.runner.decoder.rotary_start(seq.max_length)

    def room(self, seq: Sequence, slots: int) -> bool:
        """Whether that many slots are, or could be made, available."""
        if self._table is None:
            return True  # the engine reserves them with the target's
        try:
            self._table.extend(self._states[seq].pages, slots)
        except OutOfPages:
            return False
        return True

    def read(self, texts: Seq[Text], counts: Seq[int] = ()) -> Tensor:
        """The logits after the last `counts` tokens of each text (by default after the newest), feeding what its slots lack."""
        counts = counts or [1] * len(texts)
        feeds = self._feeds(texts, counts)
        ends = accumulate(len(feed.tokens) for feed in feeds)
        rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        logits = self.runner.logits(self.runner.forward(feeds).last, rows)
        self._fill(texts, feeds)
        return logits

    def draft(
        self, texts: Seq[Text], lengths: Seq[int], draft_temperatures: Seq[float], threshold: float = 0.0
    ) -> tuple[list[list[int]], list[list[float]], Tensor | None]:
        """Chains of guesses after each text, their chances, and the logits (steps, texts, V) behind them where there are some."""
        feeds, rows = self._feeds(texts), [Row.at(text.seq) for text in texts]
        tokens, chances, logits = self.runner.draft(feeds, rows, lengths, draft_temperatures, threshold)
        return *self._drafted(texts, feeds, lengths, (tokens, chances)), logits

    def draw(self, texts: Seq[Text], lengths: Seq[int]) -> tuple[PendingChains, Callable[[], Chains]]:
        """Chains from a runner that overlaps drafts, and how to wait for their tokens and chances."""
        feeds = self._feeds(texts)
        pending = self.runner.draw(feeds, [Row.at(text.seq) for text in texts], lengths)

        def wait() -> Chains:
            return self._noted(texts, feeds, lengths, pending)

        return pending, wait

    def draw_next(
        self, sequences: Seq[Sequence], choices: Seq[FutureTokens], lengths: Seq[int]
    ) -> tuple[PendingChains, Callable[[Seq[Text]], Chains]] | None:
        """Chains after the text that the round in flight leaves, by the target's `choices` there; None where it is not possible.

        Waiting for them takes what the texts are by then, of those sequences that go on.
        """
        states = [self._states[seq] for seq in sequences]
        for seq, state, chosen, length in zip(sequences, states, choices, lengths, strict=True):
            longest = len(seq.tokens) + chosen.count + length
            if state.drawn is None or longest > self.positions or longest - state.first > self._sight:
                return None
        verified = [
            Verified(*state.drawn, chosen) for state, chosen in zip(states, choices, strict=True) if state.drawn is not None
        ]
        pending = self.runner.draw_next(verified, [Row.at(seq) for seq in sequences], lengths)
        column_of = {seq: column for column, seq in enumerate(sequences)}

        def wait(texts: Seq[Text]) -> Chains:
            feeds = self._feeds(texts)
            return self._noted(texts, feeds, lengths, pending, [column_of[text.seq] for text in texts])

        return pending, wait

    def knows(self, seq: Sequence) -> bool:
        """Whether a sequence has begun and not ended."""
        return seq in self._states

    def grow(self, texts: Seq[Text], rooms: Seq[int], growth: TreeGrowth) -> list[Tree]:
        """A tree after each text, from a runner that grows trees; none where its logits leave no choice."""
        feeds = self._feeds(texts)
        grown = self.runner.grow(feeds, [Row.at(text.seq) for text in texts], rooms, growth)
        self._fill(texts, feeds)
        return [Tree(*tree) for tree in grown]

    def extend(self, seq: Sequence, feed: Feed) -> None:
        """Remember nodes about to be fed, as far as they lie where they would as text."""
        fed = self._states[seq].fed
        for slot in range(feed.known, len(feed.parents)):
            if feed.parents[slot] == slot - 1 and len(fed) == feed.start + slot:
                fed.append(feed.nodes[slot - feed.known])

    def _noted(
        self, texts: Seq[Text], feeds: Seq[Feed], lengths: Seq[int], pending: PendingChains, columns: Seq[int] | None = None
    ) -> Chains:
        """What was drawn on the device for the texts, which may be some of its chains; the next draft may follow it there."""
        columns = range(len(texts)) if columns is None else columns
        tokens, chances = pending.resolve()
        wanted = [lengths[column] for column in columns]
        chains = self._drafted(texts, feeds, wanted, ([tokens[c] for c in columns], [chances[c] for c in columns]))
        for text, feed, column in zip(texts, feeds, columns, strict=True):
            self._states[text.seq].drawn = (feed, pending.future[column]) if pending.is_intact() else None
        return chains

    def _drafted(self, texts: Seq[Text], feeds: Seq[Feed], lengths: Seq[int], drawn: tuple[Tokens, Chances]) -> Chains:
        """Remember what was drawn, and return the planned part of it."""
        self._fill(texts, feeds)
        tokens = [row[:n] for row, n in zip(drawn[0], lengths, strict=True)]
        chances = [row[:n] for row, n in zip(drawn[1], lengths, strict=True)]
        for text, row in zip(texts, tokens, strict=True):
            self._states[text.seq].fed += row[:-1]
        return tokens, chances

    def _feeds(self, texts: Seq[Text], counts: Seq[int] = ()) -> list[Feed]:
        """What each text's slots lack. Its last tokens are always fed again, because their logits are wanted."""
        feeds = []
        for (seq, ids, settled), count in zip(texts, counts or [1] * len(texts), strict=True):
            state, pages = self._states[seq], self.pages(seq)
            state.drawn = None
            start = state.valid(ids, settled, len(ids) - count)
            if len(ids) - state.first > self._sight:
                start = state.first = len(ids) - max(self.context // 2, count)
                state.fed = list(ids[:start])
            self._book.overwrite(pages, start)
            first, turned = state.first, self.rotary_start(seq)
            feeds.append(Feed(pages, start, ids[start:], first_key=first, rotary_start=turned, state=state.state))
            state.fed += ids[start:]
        return feeds

    def _fill(self, texts: Seq[Text], feeds: Seq[Feed]) -> None:
        if self._table is None:
            for text, feed in zip(texts, feeds, strict=True):
                if not feed.first_key:  # else its pages lack the text before
                    self._book.fill(text.seq, feed.start, text.settled)


def committed_rows(first: int, fed: int, verdict: Verdict) -> slice | list[int]:
    """Rows of the tokens that a sequence was fed and of the nodes that were accepted; a chain's lie side by side."""
    after = first + fed
    if verdict.path == list(range(len(verdict.path))):
        return slice(first, after + len(verdict.path))
    return [*range(first, after), *(after + node for node in verdict.path)]
