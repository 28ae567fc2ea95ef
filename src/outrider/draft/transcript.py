"""A sequence's text in another tokenizer's ids, kept up as it grows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.text import Span, TextStream, Tokenizer

__all__ = ["Transcript"]

_WINDOW = 32  # tokens encoded again when text comes after them


class Transcript:
    """What another tokenizer makes of a growing text.

    New text can change how the last tokens before it are cut, so a window of them is encoded again.
    Its first half only gives the second its surroundings. What the cut then misses is a guess about
    how the draft model would have read the text, and costs acceptance at most.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.ids: list[int] = draft.bos_ids
        self._target = target
        self._draft = draft
        self._stream = TextStream(target, (), skip_special_tokens=False)
        self._read = 0
        self._text = ""  # of the window
        self._window: list[Span] = []

    @property
    def settled(self) -> int:
        """Leading ids that will not change."""
        return len(self.ids) - len(self._window)

    @property
    def pending(self) -> Seq[int]:
        """The target's tokens of a last character that is still open; they are not in the ids."""
        return self._stream.pending

    def extend(self, tokens: Seq[int]) -> None:
        """Take in what is new of the target's tokens."""
        if not self._read and list(tokens[: len(self._target.bos_ids)]) == self._target.bos_ids:
            self._read = len(self._target.bos_ids)  # the draft's own opens its ids
        text = "".join(map(self._stream.push, tokens[self._read :]))
        self._read = len(tokens)
        if text:
            self._append(text)

    def _append(self, text: str) -> None:
        old, self._text = self._window, self._text + text
        new = self._draft.spans(self._text)
        kept, taken = _meeting(old, new)
        del self.ids[len(self.ids) - len(old) + kept :]
        self.ids += [span.token for span in new[taken:]]
        self._window = [*old[:kept], *new[taken:]]
        drop = max(len(self._window) - _WINDOW, 0)
        while drop and not _apart(self._window, drop):
            drop -= 1
        if drop:
            cut = self._window[drop - 1].end
            self._text = self._text[cut:]
            self._window = [Span(token, start - cut, end - cut) for token, start, end in self._window[drop:]]


def _meeting(old: Seq[Span], new: Seq[Span]) -> tuple[int, int]:
    """How many old tokens to keep, and how many new ones they stand for: the first cut both have in the second half."""
    ends = {span.end: i + 1 for i, span in enumerate(new) if _apart(new, i + 1)}
    for i in range(len(old) // 2, len(old)):
        if i and _apart(old, i) and old[i - 1].end in ends:
            return i, ends[old[i - 1].end]
    return 0, 0


def _apart(spans: Seq[Span], i: int) -> bool:
    """Whether token i begins a new character."""
    return i >= len(spans) or spans[i].start >= spans[i - 1].end
