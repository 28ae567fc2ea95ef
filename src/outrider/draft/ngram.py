"""Prompt lookup: the text so far predicts its own continuation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Self

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.automaton import Searched
from outrider.draft.context import DraftContext
from outrider.draft.lookup import AcceptanceRates, LookupDrafter, verified_nodes
from outrider.draft.options import option
from outrider.draft.shared_texts import SharedTexts
from outrider.draft.suffix_array import SuffixArray
from outrider.errors import InvalidParameter

__all__ = ["NGramDrafter", "NGramOptions"]

_FIRST, _LATER = 0.7, 0.9  # chances of a copy's first token and of each further one, before anything was seen


@dataclass(frozen=True, slots=True)
class NGramOptions:
    """Lengths of the suffixes that are looked up."""

    ngram_min: int = option(2, "shortest suffix looked up", 1, 32)
    ngram_max: int = option(4, "longest suffix looked up", 1, 32)
    shared_tokens: int = option(0, "tokens of finished outputs kept and searched, those of the same tenant alone", 0)

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_min <= self.ngram_max <= 32:
            shown = f"{self.ngram_min} and {self.ngram_max}"
            raise InvalidParameter("ngram_min", f"need 1 <= ngram_min <= ngram_max <= 32, got {shown}")


class _Match(NamedTuple):
    """Where a copy starts, and how many tokens before it agree with the text."""

    position: int
    matched: int
    source: Searched | None = None  # an earlier text or the corpus, where it is not the sequence's text


class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    def __init__(self, lengths: range) -> None:
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in lengths]  # n-gram -> token after it
        self._indexed = 1  # tokens whose preceding n-grams are in

    def extend(self, tokens: list[int]) -> None:
        """Take in new tokens: O(longest - shortest) per token, whatever the context's length."""
        for position in range(self._indexed, len(tokens)):
            for n, table in self._tables:
                if n <= position:
                    table[tuple(tokens[position - n : position])] = position
        self._indexed = len(tokens)

    def lookup(self, recent: Seq[int]) -> _Match | None:
        """The latest earlier occurrence of the longest matching suffix."""
        for n, table in reversed(self._tables):
            if n <= len(recent):
                position = table.get(tuple(recent[len(recent) - n :]))
                if position is not None:
                    return _Match(position, n)
        return None


class _Copy(NamedTuple):
    """The latest draft of a sequence, kept until it is known what was accepted."""

    base: int  # tokens of the text it followed
    tree: Tree
    matched: int


class NGramDrafter(LookupDrafter[_Index]):
    """Copies what followed the last occurrence of the current suffix.

    What it does: finds the longest suffix of ngram_min to ngram_max tokens that occurred before
        in prompt or output and drafts the tokens that followed it; a copy that reaches the end of
        the text goes on into its own draft, so loops are drafted whole. With `shared_tokens` > 0
        finished outputs of the same tenant are looked up where they agree with more tokens, and so is the user's corpus.
        Survival is estimated from how often copies after a match of that length were accepted.
    When it helps: editing, summarising, code: wherever the output repeats the input or itself.
    Cost: a few dictionary look-ups per token, independent of the context's length.
    Needs: nothing from the target.
    Reference: Saxena, Prompt Lookup Decoding, 2023.
    """

    Options = NGramOptions

    def __init__(self, options: NGramOptions = NGramOptions(), corpus: SuffixArray | None = None) -> None:
        super().__init__(options, SharedTexts(options.shared_tokens, options.ngram_max + 1), corpus)
        self._lengths = range(options.ngram_min, options.ngram_max + 1)
        self._last: dict[Sequence, _Copy] = {}
        self._rates = AcceptanceRates()

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls(context.options(cls.Options), context.corpus)

    def start(self, seq: Sequence) -> _Index:
        return _Index(self._lengths)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self._last.clear()
        return super().propose(batch, plan)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Count which tokens of the latest copies became text, whoever's draft was verified."""
        for seq, (base, tree, matched) in self._last.items():
            for node, is_accepted in verified_nodes(tree.tokens, tree.parents, seq.tokens[base:]):
                self._rates.record((seq.request.params.greedy, matched, node == 0), is_accepted)
        self._last.clear()

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._last.pop(seq, None)

    def draft(self, seq: Sequence, nodes: int, branches: bool) -> Tree:
        match = self._find(seq, (), shares=branches)
        tree = self._copied(seq, (), match, nodes)
        if match is not None:
            self._last[seq] = _Copy(len(seq.tokens), tree, match.matched)
        return tree

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        return self._copied(seq, path, self._find(seq, path), nodes)

    def _find(self, seq: Sequence, path: Seq[int], shares: bool = True) -> _Match | None:
        index, recent = self._states[seq], [*seq.tokens[-self._lengths[-1] :], *path]
        index.extend(seq.tokens)
        best = index.lookup(recent)
        others: list[Searched] = [*self._shared.of(seq.request.owner), *self.corpus_of(seq)] if shares else []
        for text in others:
            place, matched = text.latest(recent[-self._lengths[-1] :])
            if matched >= max(self._lengths[0], best.matched + 1 if best is not None else 0):
                best = _Match(place, matched, text)
                if text.owner is not None:
                    text.readers.add(seq.request.owner)
        return best

    def _copied(self, seq: Sequence, path: Seq[int], match: _Match | None, nodes: int) -> Tree:
        if match is None:
            return Tree([], [], [])
        if match.source is not None:
            copied = match.source.read(match.position, nodes)
            return Tree.chain(copied, self._chances(seq, match, len(copied)))
        copy: list[int] = [*seq.tokens[match.position : match.position + nodes], *path][:nodes]
        known = len(seq.tokens) - match.position + len(path)
        while len(copy) < nodes:
            copy.append(copy[len(copy) - known])
        return Tree.chain(copy, self._chances(seq, match, nodes))

    def _chances(self, seq: Sequence, match: _Match, nodes: int) -> list[float]:
        greedy = seq.request.params.greedy
        first = self._rates.rate((greedy, match.matched, True), _FIRST)
        later = self._rates.rate((greedy, match.matched, False), _LATER)
        return [first * later**i for i in range(nodes)]
