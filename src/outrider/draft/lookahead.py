"""Lookahead decoding: the target iterates on a window of future tokens while it verifies, and its choices are kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core import ROOT, Batch, Drafts, Scores, Sequence, Tree, Verdict, paths
from outrider.draft.lookup import AcceptanceRates, LookupDrafter, verified_nodes
from outrider.draft.options import option
from outrider.draft.shared_texts import SharedTexts
from outrider.errors import InvalidParameter

__all__ = ["LookaheadDrafter", "LookaheadOptions", "NGramPool"]

_PRIORS = {2: 0.5, 1: 0.3, 0: 0.1}  # a guess's first token, by the tokens of context it was found under; 0: the window
_LATER = 0.6


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Sizes of the window and of the pool."""

    window: int = option(3, "columns; the window takes window * (ngram - 1) nodes, at most half of the draft", 0, 64)
    ngram: int = option(5, "length of the n-grams", 2, 16)
    pool_tokens: int = option(65536, "tokens of n-grams kept for each sequence", 1)
    from_prompt: bool = option(True, "the prompt's n-grams start the pool")
    shared_tokens: int = option(0, "tokens of finished outputs kept and searched, those of the same tenant alone", 0)

    def __post_init__(self) -> None:
        if self.pool_tokens < self.ngram:
            raise InvalidParameter("pool_tokens", f"must hold at least one n-gram of {self.ngram}, got {self.pool_tokens}")


class LookaheadDrafter(LookupDrafter["_Window"]):
    """Drafts from n-grams that the target itself wrote on the side.

    What it does: each forward carries a window of guesses about the future beside the draft. Its
        first level is a chain below the root, and from each token of that chain hangs a column with
        the later guesses for the tokens after it, one Jacobi iteration newer at each step down. The
        target's choice below a column's end is the next iterate. All of it is one ordinary tree, so
        a window path that turns out right is accepted like any other. The choices at all nodes,
        rejected ones too, make n-grams with the tokens before them; the draft is what followed the
        last two tokens, or the last one, in the pool of these. With `shared_tokens` > 0 finished
        outputs of the same tenant are looked up behind the pool.
    When it helps: where nothing repeats and no draft network exists, and extra rows cost little.
    Cost: `window` * (`ngram` - 1) nodes of every forward, at most half of the draft; dictionary
        look-ups, independent of the context's length; memory for `pool_tokens` tokens per sequence.
    Needs: the target's choice at every node, which only the rule `match` makes.
    Reference: Fu et al. 2402.02057.
    """

    Options = LookaheadOptions

    def __init__(self, options: LookaheadOptions = LookaheadOptions()) -> None:
        super().__init__(options, SharedTexts(options.shared_tokens, 3))
        self._ngram = options.ngram
        self._rates = AcceptanceRates()

    def start(self, seq: Sequence) -> _Window:
        pool = NGramPool(self._ngram, self._options.pool_tokens // self._ngram)
        if self._options.from_prompt:
            pool.add_text(seq.tokens, 2)
        return _Window(pool)

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        growing = _MergedPaths(nodes)
        self._add_known(growing, seq, path)
        return growing.guess

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Put what the target chose at every node into the pool, and move the window on."""
        for seq, tree, verdict in zip(batch.sequences, drafts.per_sequence, verdicts, strict=True):
            state, new = self._states.get(seq), len(verdict.tokens)
            if state is None or not new or seq.finish_reason is not None:
                continue
            text = seq.tokens[max(len(seq.tokens) - new - self._ngram, 0) :]
            if verdict.choices:
                state.pool.add_choices(text[:-new], tree, verdict)
            else:
                state.pool.add_text(text, len(text) - new + 1)
            if state.last is not None:
                for node, is_accepted in verified_nodes(state.last.guess.tokens, state.last.guess.parents, verdict.tokens):
                    self._rates.record(state.last.kinds[node], is_accepted)
                state.last = None
            self._advance(state, tree, verdict)

    def draft(self, seq: Sequence, nodes: int, branches: bool) -> Tree:
        """Guesses from the pool and the window, in one tree."""
        state, growing = self._states[seq], _MergedPaths(nodes)
        state.columns = min(self._options.window, nodes // 2 // (self._ngram - 1)) if branches else 0
        self._fill(state, seq)
        growing.room = nodes - state.columns * (self._ngram - 1)
        self._add_known(growing, seq, (), None if branches else 1)
        growing.room = nodes
        for column in range(state.columns):
            growing.add(state.column(column), self._chances(seq, 0, 0))
        state.last = growing
        return growing.guess

    def _add_known(self, growing: _MergedPaths, seq: Sequence, path: Seq[int], limit: int | None = None) -> None:
        """What followed here before, the likeliest first; long drafts go on from where a guess ends."""
        context = [*seq.tokens[-2:], *path][-2:]
        known = list(self._known(seq, context, shares=limit is None))[:limit]
        for rank, (matched, tokens) in enumerate(known):
            growing.add(tokens, self._chances(seq, matched, rank))
        if known:
            chances = self._chances(seq, known[0][0], 0)
            best = [*known[0][1]]
            while growing.room > len(growing.guess.tokens) and len(best) < growing.room:
                further = next(self._known(seq, [*context, *best][-2:], shares=limit is None), None)
                if further is None:
                    break
                best += further[1]
                growing.add(best, chances)

    def _known(self, seq: Sequence, context: Seq[int], shares: bool) -> Iterator[tuple[int, Seq[int]]]:
        """What followed the context in the pool, then what followed it last in earlier texts of the same owner."""
        yield from self._states[seq].pool.after(context)
        for text in self._shared.of(seq.request.owner) if shares else ():
            place, matched = text.latest(context)
            if matched:
                text.readers.add(seq.request.owner)
                yield matched, text.read(place, self._ngram - 1)

    def _chances(self, seq: Sequence, matched: int, rank: int) -> _Chances:
        greedy, rank = seq.request.params.greedy, min(rank, 3)
        first, later = (greedy, matched, rank), (greedy, matched, "later")
        of_first = self._rates.rate(first, _PRIORS[matched] / (1 + rank))
        return _Chances(first, later, of_first, self._rates.rate(later, _LATER))

    def _fill(self, state: _Window, seq: Sequence) -> None:
        """Tokens for columns that have none: what followed the one to the left, or something from the text."""
        while len(state.levels) < self._ngram - 1:
            state.levels.append([])
        for r, level in enumerate(state.levels):
            while len(level) < state.columns:
                left = level[-1] if level else (state.levels[r - 1][0] if r else seq.tokens[-1])
                followed = next(state.pool.after([left]), None)
                level.append(followed[1][0] if followed else seq.tokens[(len(level) * 7 + r * 3) % len(seq.tokens)])

    def _advance(self, state: _Window, tree: Tree, verdict: Verdict) -> None:
        """Drop the oldest level, add the newest, and keep the columns that still lie ahead of the text."""
        if not state.columns or not verdict.choices:  # the window was not part of this round, or nobody chose there
            state.levels = [level[len(verdict.tokens) :] for level in state.levels]
            return
        place = {(parent, token): node for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))}
        newest = []
        for column in range(state.columns):
            node = ROOT
            for token in state.column(column):
                node = place.get((node, token), -2)
            if node < 0 or verdict.choices[1 + node] < 0:
                break
            newest.append(verdict.choices[1 + node])
        passed = len(verdict.tokens) - 1
        state.levels = [level[passed:] for level in (*state.levels[1:], newest)]
        state.columns = 0


class _Chances(NamedTuple):
    """The kinds of a path's first token and of its further ones, and how likely each is."""

    first: Hashable
    later: Hashable
    of_first: float
    of_later: float


@dataclass(slots=True)
class _MergedPaths:
    """A draft while paths are added to it; paths with a common start share nodes."""

    room: int
    guess: Tree = field(default_factory=lambda: Tree([], [], []))
    kinds: list[Hashable] = field(default_factory=list)
    _place: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, path: Seq[int], chances: _Chances) -> None:
        """As much of a path as there is room for."""
        node, survival = ROOT, 1.0
        for i, token in enumerate(path):
            below = self._place.get((node, token))
            survival *= chances.of_later if i else chances.of_first
            if below is None:
                if len(self.guess.tokens) >= self.room:
                    return
                below = self._place[node, token] = len(self.guess.tokens)
                self.guess.tokens.append(token)
                self.guess.parents.append(node)
                self.guess.survival.append(min(survival, self.guess.survival[node]) if node >= 0 else survival)
                self.kinds.append(chances.later if i else chances.first)
            node = below


@dataclass(slots=True)
class _Window:
    """One sequence's pool and window."""

    pool: NGramPool
    levels: list[list[int]] = field(default_factory=list)  # oldest first; column c of level r guesses c + r tokens ahead
    columns: int = 0  # of the window in the draft that waits for its verdict
    last: _MergedPaths | None = None

    def column(self, column: int) -> list[int]:
        """The path of a column's end: the first level up to it, then down its levels."""
        return [*self.levels[0][: column + 1], *(level[column] for level in self.levels[1:])]


class NGramPool:
    """What followed one token and what followed two, the latest first; at most `limit` n-grams."""

    _EACH = 6  # continuations kept for the same context

    def __init__(self, ngram: int, limit: int) -> None:
        self._ngram = ngram
        self._limit = limit
        self._after: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}  # the stalest context first, so inside too
        self.size = 0

    def after(self, context: Seq[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Continuations, those of the longer context first, each with the length of its context."""
        for length in (2, 1):
            if len(context) >= length:
                for tokens in reversed(self._after.get(tuple(context[len(context) - length :]), {})):
                    yield length, tokens

    def add(self, gram: Seq[int]) -> None:
        """An n-gram, or the shorter one a text begins with; its last two tokens are known as a pair at once."""
        self._put(tuple(gram[-2:-1]), tuple(gram[-1:]))
        for length in (1, 2):
            if len(gram) > max(length, 2):
                self._put(tuple(gram[:length]), tuple(gram[length:]))

    def add_text(self, text: Seq[int], start: int) -> None:
        """The n-grams of a text that end after its first `start` tokens or later."""
        for end in range(start, len(text) + 1):
            self.add(text[max(end - self._ngram, 0) : end])

    def add_choices(self, before: Seq[int], tree: Tree, verdict: Verdict) -> None:
        """The target's choice at every node with the tokens that led there; what became text comes last."""
        contexts = paths(tree.tokens, tree.parents, before[1 - self._ngram :])
        kept = (0, *(1 + node for node in verdict.path))
        for row in (*sorted({*range(len(contexts))}.difference(kept)), *kept):
            if verdict.choices[row] >= 0:  # below: the logits of that row were not finite
                self.add([*contexts[row], verdict.choices[row]][-self._ngram :])

    def _put(self, context: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        known = self._after.pop(context, {})
        self.size -= len(known)
        for other in known:
            if other[: len(tokens)] == tokens or tokens[: len(other)] == other:
                tokens = max(tokens, other, key=len)  # the same, known further
                del known[other]
                break
        known[tokens] = None
        if len(known) > self._EACH:
            del known[next(iter(known))]
        self._after[context] = known
        self.size += len(known)
        while self.size > self._limit and len(self._after) > 1:
            self.size -= len(self._after.pop(next(iter(self._after))))
