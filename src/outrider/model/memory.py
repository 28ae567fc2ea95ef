"""How memory is shared between the KV pages of a model on the CPU and the states of its recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

from outrider.cache import KVPool
from outrider.config import EngineConfig
from outrider.errors import InvalidParameter
from outrider.model.placement import Placement
from outrider.model.spec import ModelSpec

__all__ = ["MemoryPlan", "StateSizes", "border_states", "kv_pool", "plan_memory", "plan_states", "sequence_bytes", "token_bytes"]

# States that a running sequence has at most: where its last forward began, on either side of that forward's root, and a new one.
_PER_SEQUENCE, _NODES = 4, 16  # and the inputs of so many draft nodes
_BORDER_SHARE = 4  # of what running sequences leave, one part in so many is for states at the ends of pages


_NEW, _MIN_NODES = 2, 256  # of a GPU's pool: new states while the old ones are held, and nodes


class StateSizes(NamedTuple):
    """How many recurrent states and inputs of draft nodes the pool of a GPU holds."""

    running: int = 0  # states of sequences that run
    borders: int = 0  # states at the ends of pages
    nodes: int = 0

    @property
    def sequences(self) -> int:
        """How many sequences can run."""
        return (self.running - _NEW) // _PER_SEQUENCE

    def bytes(self, spec: ModelSpec) -> int:
        """Bytes of such a pool."""
        kept = sum(recurrent.channels + 2 * recurrent.heads for recurrent in spec.recurrent)  # a replay needs no gate
        return (self.running + self.borders) * spec.state_bytes + self.nodes * 4 * kept


class MemoryPlan(NamedTuple):
    """What fits."""

    pages: int
    states: int = 0  # at the ends of pages
    pool: StateSizes = StateSizes()  # of recurrent states on a GPU
    placement: Placement | None = None  # of weights that a GPU streams from host memory; None: all lie where they are used
    int8: bool = False  # keys and values are integers


def token_bytes(spec: ModelSpec, value_bytes: int = 4) -> int:
    """Bytes of one token's keys and values in all layers that have some."""
    return KVPool.bytes_per_token(len(spec.kv_layers), spec.kv_heads, spec.head_dim, value_bytes)


def sequence_bytes(spec: ModelSpec) -> int:
    """Bytes of recurrent states and of draft nodes' inputs that a running sequence holds; 0 without recurrent layers."""
    return _PER_SEQUENCE * spec.state_bytes + _NODES * 4 * sum(recurrent.width for recurrent in spec.recurrent)


def plan_states(spec: ModelSpec, sizes: EngineConfig, left: int) -> StateSizes:
    """The pool of running sequences on a GPU, for as many of them as half of a number of bytes holds, and one at least.

    It has no states at the ends of pages yet.
    """
    if not spec.recurrent:
        return StateSizes()
    each = StateSizes(_PER_SEQUENCE, 0, _NODES).bytes(spec)
    sequences = max(min(sizes.max_num_seqs, left // 2 // each), 1)
    return StateSizes(_PER_SEQUENCE * sequences + _NEW, 0, max(_NODES * sequences, _MIN_NODES))


def border_states(spec: ModelSpec, sizes: EngineConfig, left: int) -> int:
    """How many states at the ends of pages a number of bytes is to hold beside those pages."""
    assert sizes.max_model_len is not None
    if not spec.recurrent or not sizes.prefix_cache:
        return 0
    wanted = sizes.max_num_seqs * -(-sizes.max_model_len // sizes.page_size)
    return min(wanted, max(left, 0) // _BORDER_SHARE // spec.state_bytes)


def kv_pool(spec: ModelSpec, pages: int, page_size: int, int8: bool = False) -> KVPool:
    """Empty KV memory of a model."""
    return KVPool(len(spec.kv_layers), pages, spec.kv_heads, page_size, spec.head_dim, int8)


def plan_memory(spec: ModelSpec, sizes: EngineConfig, budget: int, value_bytes: int = 4) -> MemoryPlan:
    """Pages for every sequence at full length, or as many as a number of bytes holds beside the recurrent states."""
    assert sizes.max_model_len is not None
    wanted = sizes.max_num_seqs * -(-sizes.max_model_len // sizes.page_size)
    page_bytes = sizes.page_size * token_bytes(spec, value_bytes)
    running = sizes.max_num_seqs * sequence_bytes(spec)
    left = budget - running
    states = border_states(spec, sizes, left)
    pages = min(wanted, (left - states * spec.state_bytes) // page_bytes)
    if pages < 1 and running:
        raise InvalidParameter(
            "kv_bytes",
            f"{budget} bytes hold no page of {page_bytes} bytes beside the recurrent states of {sizes.max_num_seqs} sequences, "
            f"{running} bytes; raise it, or lower max_num_seqs",
        )
    if pages < 1:
        raise InvalidParameter("kv_bytes", f"{budget} bytes hold no page of {page_bytes} bytes; raise it")
    return MemoryPlan(pages, states, int8=value_bytes == 1)
