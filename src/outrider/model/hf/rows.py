"""Products, activations and rotary tables of a view, by the rules that give a row the same bits beside any neighbours.

Modules of known kinds get a `forward` of their own; a router, and where that is not enough the whole model, runs inside
`FixedRows`, which replaces the functions of torch that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.model.hf.attention import NAME
from outrider.ops import Blocked
from outrider.ops.products import Product

__all__ = ["FixedRows", "fix_rows", "register_experts"]

_ROTARY_BLOCK = 512  # positions of a rotary table that are computed at once
_CHANGING_ROPES = ("dynamic", "longrope")  # whose tables depend on the longest text of the batch
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh", "GELUActivation": "gelu", "GELU": "gelu",
}  # fmt: skip
_MANY = 256  # matrices of a batched product that are not multiplied one by one


def fix_rows(view: Any, ops: Blocked, pack: bool) -> str | None:
    """Make the modules of a view independent of the row count. Returns why rows depend on each other all the same, if known."""
    from transformers.pytorch_utils import Conv1D

    for module in view.modules():
        kind, weight = type(module), getattr(module, "weight", None)
        if kind is nn.Linear:
            module.forward = partial(_multiply, Product(module.weight, module.bias, pack))
        elif kind is Conv1D:
            module.forward = partial(_multiply, Product(module.weight.T, module.bias, pack))
        elif kind.__name__ in _ACTIVATIONS and getattr(module, "approximate", "none") == "none":
            module.forward = partial(_activate, ops, _ACTIVATIONS[kind.__name__])
        elif kind.__name__.endswith("RotaryEmbedding") and hasattr(module, "inv_freq"):
            if getattr(module, "rope_type", "default") in _CHANGING_ROPES:
                return "its rotary table depends on the longest text of a batch"
            module.forward = _RotaryTable(module.forward)
        elif kind.__name__.endswith(("Router", "Gate")) and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            module.forward = partial(_inside, FixedRows(ops), module.forward)
    return None


def _multiply(product: Product, x: Tensor) -> Tensor:
    if x.dim() == 3 and x.shape[0] == 1:
        return product(x[0])[None]
    return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _activate(ops: Blocked, name: str, x: Tensor) -> Tensor:
    return ops.activate(x, name, gated=False).to(x.dtype)


def _inside(mode: TorchFunctionMode, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


class _RotaryTable:
    """Takes cosines and sines from tables that were computed a block of positions at a time, at fixed places."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._tables: dict[tuple[Any, ...], list[Tensor]] = {}
        self._is_single = False

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() != 2 or position_ids.shape[0] != 1:
            return self._forward(x, position_ids, *args, **kwargs)
        key = (x.dtype, *args, *sorted(kwargs.items()))
        last = int(position_ids.max())
        tables = self._tables.get(key, [])
        while not tables or len(tables[0]) <= last:
            first = len(tables[0]) if tables else 0
            positions = torch.arange(first, first + _ROTARY_BLOCK, device=position_ids.device)[None]
            made = self._forward(x[:, :1], positions, *args, **kwargs)
            self._is_single = isinstance(made, Tensor)
            parts = [part[0] for part in ((made,) if self._is_single else made)]
            tables = [torch.cat(pair) for pair in zip(tables, parts, strict=True)] if tables else parts
        self._tables[key] = tables
        rows = tuple(table[position_ids[0]][None] for table in tables)
        return rows[0] if self._is_single else rows


class FixedRows(TorchFunctionMode):
    """Products at fixed row counts and activations of fixed bits, in place of the functions of torch that a module calls."""

    def __init__(self, ops: Blocked) -> None:
        super().__init__()
        self._ops = ops
        self._instead: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            **dict.fromkeys(
                (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), self._matmul
            ),
            **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid), _sigmoid),
            F.silu: partial(self._activation, "silu"),
            F.gelu: self._gelu,
            F.softplus: _softplus,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = self._instead.get(func)
        return (func if instead is None else instead)(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = self._ops.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return flat.view(*x.shape[:-1], -1)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if b.dim() < 2 or a.dim() < 2 or a.dtype != b.dtype or not a.is_floating_point():
            return torch.matmul(a, b)
        if b.dim() == 2:
            return self._linear(a, b.T)
        outer = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        left = a.expand(*outer, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
        right = b.expand(*outer, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
        if len(left) > _MANY:
            return torch.matmul(a, b)
        product = torch.stack([self._ops.linear(x, matrix.T) for x, matrix in zip(left, right, strict=True)])
        return product.view(*outer, *product.shape[-2:])

    def _activation(self, name: str, x: Tensor, inplace: bool = False) -> Tensor:
        del inplace
        return _activate(self._ops, name, x)

    def _gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        return _activate(self._ops, "gelu" if approximate == "none" else "gelu_tanh", x)


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


def register_experts() -> None:
    """Make our experts known to Transformers, under the name of our attention."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _experts)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows through their experts, one expert after the other in order of id; every product of fixed rows."""
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        if expert >= module.num_experts:
            continue
        rows, places = torch.where(top_k_index == expert)
        opened, closing = _products_of(module, expert)
        inner = opened(hidden_states[rows])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        part = closing(inner)
        if module.has_post_expert_norm:
            part = module.post_expert_norm(part)
        out[rows] += (part * top_k_weights[rows, places, None]).float()
    return out.to(hidden_states.dtype)


def _products_of(module: Any, expert: int) -> tuple[Product, Product]:
    """The two products of an expert, prepared at its first use."""
    held: dict[int, tuple[Product, Product]] = module.__dict__.setdefault("outrider_products", {})
    if expert not in held:
        name = "gate_up_proj" if module.has_gate else "up_proj"
        held[expert] = _product_of(module, name, expert), _product_of(module, "down_proj", expert)
    return held[expert]


def _product_of(module: Any, name: str, expert: int) -> Product:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return Product(weight.T if module.is_transposed else weight, bias, module.__dict__.get("outrider_packs", True))
