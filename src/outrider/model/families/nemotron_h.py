"""Nemotron-H and Nemotron 3: each layer is one part alone: Mamba-2, attention without rotary, an ungated MLP, or experts."""

from __future__ import annotations

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.mamba import checked
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.families.recurrent_names import RecurrentNames
from outrider.model.recurrent import Recurrent
from outrider.model.spec import NO_ATTENTION, NO_MLP, FeedForward, LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}
_KINDS = (*_PATTERN.values(), *_OLD)


def _compile(sizes: Sizes) -> ModelSpec:
    kinds = _kinds(sizes)
    norm = Norm("rms", sizes.eps("layer_norm_epsilon", 1e-5))
    bias = sizes.fields.boolean("mlp_bias", False)
    activation = sizes.activation if "mlp_hidden_act" in sizes.fields else "relu2"
    layers = {
        "linear_attention": LayerSpec(NO_ATTENTION, NO_MLP, norm, None, recurrent=_mamba(sizes)),
        "full_attention": LayerSpec(sizes.attention(), NO_MLP, norm, None),
        "mlp": LayerSpec(NO_ATTENTION, sizes.mlp(activation=activation, gated=False, bias=bias), None, norm),
    }
    if "moe" in kinds:
        layers["moe"] = LayerSpec(NO_ATTENTION, _mixture(sizes, activation), None, norm)
    return sizes.model("nemotron_h", [layers[kind] for kind in kinds], norm=norm)


def _kinds(sizes: Sizes) -> list[str]:
    """The part that each layer is."""
    fields = sizes.fields
    pattern = fields.word("hybrid_override_pattern", "")
    listed = fields.items("layers_block_type") or fields.items("layer_types") or [_PATTERN.get(letter) for letter in pattern]
    if not listed or any(kind not in _KINDS for kind in listed):
        raise fields.error(f"layers_block_type must name {', '.join(_PATTERN.values())} for each layer")
    kinds = [_OLD.get(kind, kind) for kind in listed]
    if "num_hidden_layers" in fields and sizes.layers != len(kinds):
        raise fields.error(f"layers_block_type names {len(kinds)} layers, num_hidden_layers says {sizes.layers}")
    return kinds


def _mamba(sizes: Sizes) -> Recurrent:
    """Steps have the lower limit that Transformers gives them."""
    fields = sizes.fields
    heads = fields.integer("mamba_num_heads", 1, 2**16, 128)
    groups = fields.integer("n_groups", 1, heads, 8)
    bias = fields.boolean("use_bias", False)
    mixer = Recurrent(
        "Mamba-2",
        heads,
        fields.integer("mamba_head_dim", 1, 2**17, 64),
        fields.integer("conv_kernel", 2, 64, 4),
        groups,
        fields.integer("ssm_state_size", 1, 2**17, 128),
        bias=bias,
        conv_bias=fields.boolean("use_conv_bias", True),
        out_bias=bias,
        norm_eps=sizes.eps("layer_norm_epsilon", 1e-5),
        norm_groups=groups,
        step_limit=(fields.real("time_step_min", 0.0, 1e6, 0.001), float("inf")),
    )
    return checked(mixer, sizes)


def _mixture(sizes: Sizes, activation: str) -> FeedForward:
    fields = sizes.fields
    if "moe_latent_size" in fields:
        raise fields.error("moe_latent_size (experts of a narrower width) is not supported")
    router = sizes.router(
        scores="sigmoid",
        correction=True,
        normalised=fields.boolean("norm_topk_prob", True),
        scale=fields.real("routed_scaling_factor", 0.0, 1e6, 1.0),
    )
    width = fields.integer("moe_intermediate_size", 1, 2**20, 7688)
    shared = fields.integer("moe_shared_expert_intermediate_size", 1, 2**20, 7688)
    return FeedForward(width, activation, gated=False, router=router, shared=shared)


_PARTS = {part: f"mixer.{part}_proj" for part in ("q", "k", "v", "up", "down")} | {"out": "mixer.o_proj"}
_EXPERTS = ExpertNames(
    router="mixer.gate", correction="mixer.gate.e_score_correction_bias", up="mixer.experts.{}.up_proj",
    down="mixer.experts.{}.down_proj", fused=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    shared={part: f"mixer.shared_experts.{part}_proj.weight" for part in ("up", "down")},
)  # fmt: skip
_RECURRENT = RecurrentNames(
    read=(("mixer.in_proj", (0, 1, 2, 3, 4)),), write="mixer.out_proj", conv="mixer.conv1d", norm="mixer.norm",
    decay="mixer.A_log", step_bias="mixer.dt_bias", skip="mixer.D",
)  # fmt: skip
_NAMES = Names(  # the norm of a layer stands before whatever part it is
    _PARTS | {"norm_in": "norm", "norm_mlp": "norm"}, layer="backbone.layers.{}.", embedding="backbone.embeddings",
    norm="backbone.norm_f", experts=_EXPERTS, recurrent=_RECURRENT,
)  # fmt: skip
FAMILY = Family(
    "nemotron_h", "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano", ("NemotronHForCausalLM",), _compile, _NAMES,
    fields=(("activation", "mlp_hidden_act"),),
)  # fmt: skip
