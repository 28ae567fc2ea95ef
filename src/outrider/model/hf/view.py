"""A view of a user's model: copies of its modules that share every tensor, so that nothing of the model itself is changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError

__all__ = ["HeadOfView", "base_of", "configs_of", "layers_of", "use_interfaces", "view_of", "with_layers"]


def view_of(model: Any) -> Any:
    """Copies of a model's modules and configurations around the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    try:
        view = copy.deepcopy(model, shared)
    except Exception as error:  # whatever a class keeps in its modules may refuse to be copied
        raise ModelError(
            f"the modules of {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "remove hooks and wrappers from the model, or load it afresh"
        ) from error
    return view.eval()


def configs_of(view: Any) -> list[Any]:
    """The distinct configurations that modules of a view read."""
    found = {id(config): config for module in view.modules() if (config := getattr(module, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def use_interfaces(view: Any, attention: str | None, experts: str | None) -> list[tuple[Any, str | None, str | None]]:
    """Set which attention and experts functions a view's modules call. Returns what was set before, by configuration."""
    before = []
    for config in configs_of(view):
        before.append((config, config._attn_implementation_internal, config._experts_implementation_internal))
        config._attn_implementation_internal = attention
        config._experts_implementation_internal = experts
    return before


def base_of(view: Any) -> Any:
    """The part of a causal model that ends with hidden rows."""
    return getattr(view, _base_name(view))


def _base_name(view: Any) -> str:
    """The child that holds the embedding, which most classes name in `base_model_prefix`."""
    prefix = str(view.base_model_prefix)
    if prefix in view._modules:
        return prefix
    embedding = view.get_input_embeddings()
    for name, child in view._modules.items():
        if child is not embedding and any(module is embedding for module in child.modules()):
            return str(name)
    raise ModelError(f"{type(view).__name__} has no part that ends with hidden rows, below an output matrix")


def layers_of(base: Any) -> nn.ModuleList:
    """The list of a model's decoder layers."""
    depth = base.config.get_text_config(decoder=True).num_hidden_layers
    found = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not found:
        raise ModelError(f"{type(base).__name__} has no list of {depth} layers")
    return found[0]


def with_layers(base: Any, layers: nn.ModuleList, count: int) -> Any:
    """The same base model with its first `count` layers alone."""

    def cut(module: nn.Module) -> Any:
        if module is layers:
            return nn.ModuleList(list(layers)[:count])
        if not any(inner is layers for inner in module.modules()):
            return module
        return _with_children(module, {name: cut(child) for name, child in module.named_children()})

    return cut(base)


class HeadOfView:
    """The output matrix of a causal model and whatever its class does to logits: scales, soft caps, biases."""

    def __init__(self, view: Any) -> None:
        self._stub = _Stub()
        self._head = _with_children(view, {**view._modules, _base_name(view): self._stub})

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (rows, V) of hidden rows that left the base model."""
        self._stub.hidden = hidden[None]
        logits: Tensor = self._head(
            input_ids=torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device), use_cache=False
        ).logits
        return logits[0]


class _Stub(nn.Module):
    """Stands in for a base model whose hidden rows are known."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> _Known:
        return _Known(self.hidden)


class _Known:
    """The output of a base model of which only the hidden rows are known."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, item: int | slice) -> Any:
        return (self.last_hidden_state,)[item]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.last_hidden_state,))


def _with_children(module: nn.Module, children: dict[str, Any]) -> Any:
    """A shallow copy of a module with other children."""
    twin = copy.copy(module)
    twin.__dict__ = {**module.__dict__, "_modules": children}
    return twin
