"""Trees cut to chains, for a target or a rule that cannot verify branches."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.protocol import Drafter, kept_by
from outrider.draft.shared_texts import Kept

__all__ = ["ChainsOnly", "best_chain"]


class ChainsOnly:
    """Another drafter, of whose trees only the likeliest path is proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    def kept(self, owner: str) -> Kept:
        return kept_by([self._drafter], "kept", owner)

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        return kept_by([self._drafter], "remember", owner, tokens)

    def forget(self, owner: str) -> Kept:
        return kept_by([self._drafter], "forget", owner)

    def begin(self, seq: Sequence) -> None:
        self._drafter.begin(seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        drafts = self._drafter.propose(batch, plan)
        assert isinstance(drafts, Drafts)
        chains = [best_chain(tree) for tree in drafts.per_sequence]
        if all(len(chain) == len(tree.tokens) for chain, tree in zip(chains, drafts.per_sequence, strict=True)):
            return drafts
        return drafts.subset(chains)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._drafter.commit(batch, drafts, verdicts, scores)

    def end(self, seq: Sequence) -> None:
        self._drafter.end(seq)


def best_chain(tree: Tree) -> list[int]:
    """Nodes of the path that goes from each node to its likeliest child, the first among equals."""
    best: dict[int, int] = {}
    for node, (parent, survival) in enumerate(zip(tree.parents, tree.survival, strict=True)):
        if parent not in best or survival > tree.survival[best[parent]]:
            best[parent] = node
    path, node = [], ROOT
    while node in best:
        node = best[node]
        path.append(node)
    return path
