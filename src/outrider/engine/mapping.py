"""How a processor's memory is shared out where a model does not fit: which layers stay there and which are read from a file."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import EngineConfig
from outrider.errors import InvalidParameter
from outrider.model import ModelSpec
from outrider.model.mapped_stack import AHEAD
from outrider.model.memory import MemoryPlan, plan_memory, token_bytes

__all__ = ["PROCESS_BYTES", "plan_mapped"]

PROCESS_BYTES = 400 * 2**20  # of the machine's memory, for the process itself
_KV_SHARE = 8  # of the memory, one part in so many is for KV, unless one sequence needs more


def plan_mapped(config: ModelSpec, sizes: EngineConfig, room: int, weights: int, value_bytes: int) -> MemoryPlan:
    """KV, and the bytes of layers that stay in so much memory; refused with the smallest that works."""
    assert sizes.max_model_len is not None
    layers = sum(layer.parameters(config.hidden) for layer in config.layers)
    of_layers = weights * layers // config.parameters
    outside, largest = weights - of_layers, max(layer.parameters(config.hidden) for layer in config.layers) * of_layers // layers
    one = -(-sizes.max_model_len // sizes.page_size) * sizes.page_size * token_bytes(config, value_bytes)
    kv = sizes.kv_bytes or max(one, room // _KV_SHARE)
    least = outside + kv + (AHEAD + 1) * largest
    if room < least:
        raise InvalidParameter(
            "memory",
            f"{room / 2**30:.2f} GiB do not hold a model of {weights / 2**30:.2f} GiB, not even with its layers in a file: "
            f"{outside / 2**30:.2f} GiB for embeddings and output, {kv / 2**30:.2f} GiB for KV and {AHEAD + 1} layers of "
            f"{largest / 2**30:.2f} GiB are the least, {least} bytes; raise it, or lower max_model_len",
        )
    plan = plan_memory(config, replace(sizes, kv_bytes=kv), kv, value_bytes)
    return plan._replace(kept=room - outside - kv - AHEAD * largest)
