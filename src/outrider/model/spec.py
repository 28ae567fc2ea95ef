"""What a model is, as data: `ModelSpec`, a tuple of `LayerSpec`, and the pieces that they are made of.

Families (model/families) compile a Hugging Face config into a spec; backends execute specs. Nothing here knows a family by name,
and nothing here needs torch. Rotary kinds are in model/rotary.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from outrider.model.rotary import Rope

__all__ = ["ACTIVATIONS", "Attention", "FeedForward", "LayerSpec", "LearnedPositions", "ModelSpec", "Norm", "QKNorm"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")  # gelu is the one with erf; relu2 is relu squared


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension, with a weight. Checkpoints that store weight - 1, or none, are completed at loading."""

    kind: str = "rms"  # "rms", or "layer": the mean is subtracted first
    eps: float = 1e-5
    bias: bool = False


@dataclass(frozen=True, slots=True)
class QKNorm:
    """A norm of queries and of keys before they are rotated."""

    norm: Norm
    over: str = "head"  # "head": each head by itself; "width": all heads of a row together
    shared: bool = True  # one weight for all heads; False: each head has a weight of its own

    @property
    def one_head(self) -> bool:
        """Whether the weight is as wide as one head."""
        return self.shared and self.over == "head"


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `heads` query heads over `kv_heads` heads of keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, before the soft cap
    rope: Rope | None = None  # None: queries and keys are not rotated
    window: int | None = None  # a row sees that many positions, its own included
    qk_norm: QKNorm | None = None
    bias: bool = False  # on q, k and v
    out_bias: bool = False
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated."""

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def up_width(self) -> int:
        """Columns of the first product: gate and up side by side, or up alone."""
        return self.width * (2 if self.gated else 1)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention and feed-forward part, where norms stand, and how both join the residual stream.

    In order: x += scale * norm_attn_out(attention(norm_in(x))), then x += scale * norm_mlp_out(mlp(norm_mlp(x))). A norm that
    is None is left out. With `parallel` both parts read the same x and are added together; the feed-forward part then reads
    norm_mlp(x), or what attention reads where `norm_mlp` is None.
    """

    attention: Attention
    mlp: FeedForward
    norm_in: Norm | None = Norm()
    norm_mlp: Norm | None = Norm()
    norm_attn_out: Norm | None = None
    norm_mlp_out: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0

    def parameters(self, hidden: int) -> int:
        """Number of weights in the matrices."""
        a, m = self.attention, self.mlp
        return hidden * (a.qkv_width + a.q_width + m.up_width + m.width)


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table of position embeddings, added to the token's."""

    rows: int
    offset: int = 0  # position p has row p + offset


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm and output matrix. Heads of keys have one shape in all layers."""

    family: str
    architecture: str  # as config.json names it
    vocab: int
    hidden: int
    context: int
    layers: tuple[LayerSpec, ...]
    norm: Norm = Norm()
    tied: bool = False  # the output matrix is the embedding
    output_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap), after the scale
    positions: LearnedPositions | None = None
    dtype: str = "float32"  # of the stored weights
    eos_ids: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """The first layer's; widths and heads are those of every layer."""
        return self.layers[0].attention

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def ffn(self) -> int:
        """Width of the widest feed-forward part."""
        return max(layer.mlp.width for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary settings of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))

    @property
    def parameters(self) -> int:
        """Number of weights in the matrices (norms and biases left out)."""
        tables = self.vocab * (1 if self.tied else 2) + (self.positions.rows if self.positions else 0)
        return sum(layer.parameters(self.hidden) for layer in self.layers) + tables * self.hidden

    def features(self) -> frozenset[str]:
        """What a backend must support beyond a Llama layer, by the names that `outrider models` shows."""
        named = {
            "learned positions": self.positions is not None,
            "embedding scale": self.embedding_scale != 1.0,
            "logit scale": self.logit_scale != 1.0,
            "logit soft cap": self.logit_cap is not None,
            "output bias": self.output_bias,
            "layer norm": self.norm.kind == "layer",
        }
        of_model = (name for name, used in named.items() if used)
        return frozenset(chain(of_model, *map(_layer_features, self.layers)))

    def with_layers(self, **changes: object) -> ModelSpec:
        """The spec with fields of every layer's attention changed."""
        layers = tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in self.layers)  # type: ignore[arg-type]
        return replace(self, layers=layers)


def _layer_features(layer: LayerSpec) -> list[str]:
    a, m = layer.attention, layer.mlp
    norms = (layer.norm_in, layer.norm_mlp, layer.norm_attn_out, layer.norm_mlp_out)
    named = {
        "layer norm": any(norm is not None and norm.kind == "layer" for norm in norms),
        "norm after a part": layer.norm_attn_out is not None or layer.norm_mlp_out is not None,
        "no norm before a part": layer.norm_in is None or (layer.norm_mlp is None and not layer.parallel),
        "parallel attention and MLP": layer.parallel,
        "residual scale": layer.residual_scale != 1.0,
        "q/k norm": a.qk_norm is not None,
        "q/k norm over the width": a.qk_norm is not None and a.qk_norm.over == "width",
        "sliding window": a.window is not None,
        "attention soft cap": a.soft_cap is not None,
        "queries scaled by position": a.rope is not None and a.rope.query_growth is not None,
        "no rotary": a.rope is None,
        "several rotary tables": a.rope is not None and a.rope.has_variants,
        f"{m.activation} activation": m.activation != "silu",
        "ungated MLP": not m.gated,
    }
    return [name for name, used in named.items() if used]
