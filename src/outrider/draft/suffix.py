"""Suffix lookup: every earlier occurrence of the current suffix votes on what comes next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from outrider.core import Sequence, Tree
from outrider.draft.lookup import LookupDrafter, best_first
from outrider.draft.options import option
from outrider.errors import InvalidParameter

__all__ = ["Match", "SharedTexts", "SuffixAutomaton", "SuffixDrafter", "SuffixOptions"]


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """How far a match is followed, and how much of other texts is searched."""

    min_match: int = option(1, "shortest suffix worth following", 1, 256)
    max_match: int = option(32, "longest suffix looked for", 1, 256)
    factor: float = option(2.0, "a match of m tokens is followed for factor * m + offset", 0, 1e6)
    offset: float = option(6.0, "see `factor`", 0, 1e6)
    min_prob: float = option(0.1, "a guess whose estimated survival is below this is not made", 0, 1)
    branch: int = option(1, "continuations followed per node; 1 is a chain", 1, 8)
    shared_tokens: int = option(0, "tokens of finished outputs kept and searched, those of the same tenant alone", 0)

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match <= 256:
            shown = f"{self.min_match} and {self.max_match}"
            raise InvalidParameter("min_match", f"need 1 <= min_match <= max_match <= 256, got {shown}")
        if not self.factor + self.offset >= 1:
            raise InvalidParameter("factor", f"need factor + offset >= 1, got {self.factor} and {self.offset}")

    def depth(self, matched: int) -> int:
        return int(self.factor * matched + self.offset)


class SuffixDrafter(LookupDrafter["SuffixAutomaton"]):
    """Follows the most frequent continuation of the longest suffix that occurred before.

    What it does: a suffix automaton over prompt and output knows every earlier occurrence of the
        current suffix and what followed each. The draft takes the most frequent continuation token
        by token (the latest among equals), falling back to a shorter suffix where a text ends, so
        loops are drafted whole. A longer match earns a longer draft, and the draft ends where its
        estimated survival falls below `min_prob`. With `branch` > 1 the next best continuations
        become branches, the likeliest nodes first. With `shared_tokens` > 0 finished outputs of
        the same tenant (`Request.tenant`) are searched too; sequences without a tenant key share
        nothing.
    When it helps: editing, agents, code, anything that repeats the prompt, itself or (shared)
        earlier answers; it knows longer contexts than n-gram lookup and how sure they are.
    Cost: amortised constant per token plus at most `max_match` counters, about 0.5 kB of
        memory per token; independent of the context's length.
    Needs: nothing from the target.
    Reference: Oliaro et al. 2411.04975 (SuffixDecoding); Hu et al. 2411.10666 (SAM-Decoding);
        Blumer et al. 1985 (the automaton).
    """

    Options = SuffixOptions

    def __init__(self, options: SuffixOptions = SuffixOptions()) -> None:
        super().__init__(options)
        self._shared = SharedTexts(options.shared_tokens, options.max_match + 1)

    def start(self, seq: Sequence) -> SuffixAutomaton:
        return SuffixAutomaton(self._options.max_match + 1)

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        if seq.request.tenant is not None and seq.finish_reason is not None:  # not where it was only preempted
            self._shared.add(seq.request.tenant, seq.tokens[seq.prompt_len :])

    def draft(self, seq: Sequence, nodes: int, branches: bool) -> Tree:
        return self._best(seq, (), nodes, self._options.branch if branches else 1)

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        return self._best(seq, path, nodes, self._options.branch)

    def _best(self, seq: Sequence, path: Seq[int], nodes: int, branch: int) -> Tree:
        """Follow the longest match in each text; keep what expects to get most tokens accepted."""
        text, tenant = self._states[seq], seq.request.tenant
        text.extend(seq.tokens[text.size :])
        recent = [*seq.tokens[-self._options.max_match :], *path] if path or tenant is not None else []
        matches = [(text, text.find(recent) if path else text.match())]
        if tenant is not None:
            matches += [(text, text.find(recent)) for text in self._shared.of(tenant)]
        guesses = [_follow(text, match, self._options, nodes, branch) for text, match in matches]
        return max(guesses, key=lambda guess: sum(guess.survival))


class Match(NamedTuple):
    """A substring of a text: the state that knows it, and its length."""

    state: int
    length: int


class _Next(NamedTuple):
    """A token that followed a substring; compares by how often, then by how lately."""

    times: int
    latest: int
    token: int


_Node = tuple[Match, int | None, int]  # the match before a node's token, the token (None: the root), and its depth


class SuffixAutomaton:
    """All substrings of a growing text, each with what followed it.

    One state stands for all substrings that end at the same places. Places are counted for
    substrings of up to `reach` tokens: the suffixes of the text that short lie on the links above
    one state, the tail, and each new token counts them once.
    """

    def __init__(self, reach: int) -> None:
        self.size = 0
        self._reach = reach
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._count = [0]
        self._latest = [-1]  # position of the last token at the last place
        self._whole = 0  # state of the whole text
        self._tail = Match(0, 0)  # the longest suffix of up to `reach` tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._push(token)

    def match(self) -> Match:
        """The longest suffix of the text that occurred before, up to what can be followed."""
        state, length = self._tail
        while state > 0 and self._count[state] < 2:
            state = self._link[state]
            length = self._length[state]
        return self._cut(state, length, self._reach - 1)

    def find(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of the tokens that occurs in this text."""
        state = length = 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return self._cut(state, length, self._reach - 1)

    def after(self, match: Match) -> list[_Next]:
        """What followed the substring, in no order. Ids below 0 separate texts and are left out."""
        count, latest = self._count, self._latest
        return [_Next(count[to], latest[to], token) for token, to in self._next[match.state].items() if token >= 0]

    def step(self, match: Match, token: int) -> Match:
        """The substring with a token that followed it, without its head where that makes it too long to count."""
        return self._cut(self._next[match.state][token], match.length + 1, self._reach - 1)

    def shorter(self, match: Match) -> Match:
        """The longest suffix of the substring that occurs at more places."""
        state = self._link[match.state]
        return Match(state, self._length[state])

    def _cut(self, state: int, length: int, limit: int) -> Match:
        """The last `limit` tokens of a substring."""
        while length > limit and self._length[self._link[state]] >= limit:
            state = self._link[state]
        return Match(state, min(length, limit))

    def _push(self, token: int) -> None:
        self._whole = self._grown(token)
        # where the tail's state was split, its next is a longer suffix of the text, and the cut finds ours
        self._tail = self._cut(self._next[self._tail.state][token], self._tail.length + 1, self._reach)
        state = self._tail.state
        while state > 0:
            self._count[state] += 1
            self._latest[state] = self.size
            state = self._link[state]
        self.size += 1

    def _grown(self, token: int) -> int:
        """Blumer's construction: the state of the whole text with one more token."""
        new = self._state({}, 0, self._length[self._whole] + 1)
        at = self._whole
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at >= 0:
            self._link[new] = self._split(at, token)
        return new

    def _split(self, at: int, token: int) -> int:
        """The state of exactly the longest substring of `at` and then the token."""
        old, length = self._next[at][token], self._length[at] + 1
        if self._length[old] == length:
            return old
        part = self._state(dict(self._next[old]), self._link[old], length, self._count[old], self._latest[old])
        self._link[old] = part
        while at >= 0 and self._next[at].get(token) == old:
            self._next[at][token] = part
            at = self._link[at]
        return part

    def _state(self, after: dict[int, int], link: int, length: int, count: int = 0, latest: int = -1) -> int:
        self._next.append(after)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._link) - 1


class SharedTexts:
    """Earlier outputs by tenant, at most `limit` tokens in all.

    An automaton cannot forget, so texts fill generations of at most half the limit, and the oldest
    generation of all goes when room is needed. No tenant's search touches another's generations.
    """

    def __init__(self, limit: int, reach: int) -> None:
        self._limit = limit
        self._reach = reach
        self._generations: deque[tuple[str, SuffixAutomaton]] = deque()  # oldest first
        self._by_tenant: dict[str, deque[SuffixAutomaton]] = {}  # likewise
        self._texts = 0
        self.size = 0

    def of(self, tenant: str) -> Iterable[SuffixAutomaton]:
        return self._by_tenant.get(tenant, ())

    def add(self, tenant: str, tokens: Seq[int]) -> None:
        """Take in a finished text, or its end where it is longer than half the limit."""
        room = self._limit // 2
        kept = tokens[max(len(tokens) + 1 - room, 0) :]
        if room < 2 or not kept:
            return
        self._texts += 1
        piece = [-self._texts, *kept]  # an id of its own goes first: no match runs across texts
        while self.size + len(piece) > self._limit:
            self._drop_oldest()
        generations = self._by_tenant.setdefault(tenant, deque())
        if not generations or generations[-1].size + len(piece) > room:
            generations.append(SuffixAutomaton(self._reach))
            self._generations.append((tenant, generations[-1]))
        generations[-1].extend(piece)
        self.size += len(piece)

    def _drop_oldest(self) -> None:
        tenant, oldest = self._generations.popleft()
        generations = self._by_tenant[tenant]
        generations.popleft()
        if not generations:
            del self._by_tenant[tenant]
        self.size -= oldest.size


def _follow(text: SuffixAutomaton, match: Match, options: SuffixOptions, nodes: int, branch: int) -> Tree:
    """The likeliest nodes below a match."""
    deepest = options.depth(match.length)

    def below(state: _Node, survival: float, _room: int) -> Iterable[tuple[float, int, _Node]]:
        match, token, depth = state
        if depth == deepest:
            return
        match = match if token is None else text.step(match, token)
        following: list[_Next] = []
        while not following:
            if match.length < options.min_match:
                return
            following = text.after(match)
            match = match if following else text.shorter(match)
        seen = sum(after.times for after in following) + _escape(match.length)
        for times, _, token in [max(following)] if branch == 1 else heapq.nlargest(branch, following):
            chance = survival * (times / seen)
            if chance >= options.min_prob:
                yield chance, token, (match, token, depth + 1)

    root: _Node = (match, None, 0)
    return best_first(nodes, root, below)


def _escape(length: int) -> float:
    """The weight of what never followed a match of this length, against 1 for each that did.

    With this, guesses estimated at 0.18, 0.40, 0.62, 0.80, 0.93 were accepted at 0.16, 0.31, 0.52,
    0.77, 0.97 on greedy Python code; half as much overrates them, twice as much underrates them.
    """
    return 1.0 / length
