"""The nouns of the engine. No behaviour beyond bookkeeping lives here.

Dimensions: N tokens in the flat batch, B sequences, D draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.sampling.grammar import Guide
    from outrider.sampling.params import SamplingParams

__all__ = [
    "ROOT",
    "Arm",
    "Batch",
    "Drafts",
    "Needs",
    "Plan",
    "Request",
    "Resume",
    "Scores",
    "Sequence",
    "SpeculationStats",
    "Tree",
    "Verdict",
    "integers",
]

ROOT = -1  # parent index of a node that hangs from the last committed token


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked, with every default resolved."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # end-of-sequence ids and the user's stop_token_ids
    max_tokens: int
    index: int = 0  # which of n samples this is; part of the noise key
    speculate: bool = True  # False: plain decoding for this request
    tenant: str | None = None  # whose text it is: caches and drafters share text within a key only
    priority: int = 0  # lower ones go first
    method: str | None = None  # where several are loaded: the only one that may draft for it
    draft_tokens: int | None = None  # most nodes a round may draft for it


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one sequence."""

    method: str = "none"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    fallback_reason: str | None = None

    @property
    def off_reason(self) -> str | None:
        """Why nothing was drafted; None where something was."""
        if self.fallback_reason is not None:
            return self.fallback_reason
        if self.drafted or not self.rounds:
            return None
        return "no drafter was asked for" if self.method == "none" else "nothing was worth drafting"

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens a round emitted."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def record(self, depths: Seq[int], accepted: int, emitted: int) -> None:
        """Count one round: the depth (from 0) of every drafted node, and what came of it."""
        self.rounds += 1
        self.emitted += emitted
        if not depths:
            return
        self.drafted += len(depths)
        self.accepted += accepted
        reach = max(depths) + 1
        drafted, right = self.drafted_by_position, self.accepted_by_position
        if reach > len(drafted):
            drafted.extend([0] * (reach - len(drafted)))
            right.extend([0] * (reach - len(right)))
        for depth in range(reach):  # a node has others above it, at every depth
            drafted[depth] += 1
        for depth in range(accepted):
            right[depth] += 1

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return {
            "method": self.method,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_position": self.accepted_by_position,
            "drafted_by_position": self.drafted_by_position,
            "tokens_per_round": round(self.tokens_per_round, 4),
            "fallback_reason": self.fallback_reason,
            "off_reason": self.off_reason,
        }


class Sequence:
    """One generation in flight. Owned and changed by the engine alone."""

    __slots__ = (
        "cached",
        "finish_reason",
        "guide",
        "keys",
        "named",
        "order",
        "pages",
        "request",
        "stats",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt_ids)
        self.pages: list[int] = []
        self.keys: list[bytes] = []  # what its leading full pages hold, as the prefix cache names it
        self.named = 0  # leading pages the prefix cache knows
        self.cached = 0  # leading tokens whose KV is in the pages
        self.order = (request.priority, 0)  # seniority
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stats = SpeculationStats()
        self.guide: Guide | None = None  # what a grammar lets follow

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the engine. Capability is data."""

    taps: tuple[int, ...] = ()  # layers whose input hidden rows it reads
    scores: bool = False  # reads logits of every node, rejected ones too
    kv_bytes_per_token: int = 0  # own KV beside the target's pages
    follows: bool = False  # can also guess after a path that is not text yet: draft.protocol.Lookup


class Arm(NamedTuple):
    """One of several ways to draft that a policy may choose."""

    name: str
    members: tuple[int, ...]  # drafters it asks, by number
    most: int  # nodes it can use
    ahead: bool = False  # the target's forward can start before the host has seen what it drafts


class Plan(NamedTuple):
    """The controller's decision for one round."""

    lengths: tuple[int, ...]  # most draft nodes for each sequence of the batch; 0 = do not draft
    rule: str = "match"
    keep_q: bool = False  # the rule needs the law each draft token was drawn from
    arms: tuple[int, ...] = ()  # where there are several ways to draft: which one for each sequence
    whole: bool = False  # whatever is proposed is verified, so the forward may start before the host has seen it
    floor: float = 0.0  # survival under which further nodes are not worth drawing, where a drafter can stop
    again: bool = False  # the next round's plan is likely to be the same: it may start before the host has seen this one's tokens


class Tree(NamedTuple):
    """One sequence's draft on the host."""

    tokens: list[int]
    parents: list[int]


class Resume(NamedTuple):
    """Where the target may go on: rows whose first layers are run already, their KV of those layers in its slots."""

    layer: int  # the first layer still to run
    hidden: Tensor  # (rows, H) the residual stream entering it: of each sequence, its root and then its first nodes
    counts: Seq[int]  # such rows of each sequence, 0 where there are none


class Drafts:
    """Proposed tokens as trees, one struct of arrays per batch; a chain has one branch.

    Nodes of a sequence are in topological order: parents[b, i] < i, or ROOT. Drafters on the host give lists and the host reads
    lists: arrays are made of them when somebody asks, for a few small arrays cost more than the rest of a proposal.
    """

    __slots__ = ("_says", "_trees", "ahead", "arrays", "q", "resume")

    def __init__(
        self,
        tokens: Tensor,
        parents: Tensor,
        survival: Tensor,
        counts: Tensor,
        q: Tensor | None = None,
        resume: Resume | None = None,
    ) -> None:
        self.arrays: tuple[Tensor, Tensor, Tensor, Tensor] | None = (tokens, parents, survival, counts)
        self.q = q  # (B, D, V), the law each token was drawn from; None = one-hot
        self.resume = resume  # only from drafters that run the target's own layers
        self.ahead: Callable[[], Drafts] | None = None  # set while the target's device still draws the tokens: gives them when
        # drawn. Until then -1 - i stands for the i-th token of the runner's `promised`, which a forward there can read.
        self._trees: list[Tree] | None = None
        self._says: list[list[float]] | None = None

    @classmethod
    def _of(cls, trees: list[Tree], says: list[list[float]]) -> Drafts:
        drafts = cls.__new__(cls)
        drafts.arrays = drafts.q = drafts.resume = drafts.ahead = None
        drafts._trees, drafts._says = trees, says
        return drafts

    @staticmethod
    @lru_cache(maxsize=64)
    def empty(batch: int) -> Drafts:
        """No guesses: plain decoding."""
        return Drafts._of([Tree([], [])] * batch, [[]] * batch)

    @classmethod
    def chains(cls, chains: Seq[Seq[int]], q: Tensor | None = None, survival: Seq[Seq[float]] | None = None) -> Drafts:
        """One chain of tokens per sequence, possibly empty."""
        return cls.trees([(chain, range(-1, len(chain) - 1)) for chain in chains], q, survival)

    @classmethod
    def trees(
        cls,
        trees: Seq[tuple[Seq[int], Seq[int]]],
        q: Tensor | None = None,
        survival: Seq[Seq[float]] | None = None,
        resume: Resume | None = None,
    ) -> Drafts:
        """One (tokens, parents) pair per sequence, and the survival of its nodes where the drafter knows better than 1."""
        if resume is None and not any(tokens for tokens, _ in trees):
            return cls.empty(len(trees))
        own = [Tree(list(map(int, tokens)), list(map(int, parents))) for tokens, parents in trees]
        if survival is None:
            says = [[1.0] * len(tokens) for tokens, _ in own]
        else:
            says = [list(map(float, chances)) for chances in survival]
        drafts = cls._of(own, says)
        drafts.q, drafts.resume = q, resume
        return drafts

    @classmethod
    def promised(cls, chains: Seq[list[int]], ahead: Callable[[], Drafts]) -> Drafts:
        """Chains of promises, whose tokens `ahead` will give."""
        drafts = cls._of([Tree(chain, list(range(-1, len(chain) - 1))) for chain in chains], [[1.0] * len(own) for own in chains])
        drafts.ahead = ahead
        return drafts

    def subset(self, kept: Seq[Seq[int]]) -> Drafts:
        """The same drafts with only these nodes, in order; a kept node's parent is kept."""
        trees: list[tuple[list[int], list[int]]] = []
        for (tokens, parents), nodes in zip(self.on_host(), kept, strict=True):
            place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
            trees.append(([tokens[node] for node in nodes], [place[parents[node]] for node in nodes]))
        return Drafts.trees(trees, survival=[[own[node] for node in nodes] for own, nodes in zip(self.says(), kept, strict=True)])

    def on_host(self) -> list[Tree]:
        """Each sequence's nodes as plain lists: the round's one look at the draft from the host."""
        if self._trees is None:
            rows = zip(self.counts.tolist(), self.tokens.tolist(), self.parents.tolist(), strict=True)
            self._trees = [Tree(tokens[:n], parents[:n]) for n, tokens, parents in rows]
        return self._trees

    def says(self) -> list[list[float]]:
        """The survival of each sequence's nodes, likewise."""
        if self._says is None:
            self._says = [own[:n] for n, own in zip(self.counts.tolist(), self.survival.tolist(), strict=True)]
        return self._says

    @property
    def tokens(self) -> Tensor:
        """(B, D) int64."""
        return self._as_arrays()[0]

    @property
    def parents(self) -> Tensor:
        """(B, D) int64."""
        return self._as_arrays()[1]

    @property
    def survival(self) -> Tensor:
        """(B, D) float32, estimate that the node is accepted."""
        return self._as_arrays()[2]

    @property
    def counts(self) -> Tensor:
        """(B,) int64."""
        return self._as_arrays()[3]

    def _as_arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.arrays is None:
            trees, says = self.on_host(), self.says()
            counts = [len(tokens) for tokens, _ in trees]
            width = max(counts, default=0)
            tokens = integers([[*own, *[0] * (width - len(own))] for own, _ in trees])
            parents = integers([[*own, *[ROOT] * (width - len(own))] for _, own in trees])
            survival = torch.tensor([[*own, *[0.0] * (width - len(own))] for own in says])
            shape = len(trees), width
            self.arrays = tokens.view(shape), parents.view(shape), survival.view(shape), integers(counts)
        return self.arrays


def integers(values: Seq[Any]) -> Tensor:
    """An int64 tensor from (nested) lists, by way of numpy: several times quicker than torch.tensor."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


@dataclass(slots=True)
class Scores:
    """The target's raw logits for every draft node and its root, and what drafters asked for.

    Row `roots[b]` of the logits is sequence b's root and row `roots[b] + 1 + i` its node i; -1 where
    the sequence is still reading its prompt. Taps cover every row of the forward: sequence b's fed
    tokens from row `first_rows[b]` on, then its nodes.
    """

    logits: Tensor  # (R, V) float32
    roots: list[int]
    first_rows: list[int] = field(default_factory=list)
    taps: Tensor | None = None  # (N, taps * H)
    prompt_logits: dict[int, Tensor] = field(default_factory=dict)  # sequence index -> (chunk, V)
    choices: list[int] | None = None  # of every row, where the device has made them already


class Verdict(NamedTuple):
    """One sequence's accepted path through its draft, and the tokens it emits."""

    path: list[int]  # accepted nodes, from the root down
    tokens: list[int]  # the accepted tokens, then the one after them; empty while it reads its prompt
    choices: Seq[int] = ()  # under `match`: the target's choice at the root and at every node, rejected ones too


@dataclass(slots=True)
class Batch:
    """Who runs this round. `feeds[b]` leading uncached tokens of sequence b are read by the target."""

    sequences: list[Sequence]
    feeds: list[int]
    again: bool = False  # the next round is likely to be theirs too, planned as this one, and has its slots: it may start unasked

    def samples(self, b: int) -> bool:
        """Whether sequence b has read all of its tokens after this round and so emits."""
        seq = self.sequences[b]
        return seq.cached + self.feeds[b] == len(seq.tokens)
