"""The attention of a Transformers model over paged KV, by way of its AttentionInterface.

A view is run once with `PROBE`, which records what every layer asks for: its shapes, its mask and its extra terms. What is
recorded becomes a `Form`; then `NAME` serves each layer from the pages of a `Pages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache import KVPool
from outrider.model.hf.view import use_interfaces
from outrider.model.runner import Rows
from outrider.ops import paged_attention

__all__ = ["NAME", "PROBE", "Form", "Pages", "Probe", "Unfit", "interfaces", "register"]

NAME, PROBE = "outrider", "outrider_probe"
_HARMLESS = ("position_ids", "cache_position", "output_attentions", "use_cache", "output_router_logits", "num_items_in_batch")
_LONG = 5000  # a position at which a mask without a length of its own is tried


class Unfit(Exception):
    """The class of a model asks for something that paged attention does not serve."""


class Form(NamedTuple):
    """What the attention of one layer is."""

    kv_heads: int
    width: int  # of a head in KV memory: keys or values, whichever are wider
    window: int | None = None
    soft_cap: float | None = None


class Mask(NamedTuple):
    """Stands for a mask while a model is probed: which keys a query sees."""

    sees: Callable[..., Any]
    length: int | None  # of a window or a chunk

    def window(self) -> int | None:
        """The sliding window it describes, None for all earlier keys. Anything else is unfit."""
        size = self.length or _LONG
        keys = torch.arange(3 * size + 2)
        for position in (0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1):
            try:
                seen = torch.as_tensor(self.sees(0, 0, torch.tensor(position), keys))
            except Exception as error:
                raise Unfit("its masks depend on more than positions") from error
            wanted = keys <= position
            if self.length is not None:
                wanted &= keys > position - self.length
            if not torch.equal(seen.expand_as(keys), wanted):
                raise Unfit("a layer's mask is neither causal nor a sliding window")
        return self.length


@dataclass(slots=True)
class Probe:
    """Records what each layer asks of attention, and answers with zeros."""

    forms: dict[int, Form] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> Tensor:
        if layer in self.forms:
            raise Unfit("a layer attends twice")
        mask, cap = extra.pop("mask", None), extra.pop("softcap", None)
        window = mask.window() if isinstance(mask, Mask) else extra.get("sliding_window")
        extra.pop("sliding_window", None)
        if mask is not None and not isinstance(mask, Mask):
            raise Unfit("it builds its masks itself")
        if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
            raise Unfit("its attention reads other rows than the batch's")
        extra.pop("s_aux", None), extra.pop("scaling", None), extra.pop("dropout", None)
        if extra.pop("is_causal", None) is False:
            raise Unfit("a layer's attention is not causal")
        odd = [name for name, value in extra.items() if isinstance(value, Tensor | tuple | list) and name not in _HARMLESS]
        if odd:
            raise Unfit(f"its attention takes {', '.join(odd)}")
        self.forms[layer] = Form(k.shape[1], max(k.shape[3], v.shape[3]), window, cap)
        return torch.zeros(1, q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device)


class Pages:
    """KV of all layers, each in the shape that it has, and the attention of the rows that are being run.

    It stands where a KVPool stands: one page id for all layers.
    """

    def __init__(self, forms: Sequence[Form], pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.forms = tuple(forms)
        self._layers = [KVPool(1, pages, form.kv_heads, page_size, form.width) for form in forms]
        self._rows: Rows | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return sum(layer.token_bytes for layer in self._layers)

    def slots(self, pages: Sequence[int], positions: Sequence[int]) -> list[int]:
        return self._layers[0].slots(pages, positions)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for layer in self._layers:
            layer.move(source, target)

    def clear(self, pages: Sequence[int]) -> None:
        for layer in self._layers:
            layer.clear(pages)

    @contextmanager
    def running(self, rows: Rows) -> Iterator[None]:
        """Attention inside the block is of these rows."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> Tensor:
        """Write the rows' keys and values, and attend: (1, heads, N, d) queries to (1, N, heads, d)."""
        rows, form, pool = self._rows, self.forms[layer], self._layers[layer]
        assert rows is not None
        queries, keys, values = (part[0].transpose(0, 1).float() for part in (q, k, v))
        dtype, value_width, query_width, width = q.dtype, v.shape[3], q.shape[3], form.width
        scaling = extra.get("scaling")
        factor = 1.0 if scaling is None else scaling * math.sqrt(width)
        if scaling is None:
            factor = math.sqrt(width / query_width)
        if factor != 1.0:
            queries = queries * factor
        if query_width < width:
            queries, keys = F.pad(queries, (0, width - query_width)), F.pad(keys, (0, width - query_width))
        if value_width < width:
            values = F.pad(values, (0, width - value_width))
        pool.write(0, rows.slots, keys, values)
        sinks = extra.get("s_aux")
        mixed = paged_attention(
            queries, *pool.layer(0), rows.plan, form.window, form.soft_cap, None if sinks is None else sinks.float()
        )
        return mixed[..., :value_width].to(dtype)[None]


def register() -> None:
    """Make both names known to Transformers. Models that do not ask for them are not concerned."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


@contextmanager
def interfaces(view: Any, attention: str, experts: str | None, kv: Probe | Pages) -> Iterator[None]:
    """Let a view's layers attend through `kv`, for the duration of the block."""
    before = use_interfaces(view, attention, experts)
    attach(view, kv)
    try:
        yield
    finally:
        for config, attn, moe in before:
            config._attn_implementation_internal, config._experts_implementation_internal = attn, moe


def attach(view: Any, kv: Probe | Pages) -> None:
    """Tell a view's attention modules where their KV is."""
    for module in view.modules():
        if hasattr(module, "layer_idx"):
            module.outrider_kv = kv


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **extra: Any) -> Any:
    kv = getattr(module, "outrider_kv", None)
    if kv is None:
        raise Unfit("an attention module does not say which layer it belongs to")
    if attention_mask is not None:
        extra["mask"] = attention_mask
    return kv.attend(module.layer_idx, query, key, value, extra), None


def _mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> Mask:
    return Mask(mask_function, local_size)
