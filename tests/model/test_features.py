"""Every feature of a spec on the processor: rows keep their bits, and every feature is covered."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.feature_specs import FEATURE_SPECS, keeps_bits, random_decoder
from outrider.cache import KVPool
from outrider.model import Feed, ModelSpec, Runner
from outrider.model.spec import ACTIVATIONS
from outrider.ops import Blocked, Ops, Plain

PAGES = 8


def runner_of(spec: ModelSpec, dtype: str, page_size: int, ops: Ops | None = None) -> Runner:
    decoder = random_decoder(spec, dtype)
    return Runner(decoder, KVPool(spec.depth, PAGES + 1, spec.kv_heads, page_size, spec.head_dim), ops)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FEATURE_SPECS)
def test_rows_keep_their_bits(name: str, dtype: str, page_size: int) -> None:
    assert keeps_bits(runner_of(FEATURE_SPECS[name], dtype, page_size), PAGES, page_size)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("name", FEATURE_SPECS)
def test_backends_agree_with_the_plain_decoder(name: str) -> None:
    spec = FEATURE_SPECS[name]
    text = [i * 11 % spec.vocab for i in range(40)]
    served, plain = runner_of(spec, "float32", 16), runner_of(spec, "float32", 16, Plain())
    last = served.decoder.rotary_start(spec.context)
    feeds = [Feed([2, 0, 3], 0, text), Feed([6, 1, 5], 0, text, rotary_start=last)]  # the first table and the last
    made, want = (runner.logits(runner.forward(feeds).last, range(80)) for runner in (served, plain))
    torch.testing.assert_close(made, want, atol=1e-4, rtol=0)


def test_every_feature_is_in_some_spec() -> None:
    """Names of features come from the specs; a feature that no spec here has is not tested."""
    named = frozenset().union(*(spec.features() for spec in FEATURE_SPECS.values()))
    assert {f"{activation} activation" for activation in ACTIVATIONS if activation != "silu"} <= named
    assert named >= {
        "attention sinks", "attention soft cap", "clamped activation", "embedding scale", "gate of the shared expert",
        "layer norm", "learned positions", "logit scale", "logit soft cap", "mixture of experts",
        "no norm before a part", "no rotary", "norm after a part", "output bias", "parallel attention and MLP",
        "q/k norm", "q/k norm over the width", "queries scaled by position", "residual scale", "router bias",
        "router correction", "router groups", "several rotary tables", "shared expert", "sigmoid router",
        "sliding window", "sparsemixer router", "ungated MLP",
        "Mamba-2", "gated delta rule", "multipliers of a part", "no MLP", "no mixer", "output gate",
        "recurrent beside attention", "short convolution",
    }  # fmt: skip


def test_a_planted_fault_is_found() -> None:
    """Rows that depend on their place are noticed."""

    class Leaky(Blocked):
        def layer_norm(self, x, weight, bias, eps):  # type: ignore[no-untyped-def]
            return super().layer_norm(x, weight, bias, eps) + 1e-6 * len(x)

    spec = FEATURE_SPECS["relu2"]
    assert not keeps_bits(runner_of(spec, "float32", 16, Leaky()), PAGES, 16)
