"""The runner on a GPU: rounds of decode rows replay a CUDA graph, prompts run without graphs.

A graph holds a forward, the logits and the target's choices for a fixed number of rows. Another holds a draft of K tokens
of a draft model. Rounds with fewer rows are padded with rows that write to the pool's last page.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache import KVPool
from outrider.core import Batch, Computed, Drafts, InFlight, PendingDrafts, Scores, Tree
from outrider.errors import InvalidParameter
from outrider.model.cuda_chains import CHAIN_LENGTHS, MAX_CHAIN_TOKENS, Chains
from outrider.model.cuda_inputs import DEPTH, GRAPH_ROWS, GraphInputs, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.cuda_logits import RowLogits, choose_in_parts
from outrider.model.cuda_rounds import DecodeRounds, choose_on_host
from outrider.model.cuda_sampling_metadata import SamplingMetadata
from outrider.model.cuda_stack import EXTRA_POSITIONS, CudaPool, CudaStack
from outrider.model.cuda_states import DeviceStates, RecurrentInputs, RowRoom
from outrider.model.cuda_tree_growth import TreeGrower
from outrider.model.decoder import Decoder, Hidden
from outrider.model.memory import StateSizes
from outrider.model.placement import LOGIT_ROWS, MAX_PASS_ROWS, Placement
from outrider.model.runner import Chances, Feed, PendingChains, Round, Runner, Tokens, TreeGrowth, Verified
from outrider.ops import Segment, serving_ops
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.ops.forwards import device_work
from outrider.sampling import Row

__all__ = ["Capture", "CudaOptions", "CudaRunner", "split_feeds"]

_log = logging.getLogger("outrider")
Capture = Callable[[], object]
_STRIDE = 7919  # between tokens that are made up
_STATES = StateSizes(running=64, borders=32, nodes=256)
_MAX_CATCH_UP_ROWS = 2048  # rows of text that a draft model has missed


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a runner uses its device."""

    exact: bool = True  # False: cuBLAS and the fastest attention, without row invariance
    fp8_rows: bool = True  # products of weights in FP8 round rows to FP8 too; otherwise they decode the weights
    graphs: bool = True
    max_graph_rows: int = 256
    placement: Placement | None = None  # of weights that are streamed from host memory


class CudaRunner(Runner):
    """A decoder on a GPU, behind the runner's interface. Logits that drafters read are copied to the host."""

    separate_prefill = grows_trees = True
    drafts_by_temperature = True  # other parameters would cost the launches of a forward for each token

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page_size: int,
        device: str = "cuda",
        options: CudaOptions = CudaOptions(),
        target: CudaRunner | None = None,  # the target it drafts for
        states: StateSizes = _STATES,  # of recurrent layers, where the model has some
    ) -> None:
        if target is not None and decoder.spec.recurrent:
            raise InvalidParameter("model", "a draft model with recurrent layers is not run on a GPU yet; pass another one")
        self.decoder = decoder
        self.device = torch.device(device)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else device
        self.overlaps_drafts = target is not None
        fresh = torch.zeros(MAX_CHAIN_TOKENS + GRAPH_ROWS[-1], dtype=torch.int32, device=device)
        # the future-token buffer: tokens of a draft, then choices of a round
        self.future_tokens: Tensor = fresh if target is None else target.future_tokens
        self.chosen = fresh[MAX_CHAIN_TOKENS:]
        self.cuda = CudaStack(
            decoder, page_size, self.device, options.exact, self.future_tokens, options.placement, options.fp8_rows
        )
        c = decoder.spec
        self.pool = CudaPool(self.cuda.kernels, len(c.kv_layers), pages, self.device)
        self._recurrent = DeviceStates(c.recurrent, page_size, states, self.device) if c.recurrent else None
        if self._recurrent is not None:
            self.states = self._recurrent.cache
        self.ops = serving_ops()  # for heads whose shape the kernels do not support: the CPU runs those
        self.stack = self._output = None
        self.options = options
        self._sampling = SamplingMetadata(self.device)
        self.drawn: object = None  # stands for the draft that is in the future-token buffer
        self.weights_on_host, self.streams_weights = options.placement is not None, self.cuda.streams
        self.chains = Chains(self, target or self)
        self.trees = TreeGrower(self)
        self.rounds = DecodeRounds(self, self._sampling, MAX_CHAIN_TOKENS)
        self.capture_seconds: dict[str, float] = {}
        self.later: deque[Capture] = deque()  # captures for idle moments
        self.width = -(-(c.context + EXTRA_POSITIONS) // page_size)  # of a page table
        self._memory: Any = None
        self._stream = torch.cuda.current_stream() if self.device.type == "cuda" else None
        self._done: Any = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.cuda.close()

    @property
    def bus_bytes(self) -> int:
        return 0 if self.cuda.streaming is None else self.cuda.streaming.crossed

    @property
    def weight_bytes(self) -> int:
        return self.cuda.weight_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Row counts of captured rounds, and batch sizes of captured drafts; both are padded to the next of these."""
        return GRAPH_ROWS

    # --- the round -------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, drafts: Drafts | PendingDrafts, taps: tuple[int, ...] = ()) -> InFlight:
        """One forward for everyone, and the target's choices with it. Rounds of decode rows are in flight when this returns."""
        if not any(tree.tokens for tree in drafts.per_sequence):
            in_flight = self.rounds.launch_plain(batch, taps)
            if in_flight is not None:
                return in_flight
        laid = self._lay_out_round(batch, drafts)
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in laid.feeds)
        decoding = not laid.prompt_rows and all(len(feed.tokens) == 1 for feed in laid.feeds) and min(laid.roots) >= 0
        groups = _groups(laid.feeds, self.options.max_graph_rows)
        decoding = decoding and all(self.rounds.fits(laid.feeds[group]) for group in groups)
        if decoding and rows <= self.options.max_graph_rows:
            return self.rounds.launch(batch, drafts, laid, taps)
        self.rounds.last = None
        if decoding and (not self.cuda.streams or rows > MAX_PASS_ROWS):
            return Computed(self._score_by_parts(batch, drafts.per_sequence, laid, taps))
        return Computed(self._score_eagerly(batch, drafts.per_sequence, laid, taps))

    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
        return self.launch(batch, drafts, taps).wait()

    def _score_eagerly(self, batch: Batch, trees: list[Tree], laid: Round, taps: tuple[int, ...]) -> Scores:
        """A round without a graph: one pass over the weights, however many rows it has."""
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in laid.feeds)
        forward = self._forward(laid.feeds, taps)
        prompt_logits = {b: self.logits(forward.last, wanted_rows) for b, wanted_rows in laid.prompt_rows.items()}
        tapped = None if forward.taps is None else forward.taps[:rows].flatten(1)
        if not laid.wanted:
            self._wait()
            nothing = torch.empty(0, self.decoder.spec.vocab)
            return Scores(nothing, laid.roots, laid.first_rows, tapped, prompt_logits, experts=self.cuda.experts_read)
        logits, choices = self._choose(forward.last, batch, trees, laid)
        return Scores(logits, laid.roots, laid.first_rows, tapped, prompt_logits, choices, experts=self.cuda.experts_read)

    def _score_by_parts(self, batch: Batch, trees: list[Tree], laid: Round, taps: tuple[int, ...]) -> Scores:
        """Some of the sequences after the others, where there are more rows than the largest graph or one pass takes."""
        parts: list[Scores] = []
        choices: list[int] = []
        streams = self.cuda.streams
        for group in _groups(laid.feeds, MAX_PASS_ROWS if streams else self.options.max_graph_rows):
            first = laid.roots[group.start]
            layout = laid._replace(feeds=laid.feeds[group], roots=[root - first for root in laid.roots[group]])
            size, some = sum(1 + len(feed.nodes) for feed in layout.feeds), Batch(batch.sequences[group], batch.feeds[group])
            if streams:
                layout = layout._replace(wanted=list(range(size)))
                scores = self._score_eagerly(some, trees[group], layout, taps)
            else:
                scores = self.rounds.launch(some, Drafts(trees[group]), layout, taps).wait()
            scores.logits = scores.logits.clone()  # the next replay overwrites the graph's logits
            parts.append(scores)
            choices += scores.choices or ()
        self.rounds.last = None
        logits = [scores.logits for scores in parts]
        if len({rows.device for rows in logits}) > 1:
            logits = [rows.cpu() for rows in logits]
        tapped = torch.cat([scores.taps for scores in parts if scores.taps is not None]) if taps else None
        experts = sum(scores.experts for scores in parts)  # every replay reads its own
        return Scores(torch.cat(logits), laid.roots, laid.first_rows, tapped, {}, choices, experts=experts)

    @torch.inference_mode()
    def _choose(self, last: Tensor, batch: Batch, trees: Sequence[Tree], laid: Round) -> tuple[Tensor, list[int]]:
        """Logits and choices of a round that runs without a graph."""
        last = last[laid.wanted]
        inputs = GraphInputs(len(laid.wanted), 1, 1, self.device, 1)
        for seq, tree, root in zip(batch.sequences, trees, laid.roots, strict=True):
            if root >= 0:
                segment = Segment(0, len(seq.tokens) - 1, 1, (), tree.parents)
                inputs.fields[2, root : root + 1 + len(tree.tokens)] = segment.positions()
        by_host = self._sampling.fill(inputs, batch, trees, laid.roots)
        inputs.send()
        if self.cuda.streams and len(last) > LOGIT_ROWS:
            logits: Tensor = RowLogits(self.cuda, last)  # type: ignore[assignment]
            choices = choose_in_parts(self.cuda, last, inputs.meta, self._sampling.table)
        else:
            logits = self.cuda.logits(last)
            choices = self._sampling.table.choose(logits, inputs.meta).tolist()
        return choose_on_host(logits, choices, by_host, batch, trees, laid.roots), choices

    def recurrent_inputs(self, room: RowRoom) -> RecurrentInputs | None:
        """Inputs of recurrent layers, where the model has some."""
        return None if self._recurrent is None else RecurrentInputs(self._recurrent, room)

    def fill(self, inputs: GraphInputs, feeds: Sequence[Feed]) -> None:
        """Fill the inputs of a forward; rows past those of the feeds are padding."""
        size, scratch = self.pool.page_size, self.pool.pages - 1
        tokens: list[int] = []
        sequences: list[int] = []
        positions: list[int] = []
        roots: list[int] = []
        firsts: list[int] = []
        slots: list[int] = []
        for b, feed in enumerate(feeds):
            pages, n = feed.pages, len(feed.tokens) + len(feed.nodes)
            tokens += feed.tokens
            tokens += feed.nodes
            sequences += [b] * n
            firsts += [feed.first_key] * n
            inputs.place(b, pages, scratch, feed.rotary_start)
            if feed.parents and any(parent != i - 1 for i, parent in enumerate(feed.parents)):
                at, root, where = _tree_rows(feed, self.pool, inputs.ancestors, len(positions))
                positions += at
                roots += root
            else:
                where = range(feed.start + feed.known, feed.start + feed.known + n)
                positions += where
                roots += where
            slots += self.pool.slots(pages, where)
        if inputs.recurrent is not None:
            inputs.recurrent.fill(feeds)
        filled = len(tokens)
        inputs.filled = 0
        inputs.param_rows[:] = -1
        inputs.fields[:, :filled] = (tokens, sequences, positions, roots, firsts, slots)
        inputs.pad(filled, scratch, size)

    # --- forwards for drafters and prompts ---------------------------------------------------------------------------

    def forward(self, feeds: Sequence[Feed], taps: tuple[int, ...] = (), wanted: Sequence[int] = ()) -> Hidden:
        outputs = self._forward(feeds, taps)
        tapped = [] if outputs.taps is None else list(outputs.taps.cpu().unbind(1))
        return Hidden(outputs.last, tapped, logits=self.logits(outputs.last, wanted) if wanted else None)

    @device_work
    @torch.inference_mode()
    def _forward(self, feeds: Sequence[Feed], taps: tuple[int, ...]) -> Any:
        """A forward without a graph: prompts in chunks, all other rows one by one."""
        runs, singles = _split_prefill(feeds)
        order = [*runs, *singles]
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        branched = any(feed.parents for feed in feeds)
        recurrent = self.recurrent_inputs(RowRoom.of_feeds(feeds)) if self.decoder.spec.recurrent else None
        inputs = GraphInputs(rows, len(feeds), self.width, self.device, DEPTH if branched else 1, recurrent)
        self.fill(inputs, [feeds[i] for i in order])
        inputs.send()
        chunks, first = self._chunks([feeds[i] for i in runs])
        single = slice(first, rows) if singles else None
        from_start = len(feeds) == 1 and feeds[0].start == 0 and not feeds[0].nodes
        laid = CudaRows(inputs.meta, chunks, single, from_start, recurrent=recurrent)
        outputs = self.cuda.forward(laid, self.pool, taps)
        self._wait()  # the host inputs live only as long as this call
        if order == sorted(order):
            return outputs
        at = torch.tensor(_places(feeds, order), device=self.device)
        outputs.last = outputs.last[at]
        outputs.taps = None if outputs.taps is None else outputs.taps[at]
        return outputs

    def _chunks(self, feeds: Sequence[Feed]) -> tuple[Tensor | None, int]:
        """Prompts cut into chunks as `attend_chunks` reads them, and the number of their rows."""
        tokens, row = self.cuda.kernels.chunk_tokens, 0
        chunks = []
        for b, feed in enumerate(feeds):
            n = len(feed.tokens)
            chunks += [(row + i, min(tokens, n - i), feed.start + i, b, feed.first_key) for i in range(0, n, tokens)]
            row += n
        chunks.reverse()  # the chunks with the longest context start first
        return (torch.tensor(chunks, dtype=torch.int32, device=self.device) if chunks else None), row

    @device_work
    @torch.inference_mode()
    def logits(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        """Float32 logits of the chosen hidden rows, (rows, V), on the host."""
        parts = [self.cuda.logits(part).cpu() for part in torch.split(last[list(rows)], LOGIT_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def run(self, *_: Any, **__: Any) -> Hidden:
        raise InvalidParameter("method", "early exit runs some of the target's layers, which the GPU path does not do yet")

    # --- drafts of a draft model -------------------------------------------------------------------------------------

    @property
    def drafts_chains(self) -> int:
        return CHAIN_LENGTHS[-1]

    def draft(
        self,
        feeds: Sequence[Feed],
        rows: Sequence[Row],
        lengths: Sequence[int],
        draft_temperatures: Sequence[float],  # noqa: ARG002
        floor: float = 0.0,  # noqa: ARG002
    ) -> tuple[Tokens, Chances, Tensor | None]:
        """Draft chains by one replay. It applies no draft temperature and ends no chain early."""
        resolved = self.draw(feeds, rows, lengths).resolve()
        return *resolved, None

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        """Launch draft chains without waiting. The target may read their tokens in the future-token buffer."""
        return self.chains.draw(feeds, rows, lengths)

    def draw_next(self, verified: Sequence[Verified], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        return self.chains.draw_next(verified, rows, lengths)

    def grow(
        self, feeds: Sequence[Feed], rows: Sequence[Row], rooms: Sequence[int], growth: TreeGrowth
    ) -> list[tuple[list[int], list[int], list[float]]]:
        return self.trees.grow(feeds, rows, rooms, growth)

    def catch_up(self, feeds: Sequence[Feed]) -> None:
        """Write the KV of text the model has missed: few rows by a round's graph, many as prompts."""
        for part in split_feeds(feeds, _MAX_CATCH_UP_ROWS):
            rows = sum(len(feed.tokens) for feed in part)
            if rows > self.options.max_graph_rows:
                self._forward(part, ())
            else:
                self.rounds.feed(part)

    # --- graphs ------------------------------------------------------------------------------------------------------

    def captures(self, rows: int, taps: tuple[int, ...] = (), batch: int = 0, length: int = 0) -> list[Capture]:
        """What captures the graphs of rounds up to `rows` rows, and of drafts up to `batch` sequences and `length` tokens; the
        likeliest first: one sequence, then as many as there may be, then those between.
        """
        rounds = [partial(self.rounds.graph, count, taps) for count in _likeliest(rows, self.options.max_graph_rows)]
        lengths = [tokens for tokens in CHAIN_LENGTHS if tokens <= bucket(length, CHAIN_LENGTHS)]
        chains = [partial(self.chains.graph, count, tokens) for count in _likeliest(batch, GRAPH_ROWS[-1]) for tokens in lengths]
        return [*rounds, *chains]

    def warm_up_prefill(self, rows: int) -> None:
        """Run prompts of so many rows in all into the padding's page, which compiles the kernels of prompts."""
        tokens = [0] * min(rows, self.decoder.spec.context)
        pages = [self.pool.pages - 1] * -(-len(tokens) // self.pool.page_size)
        feeds = [Feed(pages, 0, tokens)] * max(rows // len(tokens), 1)
        self._forward(feeds, ())
        self._forward([*feeds, Feed(pages, 0, [0])], ())  # Triton specialises row counts that are no multiple of 16

    def free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def capture_next(self) -> bool:
        if not self.later:
            return False
        try:
            self.later.popleft()()
        except torch.OutOfMemoryError:
            _log.warning(
                "no memory for %d graphs that might be used: each will be captured when it is needed", 1 + len(self.later)
            )
            self.later.clear()
        return True

    def round_seconds(self) -> dict[int, tuple[float, float]]:
        """Device seconds of each captured round, and the distinct experts that it reads, by rows."""
        repeats, timed, vocab = 1 if self.cuda.streams else 3, {}, self.decoder.spec.vocab
        for rows, graph in self.rounds.graphs.items():
            if self.cuda.experts is not None and not self.decoder.spec.recurrent:  # tokens unlike each other, as experts may tell
                inputs = graph.sides[0].inputs
                self.fill(inputs, [Feed([0], 0, [i * _STRIDE % vocab]) for i in range(rows)])
                inputs.send()
            timed[rows] = _replay_seconds(graph.replay, repeats), self.cuda.experts_read
        return timed

    def capture(self, name: str, work: Any) -> Any:
        """A callable that repeats the work: a graph's replay, or the work itself where graphs are off."""
        if self.device.type != "cuda" or not self.options.graphs:
            return device_work(work)
        begun = perf_counter()
        with torch.inference_mode():
            future_tokens = self.future_tokens.clone()
            work()  # compiles kernels that are not compiled yet
            self.future_tokens.copy_(future_tokens)  # the next launch may read those of a round in flight
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            passes = self.cuda.passes
            with torch.cuda.graph(graph, pool=self._memory):
                work()
            replay = self.cuda.around(graph.replay, self.cuda.passes - passes)
        self._memory = self._memory or graph.pool()
        torch.cuda.synchronize()
        self.capture_seconds[name] = perf_counter() - begun
        return device_work(replay)

    def capture_rows(
        self, name: str, rows: int, work: Callable[[AttentionMetadata], None]
    ) -> Callable[[Sequence[Feed], Sequence[Row], Sequence[int]], None]:
        """Capture `work` on `rows` rows over this model's pages, for networks beside it. The callable takes feeds of up to
        that many rows, what noise their first rows have, and the first parameters of rows.
        """
        inputs = GraphInputs(rows, rows, self.width, self.device)
        self.fill(inputs, [])

        def send_and_work() -> None:
            inputs.send()
            work(inputs.meta)

        replay = self.capture(name, send_and_work)

        def run(feeds: Sequence[Feed], sampled: Sequence[Row], numbers: Sequence[int] = ()) -> None:
            self._wait()  # an earlier call may still copy the host inputs
            self.fill(inputs, feeds)
            inputs.temperatures[:] = 0.0
            inputs.set_noise(slice(len(sampled)), sampled)
            inputs.param_rows[: len(numbers)] = numbers
            replay()

        return run

    def _wait(self) -> None:
        """The round's host synchronisation."""
        if self._done is not None:
            self._done.record(self._stream)
            self._done.synchronize()


def _likeliest(count: int, most: int) -> list[int]:
    """Sizes of graphs for up to so many, in the order in which they are likely to be needed; none for 0."""
    if not count:
        return []
    largest = bucket(min(count, most), GRAPH_ROWS)
    sizes = [size for size in GRAPH_ROWS if size <= largest]
    return list(dict.fromkeys([sizes[0], largest, *sizes]))


def _groups(feeds: Sequence[Feed], max_rows: int) -> list[slice]:
    """Slices of consecutive feeds of at most `max_rows` rows each."""
    groups: list[slice] = []
    first = rows = 0
    for b, feed in enumerate(feeds):
        if rows + 1 + len(feed.nodes) > max_rows:
            groups.append(slice(first, b))
            first, rows = b, 0
        rows += 1 + len(feed.nodes)
    return [*groups, slice(first, len(feeds))]


def split_feeds(feeds: Sequence[Feed], max_rows: int) -> Iterator[list[Feed]]:
    """The rows of the feeds in parts of at most `max_rows`, in order. A run of tokens may be cut; a draft may not."""
    part: list[Feed] = []
    room = max_rows
    for feed in feeds:
        uncut: Feed | None = feed
        while uncut is not None:
            rows = len(uncut.tokens) + len(uncut.nodes)
            if rows <= room:
                part.append(uncut)
                room, uncut = room - rows, None
                continue
            if not uncut.nodes and room:
                part.append(uncut._replace(tokens=uncut.tokens[:room]))
                uncut = uncut._replace(start=uncut.start + room, tokens=uncut.tokens[room:])
            yield part
            part, room = [], max_rows
    if part:
        yield part


def _split_prefill(feeds: Sequence[Feed]) -> tuple[list[int], list[int]]:
    """The indices of feeds that are runs of prompt tokens, and those of single rows and drafts."""
    runs = [i for i, feed in enumerate(feeds) if len(feed.tokens) > 1 and not feed.nodes]
    return runs, [i for i in range(len(feeds)) if i not in set(runs)]


def _places(feeds: Sequence[Feed], order: Sequence[int]) -> list[int]:
    """The place of each row of the feeds when the feeds are laid out in another order."""
    first: dict[int, int] = {}
    row = 0
    for i in order:
        first[i] = row
        row += len(feeds[i].tokens) + len(feeds[i].nodes)
    return [first[i] + n for i, feed in enumerate(feeds) for n in range(len(feed.tokens) + len(feed.nodes))]


def _tree_rows(feed: Feed, pool: KVPool, ancestors: NDArray[Any], first: int) -> tuple[list[int], list[int], range]:
    """Positions, roots and storage places of a feed whose nodes branch. Writes the slots of their ancestors."""
    segment = Segment(first, feed.start, len(feed.tokens), feed.pages, feed.parents, feed.known)
    positions, root, fed = segment.positions(), segment.root, len(feed.tokens)
    paths: list[list[int]] = []
    slots = pool.slots(feed.pages, range(root + 1, root + 1 + len(feed.parents)))
    for slot, parent in zip(slots, feed.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), slot])
    for row, path in enumerate(paths[feed.known :], first + fed):
        ancestors[row, : len(path)] = path
    return positions, [*positions[:fed], *[root] * (len(positions) - fed)], segment.slots()


def _replay_seconds(replay: Any, repeats: int) -> float:
    replay()
    torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        replay()
    torch.cuda.synchronize()
    return (perf_counter() - begun) / repeats
