"""Token recycling: the target's likeliest successors of each token are the next draft."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core import Batch, Drafts, Needs, Scores, Sequence, Tree, Verdict
from outrider.draft.lookup import LookupDrafter, best_first
from outrider.draft.options import option
from outrider.draft.shared_texts import Kept

__all__ = ["RecycleDrafter", "RecycleOptions", "SuccessorTable", "read_tree"]

CHANCES = (0.5, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)  # that the target chooses each rank, as seen on greedy code


@dataclass(frozen=True, slots=True)
class RecycleOptions:
    """Sizes of the tables, and who shares one."""

    top: int = option(8, "successors kept of each token", 1, len(CHANCES))
    table_tokens: int = option(65536, "tokens that a table holds", 1)
    shared: bool = option(False, "1: one table for all requests of a tenant")
    tenants: int = option(16, "shared tables kept", 1)


class RecycleDrafter(LookupDrafter["SuccessorTable"]):
    """Drafts from the candidates the target weighed before.

    What it does: every row of every verification, rejected nodes included, leaves its `top`
        likeliest next tokens in a table under the token it followed, what was chosen there first.
        The draft is a tree read from that table, starting at the last token: a node's children are
        its token's successors, and a fixed chance for each rank says which nodes are worth having.
        Tokens of the prompt that no row has scored yet have as successors what
        followed them there.
    When it helps: everywhere a little, also on text that repeats nothing; best where verifying
        some dozens of nodes costs about as much as one.
    Cost: one top-k over the scored rows per round, some hundred bytes for each of at most
        `table_tokens` tokens; independent of the context's length.
    Needs: the target's logits at every node.
    Reference: Luo et al. 2408.08696.

    Each sequence has a table of its own. `shared=1` makes it one for all of a tenant
    (`Request.tenant`), which starts warm; sequences without a tenant key share nothing. The tables of
    the `tenants` tenants seen last are kept.
    """

    Options = RecycleOptions
    needs = Needs(scores=True, follows=True, keeps=True)

    def __init__(self, options: RecycleOptions = RecycleOptions()) -> None:
        super().__init__(options)
        self._common: dict[str, SuccessorTable] = {}  # by tenant, the latest seen last

    def start(self, seq: Sequence) -> SuccessorTable:
        table, tenant = SuccessorTable(self._options.table_tokens), seq.request.tenant
        if self._options.shared and tenant is not None:
            table = self._common[tenant] = self._common.pop(tenant, table)
            if len(self._common) > self._options.tenants:
                del self._common[next(iter(self._common))]
        table.read(seq.tokens, self._options.top)
        return table

    def forget(self, owner: str) -> Kept:
        self._common.pop(owner, None)
        return super().forget(owner)

    def draft(self, seq: Sequence, nodes: int, branches: bool) -> Tree:
        return read_tree(self._states[seq], seq.tokens[-1], self._options.top if branches else 1, nodes)

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        return read_tree(self._states[seq], path[-1] if path else seq.tokens[-1], self._options.top, nodes)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Note the best successors at every row whose token is known."""
        best: list[list[int]] | None = None
        for b, (seq, tree) in enumerate(zip(batch.sequences, drafts.per_sequence, strict=True)):
            table, root = self._states.get(seq), scores.roots[b]
            if table is None or root < 0 or seq.finish_reason == "error":
                continue
            if best is None:
                best = scores.logits.topk(min(self._options.top, scores.logits.shape[1])).indices.tolist()
            rows = best[root : root + 1 + len(tree.tokens)]
            table.note(_tokens_of(seq, tree, verdicts[b]), _chosen_first(rows, verdicts[b]))


class SuccessorTable:
    """The latest best successors of each token, best first; the stalest row goes when it is full."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[int, Seq[int]] = {}  # the latest noted last

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, token: int) -> Seq[int]:
        return self._rows.get(token, ())

    def note(self, tokens: Seq[int | None], successors: Seq[Seq[int]]) -> None:
        """Each token's new successors; None where the token is not known."""
        for token, row in zip(tokens, successors, strict=True):
            if token is not None:
                self._put(token, row)

    def read(self, text: Seq[int], limit: int) -> None:
        """For tokens without a row: what followed them in a text, the latest first."""
        successors: dict[int, dict[int, None]] = {}
        for i in range(len(text) - 1, 0, -1):
            if text[i - 1] not in self._rows:
                row = successors.setdefault(text[i - 1], {})
                if len(row) < limit:
                    row[text[i]] = None
        for token, row in reversed(successors.items()):
            self._put(token, list(row))

    def _put(self, token: int, row: Seq[int]) -> None:
        self._rows.pop(token, None)
        if len(self._rows) >= self._limit:
            del self._rows[next(iter(self._rows))]
        self._rows[token] = row


def read_tree(table: SuccessorTable, root: int, width: int, nodes: int) -> Tree:
    """The likeliest nodes below a token.

    With a full table the shape is the same every time; where successors are missing, the nodes
    go to the next best places.
    """
    chances = CHANCES[:width]

    def below(token: int, survival: float, _room: int) -> Iterable[tuple[float, int, int]]:
        successors = table.after(token)
        return zip(map(survival.__mul__, chances), successors, successors, strict=False)

    return best_first(nodes, root, below)


def _tokens_of(seq: Sequence, tree: Tree, verdict: Verdict) -> list[int | None]:
    """The token each scored row followed: the last one before this round, then the nodes'.

    A sequence that ended may have kept only some of the round's tokens, so its root is not known.
    """
    root = seq.tokens[-len(verdict.tokens) - 1] if seq.finish_reason is None else None
    return [root, *tree.tokens]


def _chosen_first(rows: list[list[int]], verdict: Verdict) -> list[list[int]]:
    """Successors with the target's choice in front, where there was one: penalties and bias are not in the logits."""
    for row, token in zip((0, *(1 + node for node in verdict.path)), verdict.tokens, strict=True):
        if token >= 0:  # below: the logits of that row were not finite
            rows[row] = [token, *(other for other in rows[row] if other != token)][: len(rows[row])]
    return rows
