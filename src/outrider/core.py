"""The nouns of the engine. No behaviour beyond bookkeeping lives here.

Dimensions: N tokens in the flat batch, B sequences, D draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.cache.states import SequenceState
    from outrider.sampling.guide import Guide
    from outrider.sampling.params import SamplingParams
    from outrider.sampling.reasoning_guide import ReasoningGuide

__all__ = [
    "ROOT",
    "Adapter",
    "Arm",
    "Batch",
    "Computed",
    "Drafts",
    "FutureTokens",
    "Guarantee",
    "InFlight",
    "Listener",
    "Needs",
    "PendingDrafts",
    "Phases",
    "Plan",
    "Request",
    "Resume",
    "RoundProfile",
    "RoundReport",
    "Scores",
    "Sequence",
    "SequenceReport",
    "SpeculationStats",
    "Tree",
    "Verdict",
    "acceptance_rate",
    "ancestors",
    "depths",
    "integers",
    "paths",
]

T = TypeVar("T")
ROOT = -1  # parent index of a node that hangs from the last committed token


class Adapter(NamedTuple):
    """A LoRA adapter that is loaded, as requests refer to it."""

    name: str
    number: int  # which the runner knows it by, from 1 on
    serial: int  # of its loading; no other adapter of this process has it, whatever its name


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
    return_rejected: bool = False  # keep the drafted nodes that were not accepted, to show them
    client: str | None = None  # who sent it: slots and prompt rows are shared fairly between clients
    adapter: Adapter | None = None  # the LoRA adapter that the target runs with
    memory: str | None = None  # whose earlier texts lookups search, where that is not the tenant; "": nobody's
    prediction: tuple[int, ...] = ()  # what the user expects the output to be: one more text to look up
    tag: str | None = None  # what the client calls this kind of request, for metrics and rules
    rule: str | None = None  # the server's rule that shaped its speculation

    @property
    def owner(self) -> str | None:
        """Whose earlier texts may draft for it, and whose text it becomes when it ends; None: nobody's."""
        return (self.tenant if self.memory is None else self.memory) or None


def acceptance_rate(accepted: int, drafted: int) -> float | None:
    """The acceptance rate everywhere: accepted over drafted tokens, every node of a tree a drafted one; None without drafts."""
    return round(accepted / drafted, 4) if drafted else None


_SEVERAL = ("auto", "mixture")  # methods of which another drafter goes on


class Guarantee(NamedTuple):
    """Whether a model's tokens are the same with speculation off and on, bit for bit, and why not."""

    tokens_guaranteed: bool
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As outputs report it."""
        if self.tokens_guaranteed:
            return {"tokens_guaranteed": True}
        return {"tokens_guaranteed": False, "not_guaranteed_because": self.reason}


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
    guarantee: Guarantee | None = None  # where a check at start-up decides
    limit: str | None = None  # what ended drafting before the text ended

    @property
    def off_reason(self) -> str | None:
        """Why nothing was drafted, or nothing more from some place on; None where all rounds could draft."""
        if self.fallback_reason is not None:
            return self.fallback_reason
        if self.limit is not None and (not self.drafted or self.method not in _SEVERAL):
            return self.limit
        if self.drafted or not self.rounds:
            return None
        return "no drafter was asked for" if self.method == "none" else "nothing was worth drafting"

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens a round emitted."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    def record(self, depths: Seq[int], accepted: int, emitted: int) -> None:
        """Count a round that drafted: the depth (from 0) of every drafted node, and what came of it."""
        self.rounds += 1
        self.emitted += emitted
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
        guarantee = {} if self.guarantee is None else self.guarantee.as_dict()
        return {
            "method": self.method,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_position": self.accepted_by_position,
            "drafted_by_position": self.drafted_by_position,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": round(self.tokens_per_round, 4),
            "fallback_reason": self.fallback_reason,
            "off_reason": self.off_reason,
            **guarantee,
        }


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation in flight. Owned and changed by the engine alone."""

    request: Request
    tokens: list[int] = field(init=False)
    order: tuple[int, int] = field(init=False)  # priority, then arrival
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # what its leading full pages hold, as the prefix cache names it
    named: int = 0  # leading pages the prefix cache knows
    cached: int = 0  # leading tokens whose KV is in the pages
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    guide: Guide | ReasoningGuide | None = None  # what a grammar lets follow
    rotary_start: int = 0  # the first row of the target's rotary table for its length; it never changes
    state: SequenceState | None = None  # of the target's recurrent layers, if it has some

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.order = (self.request.priority, 0)

    @property
    def adapter(self) -> int:
        """The number of its adapter; 0 where it has none."""
        return 0 if self.request.adapter is None else self.request.adapter.number

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def max_length(self) -> int:
        """The most tokens that it can have, prompt included."""
        return len(self.request.prompt_ids) + self.request.max_tokens


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the engine. Capability is data."""

    taps: tuple[int, ...] = ()  # layers whose input hidden rows it reads
    scores: bool = False  # reads logits of every node, rejected ones too
    kv_bytes_per_token: int = 0  # own KV beside the target's pages
    follows: bool = False  # can also guess after a path that is not text yet: draft.protocol.Lookup
    keeps: bool = False  # keeps texts of finished requests: draft.protocol.Keeper
    overlaps: bool = False  # can draft on the device while the round before is in flight: draft.protocol.Overlapping
    branches: bool = False  # drafts large trees: they may have more nodes than a text has tokens left


class Arm(NamedTuple):
    """One of several ways to draft that a policy may choose."""

    name: str
    max_nodes: int
    can_overlap: bool = False  # the target's forward can start before the host has seen what it drafts
    unit: int = 1  # nodes by which lengths are told apart, at least: large trees are planned in multiples of it


class Plan(NamedTuple):
    """The controller's decision for one round."""

    lengths: tuple[int, ...]  # most draft nodes for each sequence of the batch; 0 = do not draft
    rule: str = "match"
    keep_q: bool = False  # the rule needs the distribution each draft token was drawn from
    arms: tuple[int, ...] = ()  # where there are several ways to draft: which one for each sequence
    verify_all: bool = False  # whatever is proposed is verified, so the forward may start before the host has seen it
    confidence_threshold: float = 0.0  # survival under which further nodes are not worth drawing, where a drafter can stop


class Tree(NamedTuple):
    """One sequence's draft: nodes in topological order, so parents[i] < i, or ROOT. A chain is a tree with one branch."""

    tokens: list[int]
    parents: list[int]
    survival: list[float]  # draft confidence: estimate that the node is accepted

    @classmethod
    def chain(cls, tokens: list[int], survival: list[float] | None = None) -> Tree:
        """Tokens one after another."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), [1.0] * len(tokens) if survival is None else survival)

    @property
    def depths(self) -> Seq[int]:
        return depths(self.parents)

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to a node."""
        return [self.tokens[above] for above in ancestors(self.parents, node)]

    def find(self, path: Seq[int]) -> int | None:
        """The node at the end of a path of tokens; ROOT for an empty one, None where no node has it."""
        node = ROOT
        for token in path:
            child = next((i for i, parent in enumerate(self.parents) if parent == node and self.tokens[i] == token), None)
            if child is None:
                return None
            node = child
        return node

    def paths(self) -> list[list[int]]:
        """The path of the root, which is empty, and of every node."""
        return paths(self.tokens, self.parents)

    def subset(self, nodes: Seq[int]) -> Tree:
        """Only these nodes, in order; a kept node's parent is kept."""
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return Tree(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.survival[node] for node in nodes],
        )


def depths(parents: Seq[int]) -> Seq[int]:
    """Depth of every node of a tree, the root's children at 0."""
    if parents == _chain_parents(len(parents)):
        return range(len(parents))
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


@lru_cache(maxsize=256)
def _chain_parents(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def ancestors(parents: Seq[int], node: int) -> list[int]:
    """Nodes of a tree from the root's child down to a node, which is the last; none for the root."""
    out: list[int] = []
    while node != ROOT:
        out.append(node)
        node = parents[node]
    return out[::-1]


def paths(tokens: Seq[int], parents: Seq[int], before: Seq[int] = ()) -> list[list[int]]:
    """Tokens from the root down to the root itself and to every node of a tree, each after the tokens `before`."""
    out = [list(before)]
    for token, parent in zip(tokens, parents, strict=True):
        out.append([*out[parent + 1], token])
    return out


class Resume(NamedTuple):
    """Where the target may go on: rows whose first layers are run already, their KV of those layers in its slots."""

    layer: int  # the first layer still to run
    hidden: Tensor  # (rows, H) the residual stream entering it: of each sequence, its root and then its first nodes
    counts: Seq[int]  # such rows of each sequence, 0 where there are none


@dataclass(slots=True)
class Drafts:
    """Proposed tokens: one tree for each sequence of a batch, as plain lists on the host.

    Lists and not arrays, because everything that reads a draft is Python or one call of the native core, and after a forward
    has swept the caches a small tensor costs several microseconds.
    """

    per_sequence: list[Tree]
    q: Tensor | None = None  # (B, D, V), the distribution each token was drawn from, D the longest draft; None = one-hot
    resume: Resume | None = None  # taken only where the target's runner has made it: see Runner.resume

    @staticmethod
    def empty(batch: int) -> Drafts:
        """No guesses: plain decoding."""
        return Drafts([Tree([], [], [])] * batch)

    @classmethod
    def chains(cls, chains: Seq[Seq[int]], q: Tensor | None = None, survival: Seq[Seq[float]] | None = None) -> Drafts:
        """One chain of tokens per sequence, possibly empty."""
        return cls.trees([(chain, range(-1, len(chain) - 1)) for chain in chains], q, survival)

    @classmethod
    def trees(
        cls, trees: Seq[tuple[Seq[int], Seq[int]]], q: Tensor | None = None, survival: Seq[Seq[float]] | None = None
    ) -> Drafts:
        """One (tokens, parents) pair per sequence, and the survival of its nodes where the drafter knows better than 1.

        Whatever holds numbers will do, tensors and arrays too: plain lists are made of it.
        """
        if survival is None:
            survival = [[1.0] * len(tokens) for tokens, _ in trees]
        rows = zip(trees, survival, strict=True)
        made = [Tree(list(map(int, tree[0])), list(map(int, tree[1])), list(map(float, chances))) for tree, chances in rows]
        return cls(made, q)

    def subset(self, kept: Seq[Seq[int]]) -> Drafts:
        """The same drafts with only these nodes of each sequence, in order; a kept node's parent is kept."""
        return Drafts([tree.subset(nodes) for tree, nodes in zip(self.per_sequence, kept, strict=True)])

    @property
    def counts(self) -> list[int]:
        """Nodes of each sequence."""
        return [len(tree.tokens) for tree in self.per_sequence]

    @property
    def survival(self) -> list[list[float]]:
        """The draft confidence of each sequence's nodes."""
        return [tree.survival for tree in self.per_sequence]


@dataclass(frozen=True, slots=True)
class FutureTokens:
    """Tokens that a device has chosen or drawn and the host has not read: places in the runner's future-token buffer.

    A forward reads such a token from the buffer. Where token ids stand, -1 - i names place i.
    """

    first: int  # place of the first of them
    count: int
    stride: int = 1

    @property
    def ids(self) -> list[int]:
        """Their names, as token ids that no vocabulary has."""
        return list(range(-1 - self.first, -1 - self.first - self.count * self.stride, -self.stride))


@dataclass(slots=True)
class PendingDrafts:
    """Drafts that are still on the device, whose shape the host knows: a forward there can read them before the host has."""

    per_sequence: list[Tree]  # of future tokens
    resolve: Callable[[], Drafts]  # waits for the device; called once
    is_intact: Callable[[], bool]  # nothing has been drawn over them, so a forward launched now can read them

    @classmethod
    def chains(cls, chains: Seq[FutureTokens], resolve: Callable[[], Drafts], is_intact: Callable[[], bool]) -> PendingDrafts:
        """One chain of future tokens per sequence, possibly empty."""
        return cls([Tree.chain(tokens.ids) for tokens in chains], resolve, is_intact)


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
    experts: float = 0.0  # distinct ones that the forward read, the mean over layers that have some; 0: no layer has


class InFlight(Protocol):
    """A forward that was launched."""

    @property
    def choices(self) -> Seq[FutureTokens]:
        """Of each sequence, the choices at its root and at its nodes, for the next forward; none where it cannot read them."""

    def wait(self) -> Scores:
        """The scores, once they are computed. Logits are those of the forward launched last."""


class Computed(NamedTuple):
    """A forward that was computed when it was launched."""

    scores: Scores
    choices: Seq[FutureTokens] = ()

    def wait(self) -> Scores:
        return self.scores


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
    # Of each sequence its next token, where the forward that chooses it is still in flight: then that token is what is fed.
    future: Seq[FutureTokens] = ()

    def fed(self, b: int) -> tuple[int, list[int]]:
        """The position of the first token that sequence b feeds, and the tokens it feeds."""
        seq = self.sequences[b]
        if self.future:  # the forward in flight feeds the last token that is known
            return seq.cached + 1, self.future[b].ids
        return seq.cached, seq.tokens[seq.cached : seq.cached + self.feeds[b]]

    def samples(self, b: int) -> bool:
        """Whether sequence b has read all of its tokens after this round and so emits."""
        seq = self.sequences[b]
        return bool(self.future) or seq.cached + self.feeds[b] == len(seq.tokens)

    def where(self, keep: Callable[[Sequence, int], bool]) -> Batch:
        """Only the sequences for which a function of the sequence and its fed tokens is true."""
        rows = [(seq, fed) for seq, fed in zip(self.sequences, self.feeds, strict=True) if keep(seq, fed)]
        return Batch([seq for seq, _ in rows], [fed for _, fed in rows])


@dataclass(slots=True)
class SequenceReport:
    """What one sequence got out of a round."""

    kept: int = 0  # tokens emitted
    accepted: int = 0  # of them, drafted
    depths: Seq[int] = ()  # of every verified node; the root's children have depth 0
    drafter: str = ""  # who drafted them
    emits: bool = False  # False while it reads its prompt
    last_token: float = 0.0  # when its tokens before these came; 0 where these are its first


class Phases(NamedTuple):
    """Seconds of a round's parts. Their sum is the round's wall time."""

    schedule: float  # choosing who runs
    plan: float  # by the controller
    propose: float
    select: float  # by the controller: which nodes are verified
    forward: float  # the target's
    verify: float  # the target's choices, and the walk through each tree
    commit: float  # tokens, text, pages
    record: float  # the drafter's commit
    learn: float  # by the controller, from the report of the round before

    @property
    def wall(self) -> float:
        return sum(self)


class RoundReport(NamedTuple):
    """One round: who ran, what was planned, drafted and accepted, and what each part took.

    Listeners get it when the round is committed. The sequences go on changing afterwards.
    """

    batch: Batch
    plan: Plan
    drafts: Drafts  # those that were verified
    verdicts: Seq[Verdict]
    sequences: Seq[SequenceReport]
    room: Seq[int]  # draft nodes each sequence had room for
    rows: int  # of the target's forward, drafts included
    prefill: bool  # somebody read more than one token of a prompt
    phases: Phases
    began: float  # on the clock of time.perf_counter
    tokens_at: float  # when the tokens came
    experts: float = 0.0  # see Scores
    bus_bytes: int = 0  # of weights that crossed the bus since the round before: see Runner.bus_bytes


class Listener(Protocol):
    """Is told of every round: the controller, metrics, benchmarks, a profiler."""

    def observe(self, report: RoundReport) -> None: ...


class RoundProfile(Protocol):
    """Runs rounds for a profiler, and may halt their clock while it runs something that is not part of them."""

    def clock(self) -> float:
        """Seconds, without those spent in the profile."""

    def around(self, round_: Callable[[], T]) -> T:
        """Run a round."""

    def scored(self) -> None:
        """The target's forward is over, and nothing is committed yet."""
