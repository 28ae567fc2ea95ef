"""Prompt lookup: the text so far predicts its own continuation."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.errors import InvalidParameter

__all__ = ["NGramDrafter"]


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    after: list[dict[tuple[int, ...], int]]  # per n: n-gram -> position of the token after it
    indexed: int = 0  # tokens whose preceding n-grams are in
    by_n: range = field(default_factory=lambda: range(0))

    def extend(self, tokens: list[int]) -> None:
        """Take in new tokens: O(longest - shortest) per token, whatever the context's length."""
        for position in range(max(self.indexed, 1), len(tokens)):
            for table, n in zip(self.after, self.by_n, strict=True):
                if n <= position:
                    table[tuple(tokens[position - n : position])] = position
        self.indexed = len(tokens)

    def lookup(self, tokens: list[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest matching suffix."""
        for table, n in zip(reversed(self.after), reversed(self.by_n), strict=True):
            if n <= len(tokens):
                position = table.get(tuple(tokens[len(tokens) - n :]))
                if position is not None:
                    return position
        return None


class NGramDrafter:
    """Copies what followed the last occurrence of the current suffix.

    What it does: finds the longest suffix of ngram_min to ngram_max tokens that occurred before
        in prompt or output and drafts the tokens that followed it; a copy that reaches the end of
        the text goes on into its own draft, so loops are drafted whole.
    When it helps: editing, summarising, code: wherever the output repeats the input or itself.
    Cost: a few dictionary look-ups per token, independent of the context's length.
    Needs: nothing from the target.
    Reference: Saxena, Prompt Lookup Decoding, 2023.
    """

    needs = Needs()

    def __init__(self, ngram_min: int = 2, ngram_max: int = 4) -> None:
        if not 1 <= ngram_min <= ngram_max <= 32:
            raise InvalidParameter("ngram_min", f"need 1 <= ngram_min <= ngram_max <= 32, got {ngram_min} and {ngram_max}")
        self._lengths = range(ngram_min, ngram_max + 1)
        self._indexes: dict[Sequence, _Index] = {}

    def begin(self, seq: Sequence) -> None:
        self._indexes[seq] = _Index([{} for _ in self._lengths], by_n=self._lengths)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return Drafts.chains([self._draft(seq, n) if n else [] for seq, n in zip(batch.sequences, plan.lengths, strict=True)])

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)

    def _draft(self, seq: Sequence, length: int) -> list[int]:
        index = self._indexes[seq]
        index.extend(seq.tokens)
        position = index.lookup(seq.tokens)
        if position is None:
            return []
        draft: list[int] = seq.tokens[position : position + length]
        known = len(seq.tokens) - position
        while len(draft) < length:
            draft.append(draft[len(draft) - known])
        return draft
