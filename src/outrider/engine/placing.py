"""How a GPU's memory is shared out where the weights do not fit: what stays there, what is streamed, and the KV beside it.

Everything here is arithmetic on sizes, made before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import MAX_DRAFT_TOKENS, EngineConfig
from outrider.errors import InvalidParameter
from outrider.model.placement import LOGIT_ROWS, MAX_PASS_ROWS, ModelSizes, Placement, place, sizes_of, smallest_room
from outrider.model.spec import ModelSpec
from outrider.ops.cuda.segments import scratch_slots

__all__ = ["DevicePlan", "Machine", "plan_streaming"]

_GIB = 2**30
_BASE = 640 * 2**20  # the driver's context, libraries, graphs and the allocator's rounding
_HOST_BASE = 2 * _GIB  # host memory for the process itself
_KV_SHARE = 4  # of what the smallest placement leaves, one part in so many is for KV, unless one sequence needs more
_KV_BYTES = 2  # of a value
_TARGET_LOGITS = (
    4 * LOGIT_ROWS
)  # rows of logits: those of both buffers of captured rounds, of a part of a large round, and its choice
_DRAFT_ROWS = 256
_DRAFT_LOGITS = 128 + 3 * 64  # of the largest step of a tree, and of captured rounds


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that may be taken."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Pages of KV, and where the target's weights lie; None where all stay on the device."""

    pages: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes on the device beside the target's weights."""

    others: int  # weights of drafters
    buffers: int  # activations, logits, scratch
    page: int  # a page of everybody's KV
    least: int  # pages of one sequence at full length
    wanted: int  # pages of all

    @property
    def fixed(self) -> int:
        return self.others + self.buffers


def plan_streaming(sizes: EngineConfig, target: ModelSpec, others: Sequence[ModelSpec], machine: Machine) -> DevicePlan:
    """A placement within the limits, or InvalidParameter with the smallest limits that work."""
    model, needs = sizes_of(target), _needs(sizes, target, others)
    smallest = needs.fixed + smallest_room(model) + needs.least * needs.page
    if sizes.kv_bytes is not None and sizes.kv_bytes < needs.least * needs.page:
        raise InvalidParameter("kv_memory", _too_little_kv(sizes, needs))
    if machine.device < smallest:
        raise InvalidParameter("memory", _too_small(sizes, needs, model, machine.device))
    plan = _plan(sizes, needs, model, machine.device)
    if _host_bytes(plan) > machine.host:
        raise InvalidParameter("memory", _too_little_host(sizes, needs, model, machine))
    return plan


def _plan(sizes: EngineConfig, needs: _Needs, model: ModelSizes, limit: int) -> DevicePlan:
    """KV and placement within a limit that is large enough."""
    pages = _pages(sizes, needs, limit - needs.fixed - smallest_room(model) - needs.least * needs.page)
    placement = place(model, limit - needs.fixed - pages * needs.page)
    assert placement is not None
    return DevicePlan(pages, placement)


def _host_bytes(plan: DevicePlan) -> int:
    return _HOST_BASE + (0 if plan.placement is None else plan.placement.host)


def _needs(sizes: EngineConfig, target: ModelSpec, others: Sequence[ModelSpec]) -> _Needs:
    assert sizes.max_model_len is not None
    weights = sum(own.total - own.embedding for own in map(sizes_of, others))
    rows = min(MAX_PASS_ROWS, max(sizes.max_batch_rows, sizes.max_num_seqs * (1 + MAX_DRAFT_TOKENS)))
    buffers = _BASE + _buffers(target, rows, _TARGET_LOGITS, sizes.max_model_len)
    buffers += sum(_buffers(model, _DRAFT_ROWS, _DRAFT_LOGITS, sizes.max_model_len) for model in others)
    page = sum(2 * _KV_BYTES * model.depth * model.kv_heads * model.head_dim * sizes.page_size for model in (target, *others))
    least = -(-sizes.max_model_len // sizes.page_size)
    return _Needs(weights, buffers, page, least, sizes.max_num_seqs * least)


def _buffers(model: ModelSpec, rows: int, logit_rows: int, max_model_len: int) -> int:
    """Bytes that a forward of so many rows takes: activations, the scratch of attention, and logits."""
    a = model.attention
    row = 16 * model.hidden + 2 * model.ffn + 8 * a.q_width
    return rows * row + 4 * scratch_slots(rows, max_model_len) * model.heads * (model.head_dim + 2) + 4 * logit_rows * model.vocab


def _pages(sizes: EngineConfig, needs: _Needs, spare: int) -> int:
    """Pages of KV: as many as were asked for, else a part of what the smallest placement leaves."""
    room = needs.least + spare // needs.page
    if sizes.kv_bytes is not None:
        return min(needs.wanted, sizes.kv_bytes // needs.page, room)
    return min(needs.wanted, max(needs.least, room // _KV_SHARE))


def _too_small(sizes: EngineConfig, needs: _Needs, model: ModelSizes, limit: int) -> str:
    kv = needs.least * needs.page
    bare = needs.fixed + smallest_room(model)
    text = f"{_gib(limit)} of the GPU are too few: the smallest limit that works is {_gib(bare + kv)}, of which "
    text += (
        f"{_gib(smallest_room(model))} are for the output matrix and the buffers of streamed layers, {_gib(kv)} for the KV of "
    )
    text += f"one sequence of {sizes.max_model_len} tokens, {_gib(needs.buffers)} for activations, logits and the driver"
    text += f", {_gib(needs.others)} for drafters" if needs.others else ""
    tokens = max(limit - bare, 0) // needs.page * sizes.page_size
    if tokens >= sizes.page_size:
        return f"{text}; raise memory, or lower max_model_len to {tokens}"
    return f"{text}; raise memory, or take a smaller model"


def _too_little_kv(sizes: EngineConfig, needs: _Needs) -> str:
    least = needs.least * needs.page
    return (
        f"one sequence of {sizes.max_model_len} tokens takes {_gib(least)} of KV; pass at least {least}, or lower max_model_len"
    )


def _too_little_host(sizes: EngineConfig, needs: _Needs, model: ModelSizes, machine: Machine) -> str:
    """What the host lacks, and the smallest limit of the device with which it has enough."""
    wanted = _host_bytes(_plan(sizes, needs, model, machine.device)) - _HOST_BASE
    text = f"{_gib(wanted)} of weights would lie in pinned host memory, and this process may take {_gib(machine.host)}, "
    text += f"{_gib(_HOST_BASE)} of it for itself"
    low, high = machine.device, needs.fixed + model.total + needs.wanted * needs.page
    while high - low > _GIB // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if _host_bytes(_plan(sizes, needs, model, middle)) <= machine.host else (middle, high)
    return f"{text}; raise memory to {_gib(high)}, or give the process more host memory"


def _gib(size: int) -> str:
    """A size rounded up, so that what a message asks for is enough."""
    return f"{-(-size * 100 // _GIB) / 100:.2f} GiB"
