"""What families share when they read a config.json: sizes with their bounds, rotary settings, windows, stored names.

`Sizes` reads the fields that nearly every config has. Everything is checked here, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.checks import shown
from outrider.model.fields import Fields
from outrider.model.rotary import ROPE_KINDS, Rope
from outrider.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Router

__all__ = ["ACTIVATION_NAMES", "MAX_CONTEXT", "STORED_DTYPES", "Sizes", "alternating"]

STORED_DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")  # int8 has a scale per row beside each matrix
ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
# Larger than any model known, and small enough that sizes and their products stay within the kernels' integers.
_MAX_VOCAB, _MAX_HIDDEN, _MAX_FFN = 2**22, 2**17, 2**20
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, MAX_CONTEXT = 1024, 4096, 1024, 2**24
_MAX_EXPERTS = 4096
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # configs name their count in one of these ways
_LAYER_TYPES = ("full_attention", "sliding_attention")
_NAMES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size", "context": "max_position_embeddings", "activation": "hidden_act",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model. `names` are the fields of configs that name them otherwise."""

    fields: Fields
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    default_ffn: int | None = None  # times hidden, where the field may be missing

    def name(self, size: str) -> str:
        return self.names.get(size, _NAMES[size])

    @property
    def vocab(self) -> int:
        return self.fields.integer("vocab_size", 2, _MAX_VOCAB)

    @property
    def hidden(self) -> int:
        return self.fields.integer(self.name("hidden"), 1, _MAX_HIDDEN)

    @property
    def layers(self) -> int:
        return self.fields.integer(self.name("layers"), 1, _MAX_LAYERS)

    @property
    def heads(self) -> int:
        return self.fields.integer(self.name("heads"), 1, _MAX_HEADS)

    @property
    def kv_heads(self) -> int:
        name, heads = self.name("kv_heads"), self.heads
        kv_heads = self.fields.integer(name, 1, heads, heads)
        if heads % kv_heads:
            raise self.fields.error(f"{name} must divide {self.name('heads')}, got {kv_heads} and {heads}")
        return kv_heads

    @property
    def head_dim(self) -> int:
        hidden, heads = self.hidden, self.heads
        head_dim = self.fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden // heads)
        if "head_dim" not in self.fields and hidden % heads:
            whole = f"{self.name('hidden')} must be a multiple of {self.name('heads')}"
            raise self.fields.error(f"{whole}, got {hidden} and {heads}; or set head_dim")
        if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
            raise self.fields.error(f"head_dim must be even (rotary pairs) and in [2, {_MAX_HEAD_DIM}], got {head_dim}")
        return head_dim

    @property
    def ffn(self) -> int:
        default = None if self.default_ffn is None else self.default_ffn * self.hidden
        return self.fields.integer(self.name("ffn"), 1, _MAX_FFN, default)

    @property
    def context(self) -> int:
        """Positions. Dynamic rotary scaling stretches what the config says."""
        positions = self.fields.integer(self.name("context"), 2, MAX_CONTEXT, 2048)
        scaling = self._scaling()
        if _kind(scaling) != "dynamic":
            return positions
        return min(int(positions * max(scaling.real("factor", 0.0, 1e9, 1.0), 1.0)), MAX_CONTEXT)

    @property
    def dtype(self) -> str:
        """The dtype that config.json names for the stored weights."""
        fields = self.fields
        name = fields.word("dtype", fields.word("torch_dtype", "float32")).removeprefix("torch.")
        if name not in STORED_DTYPES:
            raise fields.error(f"dtype {shown(name)} is not supported; known: {', '.join(STORED_DTYPES)}")
        return name

    @property
    def activation(self) -> str:
        name = self.fields.word(self.name("activation"), "silu")
        if name not in ACTIVATION_NAMES:
            raise self.fields.error(f"{self.name('activation')} {name!r} is not supported; known: {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[name]

    def eps(self, name: str = "rms_norm_eps", default: float = 1e-6) -> float:
        return self.fields.real(name, 0.0, 1.0, default)

    def attention(self, **options: Any) -> Attention:
        """Attention of the config's sizes, scaled by the root of the head's width, with its rotary settings."""
        d = self.head_dim
        base: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": d, "scale": d**-0.5}
        return Attention(**base | options)

    def mlp(self, **options: Any) -> FeedForward:
        base: dict[str, Any] = {"width": self.ffn, "activation": self.activation}
        return FeedForward(**base | options)

    def router(self, **options: Any) -> Router:
        """Experts, how many of them each row chooses, and groups of them where the config has some."""
        f = self.fields
        experts = f.integer(next((name for name in _EXPERTS if name in f), _EXPERTS[0]), 1, _MAX_EXPERTS)
        groups = f.integer("n_group", 1, experts, 1)
        chosen_groups = f.integer("topk_group", 1, groups, 1)
        if experts % groups or (groups > 1 and experts // groups < 2):
            raise f.error(f"n_group must cut the {experts} experts into equal groups of two or more, got {groups}")
        chosen = f.integer("num_experts_per_tok", 1, experts // groups * chosen_groups)
        return Router(experts, chosen, groups=groups, chosen_groups=chosen_groups, **options)

    def model(self, family: str, layers: Sequence[LayerSpec], **options: Any) -> ModelSpec:
        """The spec of these layers with the config's vocabulary, width and positions."""
        if not any(layer.attention.heads for layer in layers):
            raise self.fields.error("a model without attention is not supported; some layer's type must be full_attention")
        base: dict[str, Any] = {"vocab": self.vocab, "hidden": self.hidden, "context": self.context, "layers": tuple(layers)}
        base |= {"tied": self.fields.boolean("tie_word_embeddings", False), "dtype": self.dtype}
        base |= {"eos_ids": self.fields.ids("eos_token_id")}
        return ModelSpec(family, self.architecture, **base | options)

    def kinds(self, known_kinds: Sequence[str] = _LAYER_TYPES, name: str = "layer_types") -> list[str]:
        """`layer_types` of all layers; empty where the config has none."""
        kinds, layers = self.fields.items(name), self.layers
        if kinds and (len(kinds) != layers or any(kind not in known_kinds for kind in kinds)):
            known = " or ".join(known_kinds)
            raise self.fields.error(f"{name} must name {known} for each of the {layers} layers, got {shown(kinds)}")
        return kinds

    def windows(self, kinds: Sequence[str] = (), default: int | None = None) -> tuple[int | None, ...]:
        """The window of each layer that `layer_types`, or else `kinds`, calls sliding."""
        kinds = self.kinds() or kinds
        if not kinds or ("sliding_window" not in self.fields and (default is None or self.fields.is_null("sliding_window"))):
            return (None,) * self.layers
        window = self.fields.integer("sliding_window", 1, MAX_CONTEXT, default)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _scaling(self) -> Fields:
        return self.fields.nested("rope_parameters" if "rope_parameters" in self.fields else "rope_scaling")

    def rope(
        self, scaling: Fields | None = None, default_theta: float = 10000.0, default_share: float = 1.0, **options: Any
    ) -> Rope:
        """Rotary settings, from `rope_parameters` or the fields that older configs have."""
        f, s = self.fields, self._scaling() if scaling is None else scaling
        kind = _kind(s)
        if kind not in ROPE_KINDS:
            raise f.error(f"rope type {shown(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
        original = f.integer(self.name("context"), 2, MAX_CONTEXT, 2048)
        if kind in ("llama3", "yarn", "longrope"):
            original = f.integer("original_max_position_embeddings", 1, MAX_CONTEXT, original)
            original = s.integer("original_max_position_embeddings", 1, MAX_CONTEXT, original)
        share = s.real("partial_rotary_factor", 0.0, 1.0, f.real("partial_rotary_factor", 0.0, 1.0, default_share))
        base: dict[str, Any] = {
            "theta": s.real("rope_theta", 0.0, 1e30, f.real("rope_theta", 0.0, 1e30, default_theta)),
            "kind": kind,
            "rotary_dim": None if share == 1.0 else int(self.head_dim * share),
            "context": self.context,
            "original_context": original,
            "factor": s.real("factor", 0.0, 1e9, 1.0 if kind not in ("yarn", "longrope") else max(self.context / original, 1e-9)),
        }
        rope = Rope(**base | _kind_options(s, kind) | options)
        self._check_rope(rope)
        return rope

    def _check_rope(self, rope: Rope) -> None:
        width = rope.width(self.head_dim)
        if width % 2 or not 2 <= width <= self.head_dim:
            raise self.fields.error(f"{width} of {self.head_dim} dimensions cannot be rotated in pairs")
        if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
            low, high = rope.low_freq_factor, rope.high_freq_factor
            raise self.fields.error(f"low_freq_factor must be below high_freq_factor, got {low:g} and {high:g}")
        if rope.kind == "dynamic" and width < 4:
            raise self.fields.error(f"dynamic rotary scaling needs at least 4 dimensions that turn, got {width}")
        if rope.kind in ("yarn", "dynamic") and rope.theta <= 1.0:
            raise self.fields.error(f"rope_theta must be above 1 for {rope.kind}, got {rope.theta:g}")
        if rope.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(rope, name)) != width // 2:
                    raise self.fields.error(f"{name} must have {width // 2} numbers, one for each rotated pair")


def alternating(layers: int, every: int) -> list[str]:
    """Layer kinds where each `every`-th layer has full attention and the others slide."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _kind(scaling: Fields) -> str:
    """Rotary in three dimensions of an image ("mrope") is the default one on text, whose positions are equal in all."""
    kind = scaling.word("rope_type", scaling.word("type", "default"))
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def _kind_options(s: Fields, kind: str) -> dict[str, Any]:
    """The settings that only one kind of scaling has."""
    if kind == "llama3":
        return {name: s.real(name, 0.0, 1e6, default) for name, default in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0))}
    attention = s.real("attention_factor", 0.0, 1e6, 1.0) if "attention_factor" in s else None
    if kind == "yarn":
        names = (("beta_fast", 32.0), ("beta_slow", 1.0))
        betas = {name: s.real(name, 0.0, 1e9, default) for name, default in names}
        scales = {name: s.real(name, -1.0, 1e6, 0.0) for name in ("mscale", "mscale_all_dim")}
        return betas | scales | {"truncate": s.boolean("truncate", True), "attention_factor": attention}
    if kind == "longrope":
        factors = {name: tuple(s.reals(name, 0.0, 1e9)) for name in ("short_factor", "long_factor")}
        return factors | {"attention_factor": attention}
    return {}
