"""Verification of a batch: scores and drafts in, the accepted paths and emitted tokens out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Drafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.sampling import CORRUPTED, Key, Stream, choose, draw, probs_of, rows_of, uniform
from outrider.verify import block, rejection, typical
from outrider.verify.match import walk

__all__ = ["guided", "verify"]


def verify(drafts: Drafts, scores: Scores, batch: Batch, plan: Plan) -> list[Verdict]:
    """A verdict for every sequence that samples this round; an empty one for the others."""
    trees = drafts.per_sequence
    if plan.rule == "match":
        return _match(trees, scores, batch)
    return [
        _chain(tree, None if drafts.q is None else drafts.q[b], scores, batch.sequences[b], scores.roots[b], plan.rule)
        for b, tree in enumerate(trees)
    ]


def guided(drafts: Drafts, batch: Batch, plan: Plan) -> Drafts:
    """The drafts as grammars would have them: no node that one forbids, and all that one prescribes.

    Forbidden nodes could not be chosen. Prescribed text is guessed even where the drafter guesses something
    else. A draft drawn from q stays as it is: rejecting a token that was drawn is the rule's business, and
    its correction depends on it.
    """
    if drafts.q is not None or all(seq.guide is None for seq in batch.sequences):
        return drafts
    trees = drafts.per_sequence
    kept = [_allowed_nodes(seq, tree) for seq, tree in zip(batch.sequences, trees, strict=True)]
    if any(len(nodes) < len(tree.tokens) for nodes, tree in zip(kept, trees, strict=True)):
        drafts = drafts.subset(kept)
        trees = drafts.per_sequence
    chains = [_prescribed(seq, tree, n) for seq, tree, n in zip(batch.sequences, trees, plan.lengths, strict=True)]
    if not any(chains):
        return drafts
    return Drafts([Tree.chain(chain) if chain else tree for chain, tree in zip(chains, trees, strict=True)])


def _prescribed(seq: Sequence, tree: Tree, nodes: int) -> list[int]:
    """What the grammar leaves no choice about, up to `nodes` tokens; nothing where the draft holds it already."""
    if seq.guide is None or nodes == 0:
        return []
    forced = seq.guide.forced(seq.tokens, seq.prompt_len)[:nodes]
    next_at = dict(enumerate(forced))  # the chain's next token at each depth, of the root and of every node
    along = [next_at.get(depth, -1) for depth in (0, *(1 + depth for depth in tree.depths))]
    return [] if len(walk(tree.parents, tree.tokens, along)) == len(forced) else forced


def _allowed_nodes(seq: Sequence, tree: Tree) -> Seq[int]:
    """Nodes whose whole path the grammar takes."""
    if seq.guide is None:
        return range(len(tree.tokens))
    # Inner nodes' masks are needed at once, the others after the forward.
    seq.guide.prefetch(seq.tokens, seq.prompt_len, tree.paths())
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = paths.get(parent)
        allowed = None if above is None else seq.guide.allowed(seq.tokens, seq.prompt_len, above)
        if above is not None and allowed is not None and bool(allowed[token]):
            paths[node] = [*above, token]
    return [node for node in paths if node != ROOT]


def _match(trees: Seq[Tree], scores: Scores, batch: Batch) -> list[Verdict]:
    choices = scores.choices
    if choices is None and all(seq.request.params.takes_largest for seq in batch.sequences):
        choices = draw(scores.logits, None)
    elif choices is None:
        sampling = [(seq, tree) for seq, tree, root in zip(batch.sequences, trees, scores.roots, strict=True) if root >= 0]
        choices = choose(scores.logits, [row for seq, tree in sampling for row in rows_of(seq, tree.tokens, tree.parents)])
    verdicts = []
    for seq, tree, root in zip(batch.sequences, trees, scores.roots, strict=True):
        if root < 0 or _must_wait(seq):
            verdicts.append(Verdict([], []))
        else:
            chosen = choices[root : root + 1 + len(tree.tokens)]
            path = walk(tree.parents, tree.tokens, chosen)
            if path and chosen[1 + path[-1]] == CORRUPTED:
                path.pop()  # its token is chosen; what follows it is for the next round to find out, as without a draft
            verdicts.append(Verdict(path, [chosen[0], *[chosen[1 + node] for node in path]], chosen))
    return verdicts


def _must_wait(seq: Sequence) -> bool:
    """Whether it is not known yet what may follow the sequence's tokens."""
    return seq.guide is not None and seq.guide.allowed(seq.tokens, seq.prompt_len) is None


def _chain(tree: Tree, draft_probs: Tensor | None, scores: Scores, seq: Sequence, root: int, rule: str) -> Verdict:
    """The published rules, for one chain. Their coins and residuals come from separate streams.

    The chain ends where no choice can be made, such as a node whose mask is unknown: if it is accepted so far, its
    last token is emitted and nothing after it. Where it ends depends on its own tokens alone, so no rule is biased.
    """
    if root < 0 or _must_wait(seq):
        return Verdict([], [])
    rows = rows_of(seq, tree.tokens, tree.parents)
    p = torch.stack([probs_of(scores.logits[root + i].cpu(), row) for i, row in enumerate(rows)])
    known = int((~p.isnan().any(-1)).long().cumprod(0).sum())
    chain = list(tree.tokens[:known])
    p = p[: len(chain) + 1]
    tokens = torch.tensor(chain, dtype=torch.int64)
    request, base, turn = seq.request, len(seq.tokens), seq.stats.rounds
    if rule == "lossy_typical":
        accepted, after = typical.count(p, tokens), p
    else:
        one_hot = torch.nn.functional.one_hot
        q = one_hot(tokens, p.shape[1]).double() if draft_probs is None else draft_probs[: len(tokens)].double()
        module = block if rule == "block" else rejection
        chances = module.acceptance(p, q, tokens)
        coins = [uniform(Key(request.seed, base + i, request.index, Stream.COIN, turn)) for i in range(len(chain))]
        accepted, after = module.count(chances, torch.tensor(coins, dtype=torch.float64)), chances.next
    if 0 < accepted == known < len(rows):
        return Verdict(list(range(accepted - 1)), chain)
    key = Key(request.seed, base + accepted, request.index, Stream.RESIDUAL, turn)
    final = draw(after[accepted].log().float()[None], [key])[0]
    return Verdict(list(range(accepted)), [*chain[:accepted], final])
