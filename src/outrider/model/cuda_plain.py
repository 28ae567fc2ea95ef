"""Rounds of one row each on a GPU, and the next of them launched behind the one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outrider.core import Batch, Scores
from outrider.core import Sequence as Generation
from outrider.model.cuda_rows import GRAPH_ROWS, Asked, Graph, bucket
from outrider.model.cuda_wishes import Wishes

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["MOST_AHEAD", "PlainRounds"]

MOST_AHEAD = 64  # rows of a round that is launched behind another: their graphs hold logits of their own
_PAUSE = 32  # rounds without another try after one for nothing: that cost a forward, and one that goes well saves little


class _Flight(NamedTuple):
    """A round that was launched."""

    graph: Graph
    twin: int  # which of two graphs it is
    sequences: list[Generation]  # one row each
    starts: list[int]  # their positions
    tokens: list[int]  # what they are fed


class PlainRounds:
    """The most common rounds, in fewer steps than others and, with `Batch.again`, ahead of the host.

    The next round of the same sequences is then launched before this one is waited for. Its rows are promised this one's
    choices, which it reads on the device. What is asked for next is that round or some of its rows, nearly always;
    otherwise it ran for nothing. It may then have written to slots whose pages have changed hands since, but whatever
    their owner writes there was launched later, and no slot is read before its owner has written it.
    """

    def __init__(self, runner: CudaRunner, wishes: Wishes, promise: int) -> None:
        self._runner, self._wishes = runner, wishes
        self._promise = promise  # stands for the choice of row 0 until it is known here, the one below it for row 1's, ...
        self._asked = Asked.by([])
        self._ahead: _Flight | None = None
        self._pause = 0

    def score(self, batch: Batch, taps: tuple[int, ...]) -> Scores | None:
        """None: it is not such a round."""
        sequences, rows = batch.sequences, len(batch.sequences)
        starts = [seq.cached for seq in sequences]
        if rows > self._runner.options.most_rows or [len(seq.tokens) - 1 for seq in sequences] != starts:
            return None
        asked = self._asked_by(sequences)
        if asked.shapes or asked.of_prompts:
            return None
        flight, places = self._ahead, [] if taps else self._places(sequences)
        if flight is None or not places:
            self.drop(batch)
            flight, places = self._launch(sequences, starts, [seq.tokens[-1] for seq in sequences], 0, taps), list(range(rows))
        self._ahead = None
        behind = self._launch_next(flight, places) if batch.again else None
        flight.graph.wait()
        filled = len(flight.sequences)
        choices = flight.graph.host[:filled].tolist()
        if behind is not None:
            self._ahead = behind._replace(tokens=[choices[self._promise - token] for token in behind.tokens])
        logits, taps_of_all = flight.graph.found
        tapped = None if taps_of_all is None else taps_of_all[:filled].flatten(1).clone()  # the next launch writes there
        logits = logits[:filled].cpu() if asked.logprobs else logits[:filled]
        return Scores(logits, places, places, tapped, {}, choices)

    def drop(self, batch: Batch) -> None:
        """What was launched ahead is not what this batch asks for; its graph may be filled again."""
        if (flight := self._ahead) is not None:
            flight.graph.wait()
            self._ahead = None
            if not set(batch.sequences).isdisjoint(flight.sequences):  # not all have ended
                self._pause = _PAUSE

    def _places(self, sequences: list[Generation]) -> list[int]:
        """Of each sequence, its row in what was launched ahead; none where that is not what they ask for now."""
        if (flight := self._ahead) is None:
            return []
        rows = {seq: row for row, seq in enumerate(flight.sequences)}
        places = [rows.get(seq, -1) for seq in sequences]
        size, placed = self._runner.pool.page_size, flight.graph.packed.placed
        for seq, row in zip(sequences, places, strict=True):
            if row < 0 or seq.cached != flight.starts[row] or seq.tokens[-1] != flight.tokens[row]:
                return []
            pages = placed[row]
            if pages != seq.pages and (pages or [])[: (own := seq.cached // size + 1)] != seq.pages[:own]:
                return []
        return places

    def _launch_next(self, flight: _Flight, places: list[int]) -> _Flight | None:
        """The round after this one, of those who will not have ended; None where it cannot be launched yet."""
        self._pause = max(self._pause - 1, 0)
        going = [row for row in places if flight.starts[row] + 2 < _end(flight.sequences[row])]
        sequences, starts = [flight.sequences[row] for row in going], [flight.starts[row] + 1 for row in going]
        size, twin = self._runner.pool.page_size, 1 - flight.twin
        slots = all(len(seq.pages) * size > at for seq, at in zip(sequences, starts, strict=True))
        if self._pause or not going or len(going) > MOST_AHEAD or not slots:
            return None
        rows = bucket(len(going), GRAPH_ROWS)
        if not self._runner.has_graph(rows, twin):
            self._runner.round_graph(rows, (), twin)  # capturing it runs it, and its choices lie where this round's should
            return None
        return self._launch(sequences, starts, [self._promise - row for row in going], twin)

    def _launch(
        self, sequences: list[Generation], starts: list[int], tokens: list[int], twin: int, taps: tuple[int, ...] = ()
    ) -> _Flight:
        graph = self._runner.round_graph(bucket(len(sequences), GRAPH_ROWS), taps, twin)
        asked = self._asked_by(sequences)
        if graph.packed.asked is not asked:
            graph.packed.hear(asked)
            self._wishes.begin()  # nobody has any
        self._pack(graph, sequences, starts, tokens)
        graph.start()
        return _Flight(graph, twin, sequences, starts, tokens)

    def _asked_by(self, sequences: list[Generation]) -> Asked:
        requests = [seq.request for seq in sequences]
        if requests != self._asked.requests:
            self._asked = Asked.by(requests)
        return self._asked

    def _pack(self, graph: Graph, sequences: list[Generation], starts: list[int], fed: list[int]) -> None:
        packed, rows, pool = graph.packed, len(starts), self._runner.pool
        size, scratch = pool.page_size, pool.pages - 1
        tokens, numbers, positions, roots, _, slots = packed.fields
        tokens[:rows] = fed
        numbers[:rows] = packed.order[:rows]
        positions[:rows] = starts
        roots[:rows] = positions[:rows]
        slots[:rows] = [seq.pages[at // size] * size + at % size for seq, at in zip(sequences, starts, strict=True)]
        placed = packed.placed
        for b, seq in enumerate(sequences):
            if placed[b] != seq.pages:
                packed.place(b, seq.pages, scratch)
        if packed.filled != rows:
            packed.filled = rows
            packed.fields[4] = 0
            packed.shaped[:] = -1
            packed.pad(rows, scratch, size)


def _end(seq: Generation) -> int:
    """How many tokens it may have."""
    return len(seq.request.prompt_ids) + seq.request.max_tokens
