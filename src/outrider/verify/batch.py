"""Verification of a batch: scores and drafts in, the accepted paths and emitted tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Drafts, Plan, Scores, Tree, Verdict
from outrider.core import Sequence as Generation
from outrider.sampling import Key, Row, Stream, choose, draw, law, rows_of, uniform
from outrider.verify import block, rejection, typical
from outrider.verify.match import walk

__all__ = ["guided", "verify"]


def verify(drafts: Drafts, scores: Scores, batch: Batch, plan: Plan) -> list[Verdict]:
    """Judge every sequence that samples this round; the others get an empty verdict."""
    trees = drafts.on_host()
    if plan.rule == "match":
        return _match(trees, scores, batch)
    return [
        _chain(tree, None if drafts.q is None else drafts.q[b], scores, batch.sequences[b], scores.roots[b], plan.rule)
        if scores.roots[b] >= 0
        else Verdict([], [])
        for b, tree in enumerate(trees)
    ]


def guided(drafts: Drafts, batch: Batch, plan: Plan) -> Drafts:
    """The drafts as grammars would have them: no node that one forbids, and all that one prescribes.

    Forbidden nodes could not be chosen. Prescribed text is guessed even where the drafter guesses something
    else. A draft drawn from q stays as it is: refusing a token that was drawn is the rule's own business, and
    its correction depends on it.
    """
    if drafts.q is not None or all(seq.guide is None for seq in batch.sequences):
        return drafts
    trees = drafts.on_host()
    kept = [_allowed_nodes(seq, tree) for seq, tree in zip(batch.sequences, trees, strict=True)]
    if any(len(nodes) < len(tree.tokens) for nodes, tree in zip(kept, trees, strict=True)):
        drafts = drafts.subset(kept)
        trees = drafts.on_host()
    chains = [_prescribed(seq, tree, n) for seq, tree, n in zip(batch.sequences, trees, plan.lengths, strict=True)]
    if not any(chains):
        return drafts
    merged = [(chain, range(-1, len(chain) - 1)) if chain else tree for chain, tree in zip(chains, trees, strict=True)]
    survival = [[1.0] * len(chain) if chain else own for chain, own in zip(chains, drafts.says(), strict=True)]
    return Drafts.trees(merged, survival=survival)


def _prescribed(seq: Generation, tree: Tree, nodes: int) -> list[int]:
    """What the grammar leaves no choice about, up to so many tokens; nothing where the draft says so already."""
    if seq.guide is None or nodes == 0:
        return []
    forced = seq.guide.forced(seq.tokens, seq.prompt_len)[:nodes]
    if not forced:
        return []
    return [] if len(walk(tree.parents, tree.tokens, _along(tree, forced))) == len(forced) else forced


def _along(tree: Tree, chain: Sequence[int]) -> list[int]:
    """The chain's next token at the root and at every node, by depth."""
    depths = [0]
    for parent in tree.parents:
        depths.append(depths[parent + 1] + 1)
    return [chain[depth] if depth < len(chain) else -1 for depth in depths]


def _allowed_nodes(seq: Generation, tree: Tree) -> Sequence[int]:
    """Nodes whose whole path the grammar takes."""
    if seq.guide is None:
        return range(len(tree.tokens))
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = paths.get(parent)
        allowed = None if above is None else seq.guide.allowed(seq.tokens, seq.prompt_len, above)
        if above is not None and allowed is not None and bool(allowed[token]):
            paths[node] = [*above, token]
    return [node for node in paths if node != ROOT]


def _match(trees: Sequence[Tree], scores: Scores, batch: Batch) -> list[Verdict]:
    choices = scores.choices
    if choices is None and all(seq.request.params.takes_largest for seq in batch.sequences):
        choices = draw(scores.logits, None)
    elif choices is None:
        choices = choose(scores.logits, _rows(trees, scores, batch))
    verdicts = []
    for tree, root in zip(trees, scores.roots, strict=True):
        if root < 0:
            verdicts.append(Verdict([], []))
        elif not tree.tokens:
            own = choices[root : root + 1]
            verdicts.append(Verdict([], own, own))
        else:
            own = choices[root : root + 1 + len(tree.tokens)]
            path = walk(tree.parents, tree.tokens, own)
            verdicts.append(Verdict(path, [own[0], *[own[1 + node] for node in path]], own))
    return verdicts


def _rows(trees: Sequence[Tree], scores: Scores, batch: Batch) -> list[Row]:
    rows: list[Row] = []
    for seq, tree, root in zip(batch.sequences, trees, scores.roots, strict=True):
        if root >= 0:
            rows += rows_of(seq, tree.tokens, tree.parents)
    return rows


def _chain(tree: Tree, drawn_from: Tensor | None, scores: Scores, seq: Generation, root: int, rule: str) -> Verdict:
    """The published rules, for one chain. Their coins and residuals come from streams of their own."""
    rows = rows_of(seq, tree.tokens, tree.parents)
    p = torch.stack([law(scores.logits[root + i].cpu(), row) for i, row in enumerate(rows)])
    tokens = torch.tensor(tree.tokens, dtype=torch.int64)
    request, base, turn = seq.request, len(seq.tokens), seq.stats.rounds
    if rule == "lossy_typical":
        accepted, laws = typical.count(p, tokens), p
    else:
        q = torch.nn.functional.one_hot(tokens, p.shape[1]).double() if drawn_from is None else drawn_from[: len(tokens)].double()
        module = block if rule == "block" else rejection
        judged = module.law(p, q, tokens)
        coins = [uniform(Key(request.seed, base + i, request.index, Stream.COIN, turn)) for i in range(len(tree.tokens))]
        accepted, laws = module.count(judged, torch.tensor(coins, dtype=torch.float64)), judged.next
    key = Key(request.seed, base + accepted, request.index, Stream.RESIDUAL, turn)
    final = draw(laws[accepted].log().float()[None], [key])[0]
    return Verdict(list(range(accepted)), [*tree.tokens[:accepted], final])
