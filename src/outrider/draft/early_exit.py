"""Early exit: the target's own first layers draft, and verification goes on from where they stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from outrider import checks
from outrider.core import Batch, Drafts, FutureTokens, Needs, PendingDrafts, Plan, Scores, Sequence, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftTemperature
from outrider.draft.growth import Growing, TreeShape, chain_of, drafts_for, grow
from outrider.draft.options import option
from outrider.errors import InvalidParameter
from outrider.heads import ExitAdapter, load_exit
from outrider.model import Feed, Runner, locate
from outrider.ops import BLOCK, one_torch_thread
from outrider.sampling import Row, choose

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["EarlyExit", "EarlyExitOptions", "LayerCosts", "best_length", "measure_costs"]

_FOLDER = "early_exit"  # beside a target's weights
_POSITIONS = 96  # at which every exit is tried before one is chosen
_LONGEST = 16  # chain that is drafted in one call
_EXITS = 6  # how many are tried, at most


class LayerCosts(NamedTuple):
    """Seconds for one block of rows."""

    layer: float
    head: float  # the output matrix


@dataclass(frozen=True, slots=True)
class EarlyExitOptions:
    """Which of the target's layers draft."""

    exit_layer: int | None = option(None, "layers that draft; chosen by agreement and cost where it is not set", 1)
    tail: int = option(0, "last layers that run after them", 0)


class EarlyExit:
    """Drafts with the target's first layers.

    What it does: the hidden rows after the first E layers go through the final norm and the output
        matrix as if they were the last, and the result is drafted. The KV of those layers lies in
        the target's own slots, so verification runs the other layers alone. With `tail` the draft
        skips the inner layers and runs the last few after the first E. Without `exit_layer`, exits
        are tried on the first positions read, and the one that pays most by measured agreement
        and cost is taken; where none pays, nothing is drafted.
    When it helps: where no head can be had, and best with models trained for it; a model that was
        not says little of its choice before its last layers.
    Cost: E layers and the output matrix per drafted token, of which verification saves the E layers.
    With an exit adapter (`outrider train early-exit`), in the target's folder `early_exit/` or named as `model`, the rows go
        through a small trained MLP first, at the exit that it was trained for.
    Needs: nothing beside the target; no memory of its own. A sequence's LoRA adapter drafts with it.
    Reference: Elhoushi et al. 2404.16710 (LayerSkip); Zhang et al. 2309.08168 (skipped layers).
    """

    Options = EarlyExitOptions

    def __init__(
        self,
        target: Runner,
        options: EarlyExitOptions = EarlyExitOptions(),
        costs: LayerCosts | None = None,
        adapter: ExitAdapter | None = None,
        adapt: Callable[[Tensor], Tensor] | None = None,  # the adapter on the target's device, where that is another
    ) -> None:
        self._runner = target
        self._layers = target.decoder.spec.depth
        if options.exit_layer is not None:
            checks.integer("exit_layer", options.exit_layer, 1, self._layers - 1)
        self._tail = checks.integer("tail", options.tail, 0, self._layers - (options.exit_layer or 1))
        self._adapter, self._adapt = adapter, adapt
        self.exit_layer = adapter.config.layer if adapter else options.exit_layer  # None: being compared, or none pays
        # of the chosen exit with the target, where exits were compared
        self._agreement: float | None = (adapter.config.agreement or None) if adapter else None
        self._agreed: dict[int, int] = {}  # while exits are compared: at how many positions each chose what the target chose
        self._compared = 0  # positions
        self.needs = Needs()
        if self.exit_layer is None:
            self._agreed = dict.fromkeys(_exits(self._layers - max(self._tail, 1)), 0)
            self.needs = Needs(taps=(*self._agreed, self._layers))
        self._costs = costs or (LayerCosts(1.0, 1.0) if self.exit_layer and not self._agreement else measure_costs(target))
        self._draft_temperature = DraftTemperature()

    @classmethod
    def build(cls, context: DraftContext) -> EarlyExit:
        options, able = context.options(EarlyExitOptions), context.target.partial_runs
        if able == "none" or (context.target.device_name != "cpu" and not context.target.drafts_early):
            raise InvalidParameter("method", "early_exit runs some of the target's layers alone, which this model cannot")
        if able == "first" and options.tail:
            raise InvalidParameter("tail", "this model runs its first layers alone, but not its last ones; leave tail at 0")
        adapter, adapt = _adapter(context, options), None
        if adapter is not None and context.target.drafts_early:
            from outrider.heads.cuda_network import adapter_on_device

            adapt = adapter_on_device(adapter, cast("CudaRunner", context.target))
        return cls(context.target, options, adapter=adapter, adapt=adapt)

    def begin(self, seq: Sequence) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._draft_temperature.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Compare exits on the rows read, as long as one is to be chosen; then compare both distributions."""
        if self._agreed and scores.taps is not None:
            self._compare(batch, scores.taps, scores.first_rows)
        self._draft_temperature.commit(batch, verdicts, scores)

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        exit_layer = self.exit_layer
        if exit_layer is None:
            return Drafts.empty(len(batch.sequences))
        if self._runner.drafts_early:
            return self._in_one_call(batch, plan, exit_layer)
        growing = [
            Growing(seq, self._length(exit_layer, n), seq.pages, len(seq.tokens), seq.rotary_start, seq.adapter)
            for seq, n in zip(batch.sequences, plan.lengths, strict=True)
        ]
        hidden: dict[Sequence, list[Tensor]] = {seq: [] for seq in batch.sequences}

        def step(active: Seq[Growing], feeds: list[Feed]) -> Tensor:
            rows = self._runner.prepare(feeds)
            early = self._runner.run(rows, (exit_layer,), range(exit_layer))
            for draft, x in zip(active, early.taps[0], strict=False):  # one row each: drafts are chains
                hidden[draft.seq].append(x)
            if self._adapter is not None:
                return self._guess(self._adapter(early.taps[0][: len(active)], self._runner.ops))
            last = early.last
            if self._tail:
                last = self._runner.run(rows, (), range(self._layers - self._tail, self._layers), early.taps[0]).last
            return self._runner.logits(last, range(len(active)))

        def start(active: Seq[Growing]) -> Tensor:
            return step(active, [_root(draft) for draft in active])

        def extend(active: Seq[Growing]) -> Tensor:
            return step(active, [draft.feed() for draft in active])

        drafts = drafts_for(batch, grow(growing, TreeShape(), start, extend, self._draft_temperature))
        rows = [x for seq in batch.sequences for x in hidden[seq]]
        if rows:
            drafts.resume = self._runner.resume(exit_layer, torch.stack(rows), [len(hidden[seq]) for seq in batch.sequences])
        return drafts

    def _in_one_call(self, batch: Batch, plan: Plan, exit_layer: int) -> Drafts | PendingDrafts:
        """The same chains by one call, after which the target runs all its layers again."""
        lengths = [min(self._length(exit_layer, n), _LONGEST) for n in plan.lengths]
        active = [(seq, length) for seq, length in zip(batch.sequences, lengths, strict=True) if length]
        if not active:
            return Drafts.empty(len(batch.sequences))
        feeds = [Feed(seq.pages, len(seq.tokens) - 1, seq.tokens[-1:], rotary_start=seq.rotary_start) for seq, _ in active]
        layers = (*range(exit_layer), *range(self._layers - self._tail, self._layers))
        rows = [Row.at(seq) for seq, _ in active]
        future, resolve, is_intact = self._runner.draft_early(feeds, rows, max(lengths), layers, self._adapt)

        def resolved() -> Drafts:
            drawn = zip(active, *resolve(), strict=True)
            trees = {seq: chain_of(tokens[:length], chances[:length]) for (seq, length), tokens, chances in drawn}
            return drafts_for(batch, trees)

        if not plan.verify_all:
            return resolved()
        future_of = {seq: replace(tokens, count=length) for (seq, length), tokens in zip(active, future, strict=True)}
        return PendingDrafts.chains([future_of.get(seq, FutureTokens(0, 0)) for seq in batch.sequences], resolved, is_intact)

    def _length(self, exit_layer: int, planned: int) -> int:
        """All that is planned, or as much of it as pays."""
        if self._agreement is None:
            return planned
        return best_length(self._costs, (exit_layer, self._tail, self._layers), self._agreement, planned).length

    def _compare(self, batch: Batch, taps: Tensor, first_rows: Seq[int]) -> None:
        """Let every exit guess at some of the rows just read, with the requests' noise; choose one when enough were seen."""
        rows: list[Row] = []
        places: list[int] = []
        for seq, fed, first in zip(batch.sequences, batch.feeds, first_rows, strict=True):
            for i in range(min(fed, BLOCK)):  # the last ones it read
                places.append(first + fed - 1 - i)
                rows.append(Row.at(seq)._replace(position=len(seq.tokens) - 1 - i, allowed=None))
        *by_exit, last = taps[places].chunk(len(self._agreed) + 1, -1)
        choices = choose(self._guess(last), rows)
        for exit_layer, x in zip(self._agreed, by_exit, strict=True):
            guessed = choose(self._guess(x), rows)
            self._agreed[exit_layer] += sum(a == b for a, b in zip(guessed, choices, strict=True))
        self._compared += len(rows)
        if self._compared >= _POSITIONS:
            self._choose()

    def _guess(self, x: Tensor) -> Tensor:
        """Logits of rows that leave a layer, as if it were the last."""
        return self._runner.logits_leaving(x)

    def _choose(self) -> None:
        """Take the exit of the highest expected speed, or none."""
        rates = {exit_layer: agreed / self._compared for exit_layer, agreed in self._agreed.items()}
        best = {e: best_length(self._costs, (e, self._tail, self._layers), rate, 16) for e, rate in rates.items()}
        exit_layer = max(best, key=lambda e: best[e].speed)
        if best[exit_layer].length:
            self.exit_layer, self._agreement = exit_layer, rates[exit_layer]
        self._agreed, self.needs = {}, Needs()


def _adapter(context: DraftContext, options: EarlyExitOptions) -> ExitAdapter | None:
    """The exit adapter that the settings name, or the one beside the target's weights, unless another exit is asked for."""
    if context.config.model is None and (options.exit_layer is not None or options.tail):
        return None
    directory = context.directory / _FOLDER if context.config.model is None else locate(context.config.model)
    if context.config.model is None and not (directory / "config.json").exists():
        return None
    adapter = load_exit(directory, context.target.decoder, context.weight_options(directory))
    if options.exit_layer not in (None, adapter.config.layer) or options.tail:
        raise InvalidParameter("exit_layer", f"the adapter in {directory} leaves layer {adapter.config.layer}, without a tail")
    return adapter


class _Best(NamedTuple):
    length: int
    speed: float  # tokens per second


def best_length(costs: LayerCosts, shape: tuple[int, int, int], agreement: float, limit: int) -> _Best:
    """How far to draft with (exit, tail, layers) where each guess is right with this chance.

    Verification runs the layers from the exit on for all rows and those before it for the last node.
    """
    exit_layer, tail, layers = shape
    best = _Best(0, 1 / (layers * costs.layer + costs.head))
    tokens, alive = 1.0, 1.0
    for length in range(1, limit + 1):
        alive *= agreement
        tokens += alive
        drafting = length * ((exit_layer + tail) * costs.layer + costs.head)
        speed = tokens / (drafting + layers * costs.layer + costs.head)
        best = max(best, _Best(length, speed), key=lambda option: option.speed)
    return best


def measure_costs(runner: Runner, repeats: int = 3) -> LayerCosts:
    """Time one block through the layers and through the output matrix, on the page that padding writes to."""
    if runner.read_bytes is not None:
        return LayerCosts(*runner.read_bytes)
    rows = runner.prepare([Feed([runner.pool.pages - 1], 0, [0])])
    layers, head = [], []
    with one_torch_thread(runner.ops):
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            last = runner.run(rows).last
            done = time.perf_counter()
            runner.logits(last, [0])
            layers.append(done - begun)
            head.append(time.perf_counter() - done)
    return LayerCosts(median(layers[1:]) / runner.decoder.spec.depth, median(head[1:]))


def _root(draft: Growing) -> Feed:
    """The row of the newest token."""
    return Feed(draft.pages, draft.size - 1, draft.seq.tokens[-1:], rotary_start=draft.rotary_start, adapter=draft.adapter)


def _exits(before: int) -> tuple[int, ...]:
    """Exits to try, spread over the layers up to the last that leaves something out."""
    return tuple(sorted({max(1, before * (i + 1) // _EXITS) for i in range(_EXITS)}))
