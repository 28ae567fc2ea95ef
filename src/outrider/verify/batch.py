"""Verification of a batch: scores and drafts in, the accepted paths and emitted tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core import Batch, Drafts, Plan, Scores, Tree, Verdict
from outrider.core import Sequence as Generation
from outrider.sampling import Key, Row, Stream, choose, draw, law, uniform
from outrider.verify import block, rejection, typical
from outrider.verify.match import walk

__all__ = ["rows_of", "verify"]


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


def rows_of(seq: Generation, tree_tokens: Sequence[int], tree_parents: Sequence[int]) -> list[Row]:
    """The root's and then every node's position, as the choice needs them."""
    if not tree_tokens:
        return [Row.at(seq)]
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree_tokens, tree_parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return [Row.at(seq, path) for path in paths]


def _match(trees: Sequence[Tree], scores: Scores, batch: Batch) -> list[Verdict]:
    choices = scores.choices if scores.choices is not None else choose(scores.logits, _rows(trees, scores, batch))
    verdicts = []
    for tree, root in zip(trees, scores.roots, strict=True):
        if root < 0:
            verdicts.append(Verdict([], []))
            continue
        own = choices[root : root + 1 + len(tree.tokens)]
        path = walk(tree.parents, tree.tokens, own) if tree.tokens else []
        verdicts.append(Verdict(path, [own[0], *(own[1 + node] for node in path)], own))
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
