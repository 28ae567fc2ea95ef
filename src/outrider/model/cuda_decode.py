"""Plain decoding on a GPU: rounds of one row per sequence, and the overlapped launch of the next round."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outrider.core import Batch, Scores
from outrider.core import Sequence as Generation
from outrider.model.cuda_inputs import GRAPH_ROWS, Graph, SamplingNeeds, bucket, noise_key
from outrider.model.cuda_sampling_metadata import SamplingMetadata

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["MAX_OVERLAP_ROWS", "DecodeRounds"]

MAX_OVERLAP_ROWS = 64  # rows of an overlapped round: its graphs have separate logits buffers
_PAUSE = 32  # rounds without overlap after a wasted one: a wasted round costs a forward, a used one saves little


class _InFlight(NamedTuple):
    """A round that was launched."""

    graph: Graph
    buffer: int  # which half of the double buffer it uses
    sequences: list[Generation]  # one row each
    starts: list[int]  # their positions
    tokens: list[int]  # what they are fed


class DecodeRounds:
    """Rounds without drafts, in fewer steps than other rounds and, with `Batch.again`, overlapped.

    Overlap scheduling launches the next round of the same sequences before the host has synchronised with this one. Its
    rows read this round's choices on the device, as future tokens. The next call nearly always wants that round or some of
    its rows; otherwise the launch was wasted. A wasted round may have written to slots whose pages have a new owner. That is
    harmless: the owner's writes were launched later, and no slot is read before its owner has written it.
    """

    def __init__(self, runner: CudaRunner, sampling: SamplingMetadata, first_future: int) -> None:
        self._runner, self._sampling = runner, sampling
        self._first_future = first_future  # the future token of row 0's choice; that of row i is i less
        self._needs = SamplingNeeds.of([])
        self._overlapped: _InFlight | None = None
        self._pause = 0

    def score(self, batch: Batch, taps: tuple[int, ...]) -> Scores | None:
        """The scores of a plain round, or None where the batch is not one."""
        sequences, rows = batch.sequences, len(batch.sequences)
        starts = [seq.cached for seq in sequences]
        if rows > self._runner.options.max_graph_rows or [len(seq.tokens) - 1 for seq in sequences] != starts:
            return None
        needs = self._needs_of(sequences)
        if needs.penalties or needs.prompt_logprobs:
            return None
        flight, places = self._overlapped, [] if taps else self._places(sequences)
        if flight is None or not places:
            self.drop(batch)
            flight, places = self._launch(sequences, starts, [seq.tokens[-1] for seq in sequences], 0, taps), list(range(rows))
        self._overlapped = None
        following = self._launch_next(flight, places) if batch.again else None
        flight.graph.wait()
        filled = len(flight.sequences)
        choices = flight.graph.host[:filled].tolist()
        if following is not None:
            self._overlapped = following._replace(tokens=[choices[self._first_future - token] for token in following.tokens])
        logits, taps_of_all = flight.graph.outputs
        tapped = None if taps_of_all is None else taps_of_all[:filled].flatten(1).clone()  # the next launch overwrites them
        logits = logits[:filled].cpu() if needs.logprobs else logits[:filled]
        return Scores(logits, places, places, tapped, {}, choices, experts=flight.graph.experts)

    def drop(self, batch: Batch) -> None:
        """Discard the overlapped round, which is not the round of this batch."""
        if (flight := self._overlapped) is not None:
            flight.graph.wait()
            self._overlapped = None
            if not set(batch.sequences).isdisjoint(flight.sequences):  # not all have ended
                self._pause = _PAUSE

    def _places(self, sequences: list[Generation]) -> list[int]:
        """Each sequence's row in the overlapped round; empty where that round is not the one wanted now."""
        if (flight := self._overlapped) is None:
            return []
        rows = {seq: row for row, seq in enumerate(flight.sequences)}
        places = [rows.get(seq, -1) for seq in sequences]
        size, placed = self._runner.pool.page_size, flight.graph.inputs.placed
        for seq, row in zip(sequences, places, strict=True):
            if row < 0 or seq.cached != flight.starts[row] or seq.tokens[-1] != flight.tokens[row]:
                return []
            pages = placed[row]
            if pages != seq.pages and (pages or [])[: (needed := seq.cached // size + 1)] != seq.pages[:needed]:
                return []
        return places

    def _launch_next(self, flight: _InFlight, places: list[int]) -> _InFlight | None:
        """Launch the round after this one, for sequences that will not have ended; None where that is not possible yet."""
        self._pause = max(self._pause - 1, 0)
        going = [row for row in places if flight.starts[row] + 2 < _end(flight.sequences[row])]
        sequences, starts = [flight.sequences[row] for row in going], [flight.starts[row] + 1 for row in going]
        size, buffer = self._runner.pool.page_size, 1 - flight.buffer
        slots = all(len(seq.pages) * size > at for seq, at in zip(sequences, starts, strict=True))
        if self._pause or not going or len(going) > MAX_OVERLAP_ROWS or not slots:
            return None
        rows = bucket(len(going), GRAPH_ROWS)
        if not self._runner.has_graph(rows, buffer):
            self._runner.round_graph(rows, (), buffer)  # the capture runs it and overwrites this round's choices
            return None
        return self._launch(sequences, starts, [self._first_future - row for row in going], buffer)

    def _launch(
        self, sequences: list[Generation], starts: list[int], tokens: list[int], buffer: int, taps: tuple[int, ...] = ()
    ) -> _InFlight:
        graph = self._runner.round_graph(bucket(len(sequences), GRAPH_ROWS), taps, buffer)
        needs = self._needs_of(sequences)
        if graph.inputs.needs is not needs:
            graph.inputs.needs = needs
            graph.inputs.set_noise(slice(len(sequences)), [noise_key(request) for request in needs.requests])
            self._sampling.begin()  # none of these rows uses the penalty table
        self._fill(graph, sequences, starts, tokens)
        graph.start()
        return _InFlight(graph, buffer, sequences, starts, tokens)

    def _needs_of(self, sequences: list[Generation]) -> SamplingNeeds:
        requests = [seq.request for seq in sequences]
        if requests != self._needs.requests:
            self._needs = SamplingNeeds.of(requests)
        return self._needs

    def _fill(self, graph: Graph, sequences: list[Generation], starts: list[int], fed: list[int]) -> None:
        inputs, rows, pool = graph.inputs, len(starts), self._runner.pool
        size, scratch = pool.page_size, pool.pages - 1
        tokens, numbers, positions, roots, _, slots = inputs.fields
        tokens[:rows] = fed
        numbers[:rows] = inputs.order[:rows]
        positions[:rows] = starts
        roots[:rows] = positions[:rows]
        slots[:rows] = [seq.pages[at // size] * size + at % size for seq, at in zip(sequences, starts, strict=True)]
        for b, seq in enumerate(sequences):
            inputs.place(b, seq.pages, scratch, seq.rotary_start)
        if inputs.filled != rows:
            inputs.filled = rows
            inputs.fields[4] = 0
            inputs.param_rows[:] = -1
            inputs.pad(rows, scratch, size)


def _end(seq: Generation) -> int:
    """The length of the sequence at its token limit."""
    return len(seq.request.prompt_ids) + seq.request.max_tokens
