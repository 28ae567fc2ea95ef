"""What makes a Transformers class independent of the row count: each part against what it replaces, and row by row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.hf.attention import NAME
from outrider.model.hf.rows import FixedRows, fix_rows, register_experts
from outrider.model.hf.view import HeadOfView, base_of, layers_of, use_interfaces, view_of, with_layers
from outrider.ops import Blocked
from outrider.ops.products import Product
from tests.support.transformers_models import tiny_model


def row_by_row(function: Any, x: Tensor) -> Tensor:
    return torch.cat([function(x[i : i + 1]) for i in range(len(x))])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, WEIGHT),
        lambda x: x @ WEIGHT.T,
        lambda x: torch.matmul(x.expand(3, *x.shape), STACK)[1],
        lambda x: torch.bmm(x.expand(3, *x.shape), STACK)[2],
        torch.sigmoid,
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.softplus,
    ],
)
def test_replaced_functions_are_close_and_have_one_value_per_row(function: Any) -> None:
    x = torch.randn(21, 45, generator=torch.Generator().manual_seed(0)) * 4
    expected = function(x)
    with FixedRows(Blocked()):
        together, alone = function(x), row_by_row(function, x)
    torch.testing.assert_close(together, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(together, alone)


WEIGHT = torch.randn(37, 45, generator=torch.Generator().manual_seed(1))
STACK = torch.randn(3, 45, 37, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("pack", [True, False])
def test_a_product_is_the_same_for_every_row_count(pack: bool) -> None:
    product, x = Product(WEIGHT, None, pack), torch.randn(70, 45)
    assert torch.equal(product(x), row_by_row(product, x))
    torch.testing.assert_close(product(x), F.linear(x, WEIGHT))


def test_rotary_tables_hold_what_the_class_computes() -> None:
    model = tiny_model("llama")
    view = view_of(model)
    assert fix_rows(view, Blocked(), pack=True) is None
    x, positions = torch.zeros(1, 3, 64), torch.tensor([[5, 700, 2]])
    for ours, theirs in zip(base_of(view).rotary_emb(x, positions), model.model.rotary_emb(x, positions), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_experts_are_summed_in_order_of_their_id() -> None:
    register_experts()
    view = view_of(tiny_model("mixtral"))
    use_interfaces(view, "eager", NAME)
    experts = next(module for module in view.modules() if type(module).__name__ == "MixtralExperts")
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[4, 1], [0, 5], [5, 0], [2, 3], [1, 4]])
    parts = {}
    for expert in range(6):
        one = torch.full((5, 1), expert)
        parts[expert] = experts(x, one, torch.ones(5, 1))
    expected = torch.zeros(5, 64)
    for row in range(5):
        for expert, weight in sorted(zip(chosen[row].tolist(), weights[row], strict=True)):
            expected[row] += parts[expert][row] * weight
    torch.testing.assert_close(experts(x, chosen, weights), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(experts(x, chosen, weights), experts(x, chosen.flip(1), weights.flip(1)))
    assert torch.equal(experts(x, chosen, weights)[:1], experts(x[:1], chosen[:1], weights[:1]))


def test_a_view_shares_tensors_and_nothing_else() -> None:
    model = tiny_model("gpt-oss")
    view = view_of(model)
    pointers = {name: tensor.data_ptr() for name, tensor in view.state_dict().items()}
    assert pointers == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert {id(module) for module in view.modules()}.isdisjoint(id(module) for module in model.modules())
    assert view.config is not model.config


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = tiny_model("llama")
    model.model.lock = __import__("threading").Lock()
    with pytest.raises(Exception, match="cannot be copied .* remove hooks and wrappers"):
        view_of(model)


@torch.inference_mode()
def test_parts_of_a_view_are_those_of_the_class() -> None:
    """The first layers alone, and the output matrix with the class's scale and soft cap."""
    model = tiny_model("gemma2")
    ids = torch.tensor([[3, 4, 5, 6]])
    whole = model(ids, use_cache=False, output_hidden_states=True)
    hidden = base_of(model)(ids, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(HeadOfView(model)(hidden), whole.logits[0])
    base = base_of(model)
    short = with_layers(base, layers_of(base), 1)
    assert len(layers_of(base)) == 3
    shallow = copy.copy(model.config)
    assert shallow.num_hidden_layers == 3
    torch.testing.assert_close(short(ids, use_cache=False).last_hidden_state, base.norm(whole.hidden_states[1]))
    assert isinstance(short, nn.Module)
