"""The runner feeds token rows through a decoder over paged KV. Targets and draft models use it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from operator import eq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.cache import KVPool, SequenceState, Slots, StateCache
from outrider.core import (
    Batch,
    Computed,
    Drafts,
    FutureTokens,
    Guarantee,
    InFlight,
    PendingDrafts,
    Resume,
    Scores,
    integers,
)
from outrider.errors import EngineDead, InvalidParameter
from outrider.model.adapters import AdapterRows, AdapterSlots
from outrider.model.backends import cpu_ops
from outrider.model.decoder import Decoder, Hidden
from outrider.model.load import FP8, INT4, INT8
from outrider.model.recurrence import Mixer
from outrider.model.recurrent_rows import RecurrentRows
from outrider.model.spec import ModelSpec
from outrider.model.stack import decoder_stack, lay_out_rows
from outrider.ops import AttentionPlan, Ops, Segment, paged_attention, plan_attention
from outrider.ops.forwards import network
from outrider.ops.native import ChainParams, StackSpan, find_core
from outrider.sampling import Row
from outrider.sampling.choice import noise_along, shape_of
from outrider.sampling.noise import token_words_at

if TYPE_CHECKING:
    from outrider.ops.group import Group

__all__ = ["Feed", "PendingChains", "Round", "Rows", "Runner", "TreeGrowth", "Verified", "kv_value_bytes", "lay_out"]

Tokens = list[list[int]]
Chances = list[list[float]]

_LONGEST_CHAIN = 256
_STATES = 64
_WHOLE = StackSpan()


class Feed(NamedTuple):
    """Rows of one sequence in a forward: committed tokens from `start`, then draft nodes."""

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()
    known: int = 0  # leading nodes that were fed before; they are in `parents` but not in `nodes`
    first_key: int = 0  # the first slot with a key; those before are empty
    rotary_start: int = 0  # the first row of the rotary table that its request uses; see Decoder.rotary_start
    adapter: int = 0  # number of the LoRA adapter that its rows go through; 0: none
    state: SequenceState | None = None  # of recurrent layers; None: rows from position 0, and nothing is kept


class PendingChains(NamedTuple):
    """Draft chains in flight on a device."""

    future: list[FutureTokens]  # of each chain
    resolve: Callable[[], tuple[Tokens, Chances]]  # waits for the device
    is_intact: Callable[[], bool]  # see PendingDrafts


class Verified(NamedTuple):
    """A chain of a draft model that the target verifies in a forward that is in flight."""

    feed: Feed  # after which it was drawn
    drawn: FutureTokens
    choices: FutureTokens  # the target's, at the root and at the nodes that are verified


class TreeGrowth(NamedTuple):
    """The shape of trees that a runner grows by itself."""

    levels: int
    branch: int  # children of a node that is expanded
    beam: int | None = None  # nodes expanded side by side; None: by the size of the tree


class Rows(NamedTuple):
    """The flat batch of one forward."""

    tokens: Tensor  # (N,)
    positions: Tensor  # (N,)
    slots: Slots  # of each row's KV
    plan: AttentionPlan
    rotary_rows: Tensor | None = None  # (N,) rows of the rotary tables, where they are not the positions
    adapters: AdapterRows = ()  # of rows that have one
    recurrent: RecurrentRows | None = None


class Round(NamedTuple):
    """A batch and its drafts as rows of one forward."""

    feeds: list[Feed]
    wanted: list[int]  # rows whose logits are wanted: roots and nodes
    roots: list[int]  # of each sequence, its root among those; -1 while it reads its prompt
    first_rows: list[int]
    prompt_rows: dict[int, range]  # rows of prompts whose log probabilities are wanted


def lay_out(feeds: Sequence[Feed], pool: KVPool, windows: frozenset[int | None]) -> Rows:
    """The feeds as flat rows."""
    tokens: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    offsets: list[int] = []
    segments: list[Segment] = []
    adapters: list[tuple[slice, int]] = []
    size = pool.page_size
    for feed in feeds:
        segment = Segment(len(tokens), feed.start, len(feed.tokens), feed.pages, feed.parents, feed.known, feed.first_key)
        segments.append(segment)
        tokens += feed.tokens
        tokens += feed.nodes
        positions += segment.positions()
        if feed.adapter:
            adapters.append((slice(segment.first_row, len(tokens)), feed.adapter))
        for slot in segment.slots():
            pages.append(feed.pages[slot // size])
            offsets.append(slot % size)
    plan = plan_attention(segments, size, windows)
    rotary = _rotary_rows(feeds, segments, positions)
    if len(tokens) == 1:
        return Rows(torch.tensor(tokens), torch.tensor(positions), (pages[0], offsets[0]), plan, rotary, adapters)
    ids, where, page, offset = integers([tokens, positions, pages, offsets]).unbind()
    return Rows(ids, where, (page, offset), plan, rotary, adapters)


def _rotary_rows(feeds: Sequence[Feed], segments: Sequence[Segment], positions: Sequence[int]) -> Tensor | None:
    """Rows of the rotary tables; None where all requests use the first variant, whose rows are the positions."""
    if not any(feed.rotary_start for feed in feeds):
        return None
    starts = chain.from_iterable([feed.rotary_start] * segment.rows for feed, segment in zip(feeds, segments, strict=True))
    return torch.tensor([start + position for start, position in zip(starts, positions, strict=True)])


def kv_value_bytes(config: ModelSpec, page_size: int, int8: bool = False) -> int:
    """Bytes of one value in the KV of a model that runs on the CPU."""
    native = cpu_ops(config).core is not None
    return KVPool.value_bytes(native and config.dtype != "float32", page_size, native and int8)


def _sum_ranks(group: Group, layer: int, product: str, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001 (the signature of Deltas)
    """The result of a product, summed over the ranks where each of them has a part."""
    return group.sum(y.float()) if product in ("out", "down") else y


@lru_cache(maxsize=32)
def _layer_numbers(taps: tuple[int, ...]) -> Tensor:
    return torch.tensor(taps, dtype=torch.int32)


class Runner:
    """A decoder, its KV pool and the ops that make rows independent of their neighbours."""

    device_name = "cpu"
    separate_prefill = False  # prompts run other kernels than decode rows, so their time says nothing about rounds
    overlaps_drafts = False  # has `draw` and `draw_next`, for a target on the same device
    drafts_by_temperature = False  # `draft` accepts any parameters but applies only temperature and noise
    chains_only = False  # drafts may not branch
    weights_on_host = False  # a GPU reads some of them from host memory
    streams_weights = False  # and layers of them in every forward: many rows cost what one costs
    grows_trees = False  # has `grow`
    partial_runs = "any"  # which layers `run` can run alone: "any" of them, the "first", or "none"
    guarantee: Guarantee | None = None  # of a model whose promise was checked at start-up; None: every backend keeps it
    ranks = 1  # processes that share the model
    fault: EngineDead | None = None  # why nothing can be computed any more
    states = StateCache()  # of recurrent layers at the ends of pages
    _expert_layers = 0  # of the decoder, where this runner counts the experts that they read
    _resumable: Resume | None = None  # rows from which the next `score` may resume

    def __init__(
        self, decoder: Decoder, pool: KVPool, ops: Ops | None = None, group: Group | None = None, states: int = _STATES
    ) -> None:
        """With a `group` the decoder is one rank's share: rows enter its first layer as `x`, and logits are its share's.

        `states` are kept at most at the ends of pages, where the model has recurrent layers.
        """
        self.decoder = decoder
        self.pool = pool
        self.ops = ops or cpu_ops(decoder.spec)
        self.group = group
        config, core = decoder.spec, self.ops.core
        if config.dtype == FP8:
            raise InvalidParameter("dtype", "fp8 runs on a GPU alone; pass dtype=int8 or dtype=bfloat16")
        if config.dtype in (INT8, INT4) and core is None:
            raise InvalidParameter("dtype", f"{config.dtype} needs the native core, which is not in use: {find_core()[1]}")
        if core is None:
            decoder.materialise()
        self.stack = None if core is None else decoder_stack(decoder, pool, core, group)
        self.adapters = AdapterSlots(decoder, self.ops, self.stack)
        self._distinct_windows = frozenset(config.windows)
        self._kv_layer = {layer: place for place, layer in enumerate(config.kv_layers)}
        if config.recurrent:
            self.states, self.partial_runs = StateCache(states), "none"
        self._expert_layers = config.expert_layers

    def close(self) -> None:
        """End what computes elsewhere."""

    @property
    def bus_bytes(self) -> int:
        """Bytes of weights that forwards have brought from host memory so far."""
        return 0

    def free_memory(self) -> None:
        """Give back memory that nothing uses, after a round that had none."""

    def capture_next(self) -> bool:
        """Prepare one more kind of round while nothing runs. Returns False where all are prepared."""
        return False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the native core reads in a forward with logits; 0 where torch serves."""
        return 0 if self.stack is None else self.stack.bytes

    def forward(self, feeds: Sequence[Feed], taps: tuple[int, ...] = (), wanted: Sequence[int] = ()) -> Hidden:
        """Hidden rows of all feeds in order, with their KV written to the pages. See `run`."""
        return self.run(self.prepare(feeds), taps, wanted=wanted)

    def prepare(self, feeds: Sequence[Feed]) -> Rows | array[int]:
        """The feeds as flat rows, or in the native core's layout."""
        if self.stack is not None:
            return lay_out_rows(feeds)
        rows = lay_out(feeds, self.pool, self._distinct_windows)
        recurrent = self.decoder.spec.recurrent
        if not recurrent:
            return rows
        return rows._replace(recurrent=RecurrentRows(feeds, self.pool.page_size, recurrent[0].kernel))

    @network
    def run(
        self,
        rows: Rows | array[int],
        taps: tuple[int, ...] = (),
        layers: range | None = None,
        x: Tensor | None = None,
        wanted: Sequence[int] = (),
    ) -> Hidden:
        """The decoder, or some of its layers on rows `x`, over prepared rows; with logits of the wanted ones."""
        return self.run_rows(rows, taps, layers, x, wanted)

    def run_rows(
        self, rows: Rows | array[int], taps: tuple[int, ...], layers: range | None, x: Tensor | None, wanted: Sequence[int]
    ) -> Hidden:
        """What `run` does, and no log of forwards hears of."""
        if not isinstance(rows, array):
            return self._run_torch(rows, taps, layers, x, wanted)
        assert self.stack is not None
        span = _WHOLE if layers is None else StackSpan(layers.start, layers.stop)
        outputs = self.stack.forward(rows, _layer_numbers(taps) if taps else None, span, x, wanted)
        assert outputs.last is not None
        if outputs.taps is None:
            return Hidden(outputs.last, [], None, outputs.logits)
        return Hidden(outputs.last, list(outputs.taps.unbind(1)), outputs.taps.flatten(1), outputs.logits)

    @torch.inference_mode()
    def _run_torch(
        self, rows: Rows, taps: tuple[int, ...], layers: range | None, x: Tensor | None, wanted: Sequence[int]
    ) -> Hidden:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = self._kv_layer[layer]
            self.pool.write(place, rows.slots, k, v)
            a, sinks = self.decoder.spec.layers[layer].attention, self.decoder.layers[layer].sinks
            return paged_attention(q, *self.pool.layer(place), rows.plan, a.window, a.soft_cap, sinks)  # type: ignore[arg-type]

        def recur(mixer: Mixer, x: Tensor) -> Tensor:
            assert rows.recurrent is not None
            return rows.recurrent.run(mixer, x, self.ops)

        deltas = self.adapters.deltas(rows.adapters) if self.group is None else partial(_sum_ranks, self.group)
        turned = rows.rotary_rows
        hidden: Hidden = self.decoder(rows.tokens, rows.positions, attend, self.ops, taps, layers, x, turned, deltas, recur)
        if rows.recurrent is not None:
            rows.recurrent.settle()
        hidden.logits = self._logits_by_torch(hidden.last, wanted)
        return hidden

    @network
    def logits(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        """Float32 logits of the chosen hidden rows, (rows, V)."""
        return self.logits_of(last, rows)

    def logits_of(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        """What `logits` does, and no log of forwards hears of."""
        if self.stack is not None:
            return self.stack.logits(last if len(rows) == len(last) else last[list(rows)])
        return self._logits_by_torch(last, rows)

    @torch.inference_mode()
    def _logits_by_torch(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.decoder.spec.vocab)
        return self.decoder.logits(last if len(rows) == len(last) else last[list(rows)], self.ops)

    def launch(self, batch: Batch, drafts: Drafts | PendingDrafts, taps: tuple[int, ...] = ()) -> InFlight:
        """Begin one forward of all sequences. Here it is computed at once; a device may go on after this returns."""
        return Computed(self.score(batch, drafts if isinstance(drafts, Drafts) else drafts.resolve(), taps))

    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
        """One forward of all sequences: prompt chunks, roots and draft nodes."""
        feeds, wanted, roots, first_rows, prompt_rows = self._lay_out_round(batch, drafts)
        made_here, self._resumable = drafts.resume is self._resumable, None
        resume = drafts.resume if made_here and self._can_resume(drafts.resume, feeds, taps) else None
        touched = self._touched
        hidden = self.forward(feeds, taps, wanted) if resume is None else self._resumed(feeds, resume, taps, wanted)
        prompt_logits = {b: self.logits(hidden.last, rows) for b, rows in prompt_rows.items()}
        tapped = hidden.joined if hidden.joined is not None or not taps else torch.cat(hidden.taps, dim=-1)
        assert hidden.logits is not None
        experts = (self._touched - touched) / self._expert_layers if self._expert_layers else 0.0
        return Scores(hidden.logits, roots, first_rows, tapped, prompt_logits, experts=experts)

    @property
    def _touched(self) -> int:
        """Experts whose weights forwards have read so far, over all layers."""
        if not self._expert_layers:
            return 0
        return sum(layer.touched for layer in self.decoder.layers) if self.stack is None else self.stack.touched[0]  # type: ignore[misc]

    def _lay_out_round(self, batch: Batch, drafts: Drafts | PendingDrafts) -> Round:
        """Who feeds what, and which rows' logits are wanted."""
        feeds: list[Feed] = []
        wanted: list[int] = []
        roots: list[int] = []
        first_rows: list[int] = []
        prompt_rows: dict[int, range] = {}
        row = 0
        for b, (seq, fed) in enumerate(zip(batch.sequences, batch.feeds, strict=True)):
            tree = drafts.per_sequence[b]
            n = len(tree.tokens)
            (start, tokens), nodes = batch.fed(b), tree.tokens
            feeds.append(Feed(seq.pages, start, tokens, nodes, tree.parents, 0, 0, seq.rotary_start, seq.adapter, seq.state))
            first_rows.append(row)
            samples = batch.samples(b)
            roots.append(len(wanted) if samples else -1)
            if samples:
                wanted += range(row + fed - 1, row + fed + n)
            if seq.request.params.prompt_logprobs is not None and seq.cached < seq.prompt_len:
                prompt_rows[b] = range(row, row + min(fed, seq.prompt_len - seq.cached))
            row += fed + n
        return Round(feeds, wanted, roots, first_rows, prompt_rows)

    @property
    def drafts_chains(self) -> int:
        """The longest chain that `draft` can draw; 0 where it is not supported."""
        return 0 if self.stack is None else _LONGEST_CHAIN

    @network
    def draft(
        self,
        feeds: Sequence[Feed],
        rows: Sequence[Row],
        lengths: Sequence[int],
        draft_temperatures: Sequence[float],
        floor: float = 0.0,
    ) -> tuple[Tokens, Chances, Tensor | None]:
        """Draft a chain after each feed in one call, with the parameters and the noise of the target's `rows`.

        Returns each chain's tokens and chances, and the logits (steps, feeds, V) where they are on the host. Drafting may
        end where the survival of every chain is below `floor`.
        """
        assert self.stack is not None
        places = range(len(feeds))
        order = sorted(places, key=lengths.__getitem__, reverse=True)  # the core wants the longest first
        steps = lengths[order[0]]
        chains = ChainParams(
            wanted=array("i", [lengths[i] for i in order]),
            shapes=array("d", [part for i in order for part in shape_of(rows[i].params)]),
            draft_temperatures=array("f", [draft_temperatures[i] for i in order]),
            keys=noise_along([rows[i] for i in order], steps),
            words=token_words_at(self.decoder.spec.vocab),
            floor=floor,
        )
        tokens, chances, logits = self.stack.draft(lay_out_rows([feeds[i] for i in order]), chains)
        if all(map(eq, order, places)):
            return tokens, chances, logits
        back = sorted(places, key=order.__getitem__)
        return [tokens[i] for i in back], [chances[i] for i in back], logits[:, back]

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        """Launch draft chains without waiting for them."""
        raise NotImplementedError("overlaps_drafts is False")

    def draw_next(self, verified: Sequence[Verified], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        """Launch the chains after those that the target verifies now: the device works out where the verdicts leave them."""
        raise NotImplementedError("overlaps_drafts is False")

    def grow(
        self, feeds: Sequence[Feed], rows: Sequence[Row], rooms: Sequence[int], growth: TreeGrowth
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """Grow a tree of at most `rooms` nodes after each feed: tokens, parents and survival; none where no choice is left."""
        raise NotImplementedError("grows_trees is False")

    def resume(self, layer: int, hidden: Tensor, counts: Sequence[int]) -> Resume:
        """Keep rows that this runner's layers before `layer` have computed, for its next `score`. It accepts no other rows."""
        self._resumable = Resume(layer, hidden, counts)
        return self._resumable

    def _can_resume(self, resume: Resume | None, feeds: Sequence[Feed], taps: tuple[int, ...]) -> bool:
        """Whether the layers a drafter has run can be skipped: they are not tapped, and its rows are those of the feeds."""
        config = self.decoder.spec
        if resume is None or not 0 < resume.layer < config.depth or any(tap < resume.layer for tap in taps):
            return False
        rows = zip(feeds, resume.counts, strict=True)
        fits = all(count <= 1 + len(feed.nodes) and len(feed.tokens) == 1 for feed, count in rows if count)
        return fits and tuple(resume.hidden.shape) == (sum(resume.counts), config.hidden)

    @torch.inference_mode()
    def _resumed(self, feeds: Sequence[Feed], resume: Resume, taps: tuple[int, ...], wanted: Sequence[int]) -> Hidden:
        """Run the first layers for the missing rows and the other layers for all rows. Bits equal those of a full forward."""
        rows, row = self.prepare(feeds), 0
        missing_feeds: list[Feed] = []
        missing: list[int] = []
        for feed, count in zip(feeds, resume.counts, strict=True):
            end = row + len(feed.tokens) + len(feed.nodes)
            remaining = feed
            if count:  # the root and the nodes before are known
                remaining = feed._replace(start=feed.start + 1, tokens=(), nodes=feed.nodes[count - 1 :], known=count - 1)
            if remaining.tokens or remaining.nodes:
                missing_feeds.append(remaining)
            missing += range(row + count, end)
            row = end
        x = torch.zeros(row, self.decoder.spec.hidden)
        if missing_feeds:
            early = self.run(self.prepare(missing_feeds), (resume.layer,), range(resume.layer)).taps[0]
            x[missing] = early
        known = sorted(set(range(row)) - set(missing))
        x[known] = resume.hidden
        return self.run(rows, taps, range(resume.layer, self.decoder.spec.depth), x, wanted)
