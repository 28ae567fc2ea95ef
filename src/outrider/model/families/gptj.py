"""GPT-J: a parallel block behind one norm, interleaved partial rotary, a bias on the logits."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_FIELDS = (
    ("hidden", "n_embd"), ("layers", "n_layer"), ("heads", "n_head"), ("ffn", "n_inner"), ("context", "n_positions"),
    ("activation", "activation_function"),
)  # fmt: skip
_NAMES = Names(
    {
        "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "out": "attn.out_proj",
        "up": "mlp.fc_in", "down": "mlp.fc_out", "norm_in": "ln_1",
    },
    layer="transformer.h.{}.", embedding="transformer.wte", norm="transformer.ln_f",
    ignored=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("layer", sizes.eps("layer_norm_epsilon", 1e-5), bias=True)
    width = fields.integer("rotary_dim", 2, sizes.head_dim, min(64, sizes.head_dim))
    attention = sizes.attention(kv_heads=sizes.heads, rope=sizes.rope(rotary_dim=width, interleaved=True))
    activation = sizes.activation if "activation_function" in fields else "gelu_tanh"
    mlp = sizes.mlp(activation=activation, gated=False, bias=True)
    layer = LayerSpec(attention, mlp, norm, None, parallel=True)
    return sizes.model("gptj", [layer] * sizes.layers, norm=norm, output_bias=True)


FAMILY = Family("gptj", "GPT-J", ("GPTJForCausalLM",), _compile, _NAMES, _FIELDS, 4)
