"""What runs a head beside its target: the target's device where it can, else the CPU, by the native core or by torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.model import Feed, Growth, PendingChains, Runner, lay_out
from outrider.model.load import INT8
from outrider.model.stack import lay_out_rows, layer_stack, logit_epilogue, lossless_kind, norm_weights
from outrider.ops import (
    BESIDE,
    JOINED,
    Core,
    Epilogue,
    GrownTree,
    GrowthParams,
    NormWeights,
    Ops,
    PackedLinear,
    Stack,
    StackSpan,
    paged_attention,
)
from outrider.ops.forwards import network
from outrider.sampling import Row
from outrider.sampling.choice import noise_along, shape_of
from outrider.sampling.noise import token_words

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner
    from outrider.model.cuda_trees import PendingTrees

__all__ = [
    "DraftedChains",
    "EagleNetwork",
    "EagleRunner",
    "MedusaNetwork",
    "MedusaRunner",
    "eagle_network",
    "medusa_network",
]

_NO_WINDOW: frozenset[int | None] = frozenset({None})
_SILU = Epilogue("silu")
_PLACED = StackSpan(rotary_lag=1)  # row i lies in slot i + 1, beside its token


class DraftedChains(NamedTuple):
    """Chains that a head drafted in one call."""

    tokens: npt.NDArray[np.int64]  # (sequences, length); CORRUPTED where the logits leave no choice
    chances: npt.NDArray[np.float64]  # (sequences, length)


class EagleNetwork(Protocol):
    """What the drafter asks of an EAGLE head; the logits are on the host."""

    grows_trees: bool  # whether `grow` is supported
    applies_parameters: bool  # whether `grow` applies filters, and leaves requests with penalties and the like to the drafter
    positions: int  # that a row may have, at most

    @property
    def drafts_chains(self) -> int:
        """The longest chain that `draft` can draw; 0 where it is not supported."""

    def draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> DraftedChains: ...

    def launches_chains(self, count: int) -> bool:
        """Whether `launch_chains` takes so many."""

    def launch_chains(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> PendingChains: ...

    def grow(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], rooms: Sequence[int],
        draft_temperatures: Sequence[float], growth: Growth,
    ) -> tuple[list[GrownTree], Tensor | None]: ...  # fmt: skip

    def launches_trees(self, rows: int, count: int, growth: Growth) -> bool:
        """Whether `launch_trees` takes so many trees, for a forward of the target of so many rows."""

    def launch_trees(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], places: Sequence[tuple[int, int]],
        growth: Growth,
    ) -> PendingTrees: ...  # fmt: skip

    def fuse(self, taps: Tensor) -> Tensor: ...

    def forward(self, feeds: Sequence[Feed], features: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class MedusaNetwork(Protocol):
    """What the drafter asks of Medusa heads."""

    def logits(self, taps: Tensor) -> Tensor: ...


def eagle_network(head: EagleHead, pool: KVPool, target: Runner, max_length: int = 0) -> EagleNetwork:
    """The runner of an EAGLE head or an MTP module, for requests of at most that length where the device allows."""
    if target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaEagleRunner

        return CudaEagleRunner(head, cast("CudaRunner", target))
    head.stretch(max_length)
    shared = None if target.stack is None or head.config.own_embedding else target.stack.embedding
    return EagleRunner(head, pool, target.ops, shared)


def medusa_network(heads: MedusaHeads, target: Runner) -> MedusaNetwork:
    """The runner of Medusa heads."""
    if target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaMedusaRunner

        return CudaMedusaRunner(heads, cast("CudaRunner", target))
    return MedusaRunner(heads, target.ops)


class EagleRunner:
    """An EAGLE head over its layer of KV."""

    drafts_chains = 0
    grows_trees = False
    applies_parameters = True

    def __init__(self, head: EagleHead, pool: KVPool, ops: Ops, embedding: PackedLinear | None = None) -> None:
        """With the target's `embedding` as the core has it, the head's is not packed again."""
        self.head = head
        self.positions = len(head.rope.cos)
        self._pool = pool
        self._ops = ops
        self._stack = None
        if ops.core is not None:
            kind = _kind(head)
            self._fc = PackedLinear(ops.core, kind, head.fc, head.fc_bias)
            then = Epilogue() if head.config.own_output else logit_epilogue(head.target)
            self._output = PackedLinear(ops.core, kind, head.output, then=then)
            self._output_norm = NormWeights() if head.config.norm_output else _last_norm(head)
            table = embedding or PackedLinear(ops.core, lossless_kind(head.embedding), head.embedding)
            self._stack = _eagle_stack(head, pool, ops.core, self._fc, self._output, table)
            self._draft_ids = None if head.vocab_ids is None else head.vocab_ids.int().contiguous()
            words = token_words(head.config.shape.vocab)
            self._words = words if head.vocab_ids is None else words[head.vocab_ids.numpy()]
            self.grows_trees = True

    @network
    def fuse(self, taps: Tensor) -> Tensor:
        """Features (N, hidden) of the target's taps (N, taps * target_hidden)."""
        taps = taps.cpu()
        if self._stack is None or not self.head.config.wide:
            return self.head.fuse(taps, self._ops)
        return self._fc(self.head.normed_taps(taps, self._ops))

    @network
    def forward(self, feeds: Sequence[Feed], features: Tensor) -> Tensor:
        """Hidden rows of (feature, next token) pairs, with their KV written."""
        if self._stack is not None:
            outputs = self._stack.forward(lay_out_rows(feeds), span=_PLACED, features=features)
            rows = outputs.last if self.head.config.norm_output else outputs.stream
            assert rows is not None
            return rows
        flat = lay_out(feeds, self._pool, _NO_WINDOW)

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._pool.write(0, flat.slots, k, v)
            return paged_attention(q, *self._pool.layer(0), flat.plan)

        return self.head(flat.tokens, features, (flat.positions - 1).clamp_min(0), attend, self._ops)  # type: ignore[no-any-return]

    def draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> DraftedChains:
        raise NotImplementedError("drafts_chains is 0")

    def launches_chains(self, count: int) -> bool:  # noqa: ARG002
        return False  # what a processor drafts is known at once

    def launch_chains(self, *_: Any, **__: Any) -> PendingChains:
        raise NotImplementedError("launches_chains is False")

    def launches_trees(self, rows: int, count: int, growth: Growth) -> bool:  # noqa: ARG002
        return False  # what a processor grows is known at once

    def launch_trees(self, *_: Any, **__: Any) -> PendingTrees:
        raise NotImplementedError("launches_trees is False")

    def grow(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], rooms: Sequence[int],
        draft_temperatures: Sequence[float], growth: Growth,
    ) -> tuple[list[GrownTree], Tensor | None]:  # fmt: skip
        """Run the feeds and grow a tree after each in one call, by temperature, filters and noise alone.

        Returns the trees and the logits (places, outputs) behind them, or no trees where logits leave no choice.
        """
        return self._grow(feeds, self.fuse(torch.cat([*taps])), rows, rooms, draft_temperatures, growth)

    @network
    def _grow(
        self, feeds: Sequence[Feed], features: Tensor, rows: Sequence[Row], rooms: Sequence[int],
        draft_temperatures: Sequence[float], growth: Growth,
    ) -> tuple[list[GrownTree], Tensor]:  # fmt: skip
        assert self._stack is not None
        levels, beam, branch, floor, _ = growth
        params = GrowthParams(
            levels, beam, branch,
            rooms=array("i", rooms),
            shapes=array("d", [part for row in rows for part in shape_of(row.params)]),
            draft_temperatures=array("f", draft_temperatures),
            keys=noise_along(rows, levels),
            words=self._words.ctypes.data,
            ids=self._draft_ids,
            feeds_back_normed=self.head.config.norm_output,
            floor=floor,
        )  # fmt: skip
        return self._stack.grow(lay_out_rows(feeds), params, features, _PLACED)

    @network
    def logits(self, hidden: Tensor) -> Tensor:
        """(N, outputs) float32."""
        if self._stack is None:
            return self.head.logits(hidden, self._ops)
        return self._output(hidden, self._output_norm)


class MedusaRunner:
    """Medusa heads. By the core, all heads read the last row at once and share one pass over the output matrix."""

    def __init__(self, heads: MedusaHeads, ops: Ops) -> None:
        self._heads = heads
        self._ops = ops
        self._blocks: list[PackedLinear] = []
        if (core := ops.core) is not None:
            c, kind = heads.config, _name(heads.weights[0])
            firsts = range(0, c.heads * c.blocks, c.blocks)
            weight, bias = (torch.cat([part[i] for i in firsts]) for part in (heads.weights, heads.biases))
            self._blocks = [PackedLinear(core, kind, weight, bias, _SILU)]
            self._blocks += [PackedLinear(core, kind, w, b, _SILU) for w, b in zip(heads.weights, heads.biases, strict=True)]
            outputs, then = (heads.output, Epilogue()) if c.own_output else ([heads.output], logit_epilogue(heads.target))
            self._outputs = [PackedLinear(core, kind, output, then=then) for output in outputs]

    @network
    def logits(self, taps: Tensor) -> Tensor:
        """(heads, N, V) float32 from the stream leaving the target's last layer."""
        if not self._blocks:
            return self._heads(self._heads.fuse(taps, self._ops), self._ops)  # type: ignore[no-any-return]
        c, rows = self._heads.config, len(taps)
        last = self._heads.fuse(taps, self._ops)
        opened = self._blocks[0](last).view(rows, c.heads, c.hidden).transpose(0, 1)
        x = last + opened  # (heads, N, hidden)
        for head in range(c.heads):
            for block in range(1, c.blocks):
                x[head] += self._blocks[1 + head * c.blocks + block](x[head])
        if c.own_output:
            return torch.stack([output(rows_of_head) for output, rows_of_head in zip(self._outputs, x, strict=True)])
        return self._outputs[0](x.reshape(-1, c.hidden)).view(c.heads, rows, c.vocab)


def _eagle_stack(
    head: EagleHead, pool: KVPool, core: Core, joined: PackedLinear, output: PackedLinear, embedding: PackedLinear
) -> Stack:
    c = head.config
    norm = c.shape.norm if c.joins_normed else head.layer.spec.norm_in
    return layer_stack(
        pool, core, c.shape, _kind(head), [head.layer], [head.rope],
        embedding=embedding,
        embedding_scale=1.0 if c.own_embedding else float(head.target.embedding_scale),
        norm=_last_norm(head),
        form=BESIDE if c.wide else JOINED,
        joined=joined,
        output=output,
        norm_hidden=norm_weights(norm, head.norm_feature if c.joins_normed else head.layer.norm_hidden),
        norm_embedding=norm_weights(norm, head.norm_embedding),
        residual_normed=c.norm_before_residual,
    )  # fmt: skip


def _last_norm(head: EagleHead) -> NormWeights:
    return norm_weights(head.config.shape.norm, head.norm)


def _kind(head: EagleHead) -> str:
    """The kind of the head's products: int8 where it was loaded so, else the dtype of its weights."""
    return INT8 if head.config.shape.dtype == INT8 else _name(head.fc)


def _name(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")
