"""The runner on a GPU: rounds of decode rows replay a CUDA graph, prompts run as they come.

A graph holds a whole forward, the logits and the target's choices for a fixed number of rows; another holds a
whole draft of K tokens of a draft model. Shorter rounds are filled up with rows that write to the pool's last page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core import Batch, Drafts, Scores
from outrider.core import Sequence as Generation
from outrider.errors import InvalidParameter
from outrider.model.cuda_chains import CHAIN_LENGTHS, MOST_DRAWN, Chains
from outrider.model.cuda_plain import MOST_AHEAD, PlainRounds
from outrider.model.cuda_rows import DEPTH, GRAPH_ROWS, Graph, Packed, bucket
from outrider.model.cuda_stack import BEYOND, CudaPool, CudaStack
from outrider.model.cuda_wishes import Wishes
from outrider.model.decoder import Decoder, Hidden
from outrider.model.runner import Chances, Drawing, Feed, Round, Runner, Tokens
from outrider.ops import Segment, serving_ops
from outrider.ops.cuda.launch import Paged
from outrider.sampling import Row, choose, rows_of
from outrider.sampling.noise import prefix_of

__all__ = ["CudaOptions", "CudaRunner"]

_READ_AT_ONCE = 2048  # rows of text that a draft model has missed


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a runner uses its device."""

    exact: bool = True  # False: cuBLAS and whatever is fastest
    graphs: bool = True
    most_rows: int = 256  # of a graph


class CudaRunner(Runner):
    """A decoder on a GPU, behind the runner's interface. Logits asked for by drafters come to the host."""

    runs_ahead = prompts_apart = True
    drafts_roughly = True  # heeding the rest would cost a forward's launches for each token

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page_size: int,
        device: str = "cuda",
        options: CudaOptions = CudaOptions(),  # noqa: B008 (frozen)
        beside: CudaRunner | None = None,  # the target it drafts for
    ) -> None:
        self.decoder = decoder
        self.device = torch.device(device)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else device
        self.draws_ahead = beside is not None
        fresh = torch.zeros(MOST_DRAWN + GRAPH_ROWS[-1], dtype=torch.int32, device=device)
        self.promised: Tensor = fresh if beside is None else beside.promised  # tokens of a draft, then choices of a round
        self._chosen = fresh[MOST_DRAWN:]
        self.cuda = CudaStack(decoder, page_size, self.device, options.exact, self.promised)
        c = decoder.config
        self.pool = CudaPool(self.cuda.kernels, c.layers, pages, self.device)
        self.ops = serving_ops()  # of heads whose attention the kernels do not take: the processor runs those
        self.stack = self._output = None
        self.options = options
        self._wishes = Wishes(self.device)
        self.judging: list[int] | None = None  # while a round runs whose choices will lie in `promised`: its roots there
        self.chains = Chains(self, beside)
        self._plain = PlainRounds(self, self._wishes, -1 - MOST_DRAWN)
        self.capture_seconds: dict[str, float] = {}
        self.width = -(-(c.context + BEYOND) // page_size)  # of a page table
        self._graphs: dict[tuple[int, tuple[int, ...], int], Graph] = {}
        self._logits: list[Tensor] = []  # of rounds that run ahead, and of their twins; those of others lie in the graphs' memory
        self._memory: Any = None
        self._stream = torch.cuda.current_stream() if self.device.type == "cuda" else None
        self._done: Any = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def weight_bytes(self) -> int:
        return self.cuda.weight_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows or sequences that a round or a draft is run for: as many as there are, filled up to the next of these."""
        return GRAPH_ROWS

    # --- the round -------------------------------------------------------------------------------------------------

    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
        """One forward for everyone, and the target's choices with it. Drafts still being drawn are heard while it runs."""
        if drafts.ahead is None and not any(tree.tokens for tree in drafts.on_host()):
            scores = self._plain.score(batch, taps)
            if scores is not None:
                return scores
        self._plain.drop(batch)
        laid = self._lay_out_round(batch, drafts)
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in laid.feeds)
        decoding = not laid.prompt_rows and all(len(feed.tokens) == 1 for feed in laid.feeds) and min(laid.roots) >= 0
        if decoding and rows <= self.options.most_rows:
            return self._score_decoding(batch, laid, rows, taps, drafts.ahead)
        if drafts.ahead is not None:
            drafts.ahead()
        if decoding:
            return self._score_by_graphs(batch, laid, taps)
        found = self._forward(laid.feeds, taps)
        prompt_logits = {b: self.logits(found.last, own) for b, own in laid.prompt_rows.items()}
        tapped = None if found.taps is None else found.taps[:rows].flatten(1)
        if not laid.wanted:
            self._wait()
            return Scores(torch.empty(0, self.decoder.config.vocab), laid.roots, laid.first_rows, tapped, prompt_logits)
        logits, choices = self._choose(found.last, batch, laid)
        return Scores(logits, laid.roots, laid.first_rows, tapped, prompt_logits, choices)

    def _score_by_graphs(self, batch: Batch, laid: Round, taps: tuple[int, ...]) -> Scores:
        """Several replays with some of the sequences each: there are more rows than a graph takes."""
        found: list[Scores] = []
        choices: list[int] = []
        for own in _groups(laid.feeds, self.options.most_rows):
            first = laid.roots[own.start]
            part = laid._replace(feeds=laid.feeds[own], roots=[root - first for root in laid.roots[own]])
            size = sum(1 + len(feed.nodes) for feed in part.feeds)
            scores = self._score_decoding(Batch(batch.sequences[own], batch.feeds[own]), part, size, taps)
            scores.logits = scores.logits.clone()  # the graph's own
            found.append(scores)
            choices += scores.choices or ()
        logits = [scores.logits for scores in found]
        if len({own.device for own in logits}) > 1:
            logits = [own.cpu() for own in logits]
        tapped = torch.cat([scores.taps for scores in found if scores.taps is not None]) if taps else None
        return Scores(torch.cat(logits), laid.roots, laid.first_rows, tapped, {}, choices)

    def _score_decoding(
        self, batch: Batch, laid: Round, rows: int, taps: tuple[int, ...], ahead: Callable[[], object] | None = None
    ) -> Scores:
        graph = self.round_graph(bucket(rows, GRAPH_ROWS), taps)
        self._pack(graph.packed, laid.feeds)
        left = self._ask(graph.packed, batch, laid)
        graph.start()
        if ahead is not None:
            self.judging = laid.roots
            try:
                ahead()  # while the device goes on
            finally:
                self.judging = None
        graph.wait()
        logits, taps_of_all = graph.found
        tapped = None if taps_of_all is None else taps_of_all[:rows].flatten(1).clone()  # the next replay writes there
        choices = graph.host[:rows].tolist()
        logits = self._choose_rest(logits[:rows], choices, left, batch, laid)
        return Scores(logits, laid.roots, laid.first_rows, tapped, {}, choices)

    def _ask(self, packed: Packed, batch: Batch, laid: Round) -> list[int]:
        """Tell the device what every wanted row asks of the choice; the sequences that are left to the host."""
        self._wishes.begin()
        left = []
        for b, (seq, feed, root) in enumerate(zip(batch.sequences, laid.feeds, laid.roots, strict=True)):
            if root < 0:
                continue
            rows = slice(root, root + 1 + len(feed.nodes))
            self._noise(packed, rows, seq)
            told = self._wishes.tell(seq, feed.nodes, feed.parents)
            if told is None:
                left.append(b)
            elif told:
                packed.shaped[rows] = told
        self._wishes.send()
        return left

    @torch.inference_mode()
    def _choose(self, last: Tensor, batch: Batch, laid: Round) -> tuple[Tensor, list[int]]:
        """Logits and choices of a round that no graph runs."""
        logits = self.cuda.logits(last[laid.wanted])
        packed = Packed(len(laid.wanted), 1, 1, self.device, 1)
        packed.shaped[:] = -1
        for seq, feed, root in zip(batch.sequences, laid.feeds, laid.roots, strict=True):
            if root >= 0:
                own = Segment(0, len(seq.tokens) - 1, 1, (), feed.parents)
                packed.fields[2, root : root + 1 + len(feed.nodes)] = own.positions()
        left = self._ask(packed, batch, laid)
        packed.send()
        choices = self._wishes.shaping.choose(logits, packed.paged).tolist()
        return self._choose_rest(logits, choices, left, batch, laid), choices

    @staticmethod
    def _choose_rest(logits: Tensor, choices: list[int], left: list[int], batch: Batch, laid: Round) -> Tensor:
        """Choose for sequences the device could not; the logits, on the host if it has looked at them or will."""
        if left or any(seq.request.params.logprobs is not None for seq in batch.sequences):
            logits = logits.cpu()
        for b in left:
            rows = rows_of(batch.sequences[b], laid.feeds[b].nodes, laid.feeds[b].parents)
            first = laid.roots[b]
            choices[first : first + len(rows)] = choose(logits[first : first + len(rows)], rows)
        return logits

    def fill_round(self, graph: Graph, feeds: Sequence[Feed]) -> None:
        """Give a graph its rows, greedy ones."""
        graph.packed.temperatures[:] = 0.0
        self._pack(graph.packed, feeds)

    @staticmethod
    def _noise(packed: Packed, rows: slice, seq: Generation) -> None:
        params = seq.request.params
        packed.temperatures[rows] = 0.0 if params.greedy else params.temperature
        packed.prefixes[rows] = prefix_of(seq.request.seed, seq.request.index)

    def _pack(self, packed: Packed, feeds: Sequence[Feed]) -> None:
        """Fill a forward's integers; rows beyond the feeds' are padding."""
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
            packed.place(b, pages, scratch)
            if feed.parents and any(parent != i - 1 for i, parent in enumerate(feed.parents)):
                own = _tree_rows(feed, size, packed.ancestors, len(positions))
                positions += own[0]
                roots += own[1]
                slots += [pages[p // size] * size + p % size for p in own[2]]
            else:
                where = range(feed.start + feed.known, feed.start + feed.known + n)
                positions += where
                roots += where
                slots += [pages[p // size] * size + p % size for p in where]
        filled = len(tokens)
        packed.asked, packed.filled = None, 0
        packed.shaped[:] = -1
        packed.fields[:, :filled] = (tokens, sequences, positions, roots, firsts, slots)
        packed.pad(filled, scratch, size)

    # --- forwards for drafters and prompts ---------------------------------------------------------------------------

    def forward(self, feeds: Sequence[Feed], taps: tuple[int, ...] = (), wanted: Sequence[int] = ()) -> Hidden:
        found = self._forward(feeds, taps)
        tapped = [] if found.taps is None else list(found.taps.cpu().unbind(1))
        return Hidden(found.last, tapped, logits=self.logits(found.last, wanted) if wanted else None)

    @torch.inference_mode()
    def _forward(self, feeds: Sequence[Feed], taps: tuple[int, ...]) -> Any:
        """Whatever rows: prompts in runs, everything else row by row."""
        runs, singles = _sorted(feeds)
        order = [*runs, *singles]
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        branched = any(feed.parents for feed in feeds)
        packed = Packed(rows, len(feeds), self.width, self.device, DEPTH if branched else 1)
        self._pack(packed, [feeds[i] for i in order])
        packed.send()
        chunks, first = self._chunks([feeds[i] for i in runs])
        single = slice(first, rows) if singles else None
        from_start = len(feeds) == 1 and feeds[0].start == 0 and not feeds[0].nodes
        found = self.cuda.forward(packed.paged, self.pool, taps, chunks, single, from_start)
        self._wait()  # the integers on the host are this call's own
        if order == sorted(order):
            return found
        at = torch.tensor(_places(feeds, order), device=self.device)
        found.last = found.last[at]
        found.taps = None if found.taps is None else found.taps[at]
        return found

    def _chunks(self, feeds: Sequence[Feed]) -> tuple[Tensor | None, int]:
        """Runs of tokens as attend_chunks reads them, and how many rows they are."""
        tokens, row = self.cuda.kernels.chunk_tokens, 0
        chunks = []
        for b, feed in enumerate(feeds):
            n = len(feed.tokens)
            chunks += [(row + i, min(tokens, n - i), feed.start + i, b, feed.first_key) for i in range(0, n, tokens)]
            row += n
        chunks.reverse()  # those with most to read begin first
        return (torch.tensor(chunks, dtype=torch.int32, device=self.device) if chunks else None), row

    @torch.inference_mode()
    def logits(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        """Float32 logits of the chosen hidden rows, (rows, V), on the host."""
        return self.cuda.logits(last[list(rows)]).cpu()

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
        sharpness: Sequence[float],  # noqa: ARG002
        floor: float = 0.0,  # noqa: ARG002
    ) -> tuple[Tokens, Chances, Tensor | None]:
        """By one replay; the law is not sharpened there, and chains are drawn to their end."""
        found = self.draw(feeds, rows, lengths).land()
        return *found, None

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> Drawing:
        """The same, not waited for. The target may read the tokens where they are drawn: in `promised`."""
        return self.chains.draw(feeds, rows, lengths)

    def draw_behind(self, numbers: Sequence[int]) -> None:
        self.chains.draw_behind(numbers)

    def catch_up(self, feeds: Sequence[Feed]) -> None:
        """Text the model has missed: a little by the graph of a round, whose logits nobody reads, much as prompts are read."""
        for piece in _pieces(feeds, _READ_AT_ONCE):
            rows = sum(len(feed.tokens) for feed in piece)
            if rows > self.options.most_rows:
                self._forward(piece, ())
            else:
                graph = self.round_graph(bucket(rows, GRAPH_ROWS))
                self.fill_round(graph, piece)
                graph.launch()

    # --- graphs ------------------------------------------------------------------------------------------------------

    def warm_up(self, rows: int = 0, taps: tuple[int, ...] = (), plain: int = 0, batch: int = 0, length: int = 0) -> None:
        """Capture the graphs of rounds up to so many rows, of plain ones that run ahead, and of drafts up to so many
        sequences and tokens.
        """
        for count in GRAPH_ROWS:
            if rows and count <= bucket(min(rows, GRAPH_ROWS[-1]), GRAPH_ROWS):
                self.round_graph(count, taps)
            if plain and not taps and count <= bucket(min(plain, MOST_AHEAD), GRAPH_ROWS):
                self.round_graph(count, taps, 1)
            for tokens in CHAIN_LENGTHS:
                if batch and count <= bucket(min(batch, GRAPH_ROWS[-1]), GRAPH_ROWS) and tokens <= bucket(length, CHAIN_LENGTHS):
                    self.chains.graph(count, tokens)

    def read_nothing(self) -> None:
        """Prompts longer than any graph, into the padding's page: compiles what prompts need beside the graphs."""
        tokens = [0] * min(self.options.most_rows, self.decoder.config.context)
        pages = [self.pool.pages - 1] * -(-len(tokens) // self.pool.page_size)
        feeds = [Feed(pages, 0, tokens)] * (self.options.most_rows // len(tokens) + 1)
        self._forward(feeds, ())
        self._forward([*feeds, Feed(pages, 0, [0])], ())  # row counts that are no multiple of 16 have code of their own

    def round_seconds(self) -> dict[int, float]:
        """What each captured round takes on the device, by rows."""
        return {rows: _replay_seconds(graph.launch) for (rows, _, twin), graph in self._graphs.items() if not twin}

    def round_graph(self, rows: int, taps: tuple[int, ...] = (), twin: int = 0) -> Graph:
        """The graph of a forward of so many rows, one of GRAPH_ROWS, with its choices. Its twin can run behind it."""
        key = (rows, taps, twin)
        if key not in self._graphs:
            self._graphs[key] = self._capture_round(rows, taps, twin)
        return self._graphs[key]

    def has_graph(self, rows: int, twin: int) -> bool:
        return (rows, (), twin) in self._graphs

    def _capture_round(self, rows: int, taps: tuple[int, ...], twin: int) -> Graph:
        packed = Packed(rows, rows, self.width, self.device)
        if rows <= MOST_AHEAD and not self._logits:  # graphs share memory: the next launch may write to what another left there
            self._logits = [torch.empty(MOST_AHEAD, len(self.cuda.output), device=self.device) for _ in range(2)]
        out = self._logits[twin][:rows] if rows <= MOST_AHEAD else None
        self._pack(packed, [])
        kept: list[Any] = []
        host = torch.zeros(rows, dtype=torch.int32, pin_memory=self.device.type == "cuda")

        def work() -> None:
            packed.send()
            found = self.cuda.forward(packed.paged, self.pool, taps)
            logits = self.cuda.logits(found.last, out)
            chosen = self._wishes.shaping.choose(logits, packed.paged, self._chosen[:rows])
            host.copy_(chosen, non_blocking=True)
            kept[:] = [logits, found.taps]

        launch = self.capture(f"round of {rows} rows", work)
        return Graph(packed, launch, kept, host, torch.cuda.Event() if self.device.type == "cuda" else None)  # type: ignore[no-untyped-call]

    def capture(self, name: str, work: Any) -> Any:
        """A callable that does the work again: a graph's replay, or the work itself where there are no graphs."""
        if self.device.type != "cuda" or not self.options.graphs:
            return work
        begun = perf_counter()
        with torch.inference_mode():
            work()  # compiles what is not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                work()
        self._memory = self._memory or graph.pool()
        torch.cuda.synchronize()
        self.capture_seconds[name] = perf_counter() - begun
        return graph.replay

    def capture_rows(
        self, name: str, rows: int, work: Callable[[Paged], None]
    ) -> Callable[[Sequence[Feed], Sequence[Row]], None]:
        """For networks beside this model: work on so many rows of its pages as one graph, given up to as many by feeds."""
        packed = Packed(rows, rows, self.width, self.device)
        self._pack(packed, [])

        def whole() -> None:
            packed.send()
            work(packed.paged)

        replay = self.capture(name, whole)

        def run(feeds: Sequence[Feed], noisy: Sequence[Row]) -> None:
            self._wait()  # the integers of an earlier call may still be on their way
            self._pack(packed, feeds)
            packed.temperatures[:] = 0.0
            for b, row in enumerate(noisy):
                packed.temperatures[b] = 0.0 if row.params.greedy else row.params.temperature
                packed.prefixes[b] = prefix_of(row.seed, row.sample)
            replay()

        return run

    def _wait(self) -> None:
        """The round's host synchronisation."""
        if self._done is not None:
            self._done.record(self._stream)
            self._done.synchronize()


def _groups(feeds: Sequence[Feed], most: int) -> list[slice]:
    """Neighbours that fit together."""
    groups: list[slice] = []
    first = rows = 0
    for b, feed in enumerate(feeds):
        if rows + 1 + len(feed.nodes) > most:
            groups.append(slice(first, b))
            first, rows = b, 0
        rows += 1 + len(feed.nodes)
    return [*groups, slice(first, len(feeds))]


def _pieces(feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
    """Runs of text cut so that each piece has at most so many rows; one text's pieces come in order."""
    piece: list[Feed] = []
    room = most
    for feed in feeds:
        done = 0
        while done < len(feed.tokens):
            own = feed.tokens[done : done + room]
            piece.append(feed._replace(start=feed.start + done, tokens=own))
            done, room = done + len(own), room - len(own)
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _sorted(feeds: Sequence[Feed]) -> tuple[list[int], list[int]]:
    """Which feeds are runs of text, and which are single rows or drafts."""
    runs = [i for i, feed in enumerate(feeds) if len(feed.tokens) > 1 and not feed.nodes]
    return runs, [i for i in range(len(feeds)) if i not in set(runs)]


def _places(feeds: Sequence[Feed], order: Sequence[int]) -> list[int]:
    """Where the rows of the feeds lie when these are laid out in another order."""
    first: dict[int, int] = {}
    row = 0
    for i in order:
        first[i] = row
        row += len(feeds[i].tokens) + len(feeds[i].nodes)
    return [first[i] + n for i, feed in enumerate(feeds) for n in range(len(feed.tokens) + len(feed.nodes))]


def _tree_rows(feed: Feed, size: int, ancestors: NDArray[Any], first: int) -> tuple[list[int], list[int], range]:
    """Positions, roots and storage places of a feed whose nodes branch; their ancestors' slots are filled in."""
    segment = Segment(first, feed.start, len(feed.tokens), feed.pages, feed.parents, feed.known)
    positions, root, fed = segment.positions(), segment.root, len(feed.tokens)
    paths: list[list[int]] = []
    for node, parent in enumerate(feed.parents):
        place = root + 1 + node
        slot = feed.pages[place // size] * size + place % size
        paths.append([*(paths[parent] if parent >= 0 else ()), slot])
    for row, path in enumerate(paths[feed.known :], first + fed):
        ancestors[row, : len(path)] = path
    return positions, [*positions[:fed], *[root] * (len(positions) - fed)], segment.slots()


def _replay_seconds(replay: Any, repeats: int = 3) -> float:
    replay()
    torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        replay()
    torch.cuda.synchronize()
    return (perf_counter() - begun) / repeats
