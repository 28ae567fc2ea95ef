"""What drafters without a network share: their verbs, trees grown best first, and measured acceptance rates."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Generic, Self, TypeVar

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.shared_texts import Kept, SharedTexts
from outrider.draft.suffix_array import CorpusReader, SuffixArray

__all__ = ["AcceptanceRates", "LookupDrafter", "best_first", "verified_nodes"]

S = TypeVar("S")


class LookupDrafter(Generic[S]):
    """The verbs of a drafter that guesses from one object of state for each sequence, which `start` makes."""

    Options: ClassVar[type]
    needs = Needs(follows=True, keeps=True)
    _keeps_prompts = False

    def __init__(self, options: Any, shared: SharedTexts | None = None, corpus: SuffixArray | None = None) -> None:
        self._options = options
        self._states: dict[Sequence, S] = {}
        self._shared = shared or SharedTexts(0, 1)
        self._corpus = corpus
        self._readers: dict[Sequence, CorpusReader] = {}

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls(context.options(cls.Options))

    def start(self, seq: Sequence) -> S:
        """What is known about a sequence when it begins."""
        raise NotImplementedError

    def draft(self, seq: Sequence, nodes: int, branches: bool) -> Tree:
        """At most this many guesses after a sequence, as a chain where they may not branch."""
        raise NotImplementedError

    def begin(self, seq: Sequence) -> None:
        self._states[seq] = self.start(seq)
        if self._corpus is not None:
            self._readers[seq] = self._corpus.reader()

    def corpus_of(self, seq: Sequence) -> list[CorpusReader]:
        """The user's corpus as the sequence searches it, where there is one."""
        return [self._readers[seq]] if self._corpus is not None else []

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        branches = plan.rule == "match"  # the other rules verify chains
        none = Tree([], [], [])
        return Drafts([self.draft(seq, n, branches) if n else none for seq, n in zip(batch.sequences, plan.lengths, strict=True)])

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        self._readers.pop(seq, None)
        if seq.finish_reason is not None:  # not where it was only preempted
            self._shared.keep(seq, self._keeps_prompts)

    def kept(self, owner: str) -> Kept:
        return self._shared.kept(owner)

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        self._shared.add(owner, tokens)
        return self._shared.kept(owner)

    def forget(self, owner: str) -> Kept:
        return self._shared.drop(owner)


Guesses = Iterable[tuple[float, int, S]]  # survival, token, and the state below it; the likeliest first


def best_first(nodes: int, start: S, below: Callable[[S, float, int], Guesses[S]]) -> Tree:
    """The likeliest nodes of a tree, best first.

    `below` is called with a node's state, its survival and how many nodes there is still room for, and gives the
    node's children. No child is likelier than its parent, so only the best child that is left of each node has to wait.
    """
    tokens, parents, survivals = tree = Tree([], [], [])
    waiting: list[tuple[float, int, int, int, S, Iterator[tuple[float, int, S]]]] = []
    order = itertools.count()  # the earliest among equals comes first
    node, children = ROOT, iter(below(start, 1.0, nodes))
    while len(tokens) < nodes:
        if child := next(children, None):
            heapq.heappush(waiting, (-child[0], next(order), node, child[1], child[2], children))
        if not waiting:
            break
        unlikely, _, parent, token, state, siblings = waiting[0]
        if sibling := next(siblings, None):
            heapq.heapreplace(waiting, (-sibling[0], next(order), parent, sibling[1], sibling[2], siblings))
        else:
            heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        survivals.append(-unlikely)
        children = iter(below(state, -unlikely, nodes - len(tokens)))
    return tree


class AcceptanceRates:
    """Measured acceptance rates by kind of guess, starting from a prior and fading with time.

    Only counts are kept, nothing of any text. A prior counts as `weight` observations. A kind that was
    seen `memory` times has its counts halved, so recent rounds weigh more.
    """

    def __init__(self, weight: float = 4.0, memory: float = 400.0) -> None:
        self._weight = weight
        self._memory = memory
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kind -> accepted, tried

    def rate(self, kind: Hashable, prior: float) -> float:
        """The estimated chance that a guess of this kind is accepted."""
        accepted, tried = self._seen.get(kind, (0.0, 0.0))
        return (accepted + self._weight * prior) / (tried + self._weight)

    def record(self, kind: Hashable, is_accepted: bool) -> None:
        accepted, tried = self._seen.get(kind, (0.0, 0.0))
        if tried >= self._memory:
            accepted, tried = accepted / 2, tried / 2
        self._seen[kind] = (accepted + is_accepted, tried + 1)


def verified_nodes(tokens: Seq[int], parents: Seq[int], text: Seq[int]) -> Iterator[tuple[int, bool]]:
    """Nodes below an accepted path, and whether the text that followed has each; also of trees that were never verified."""
    reached = {ROOT: 0}  # accepted nodes, and how many tokens of the text lead there
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(text):
            is_accepted = token == text[depth]
            if is_accepted:
                reached[node] = depth + 1
            yield node, is_accepted
