"""What a model is, as data: `ModelSpec`, a tuple of `LayerSpec`, and the pieces that they are made of.

Families (model/families) compile a Hugging Face config into a spec; backends execute specs. Nothing here knows a family by name,
and nothing here needs torch. Rotary kinds are in model/rotary.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from outrider.model.recurrent import Recurrent
from outrider.model.rotary import Rope

__all__ = [
    "ACTIVATIONS", "NO_ATTENTION", "NO_MLP", "ROUTERS", "Attention", "Clamp", "FeedForward", "LayerSpec", "LearnedPositions",
    "ModelSpec", "Norm", "QKNorm", "Router",
]  # fmt: skip

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")  # gelu is the one with erf; relu2 is relu squared
ROUTERS = ("softmax", "sigmoid", "sparsemixer")


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
    """Causal attention of `heads` query heads over `kv_heads` heads of keys and values; without heads there is none."""

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
    sinks: bool = False  # each head has the score of a key without a value
    gate: bool = False  # the result is multiplied by the sigmoid of as many more columns, which follow the queries
    out_scale: float = 1.0  # of the result

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width * (2 if self.gate else 1) + 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a row goes through, and the weights of their results. Ties go to the lower number.

    "softmax" and "sigmoid" score all experts and choose the best. "sparsemixer" chooses two: the weight of each is its softmax
    among the experts whose logits are close to its own.
    """

    experts: int
    chosen: int  # by each row
    scores: str = "softmax"
    bias: bool = False  # on the logits
    correction: bool = False  # a number for each expert, added to the scores that choose but not to those that weigh
    groups: int = 1  # only experts of the best groups are chosen; a group's score is the sum of its best two
    chosen_groups: int = 1
    normalised: bool = True  # the weights of a row are divided by their sum
    scale: float = 1.0  # of the weights
    closeness: float = 0.0  # of "sparsemixer": the largest difference, as a share


@dataclass(frozen=True, slots=True)
class Clamp:
    """A gated activation that is cut: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated.

    With a router it is one of many experts, which are equal in shape, and what they give is added in order of their numbers.
    After them comes the shared expert, which every row goes through, if it has a width. A layer may have none: width 0.
    """

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    clamp: Clamp | None = None  # instead of the activation
    router: Router | None = None
    shared: int = 0  # width of the shared expert; 0: there is none
    shared_gate: bool = False  # its result is multiplied by the sigmoid of one more column of the router
    gate_scale: float = 1.0  # of the gate, before the activation
    out_scale: float = 1.0  # of the result

    @property
    def up_width(self) -> int:
        """Columns of the first product: gate and up side by side, or up alone."""
        return self.width * (2 if self.gated else 1)

    @property
    def shared_up_width(self) -> int:
        """Columns of the shared expert's first product."""
        return self.shared * (2 if self.gated else 1)

    @property
    def experts(self) -> int:
        """How many stand side by side: one where there is no router."""
        return 1 if self.router is None else self.router.experts

    @property
    def router_width(self) -> int:
        """Columns of the router's matrix."""
        return 0 if self.router is None else self.router.experts + self.shared_gate

    def parameters(self, hidden: int, experts: int | None = None) -> int:
        """Number of weights in the matrices, of all experts or of so many."""
        each = (self.experts if experts is None else experts) * (self.up_width + self.width)
        return hidden * (each + self.shared_up_width + self.shared + self.router_width)


NO_ATTENTION = Attention(0, 0, 0, 1.0)
NO_MLP = FeedForward(0)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Mixer and feed-forward part, where norms stand, and how both join the residual stream.

    The mixer is attention, a recurrent one, or both side by side, whose results are added. A part may be left out.
    In order: x += scale * norm_attn_out(mixer(norm_in(x))), then x += scale * norm_mlp_out(mlp(norm_mlp(x))). A norm that
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
    recurrent: Recurrent | None = None

    @property
    def mixes(self) -> bool:
        """Whether it has a mixer."""
        return self.attention.heads > 0 or self.recurrent is not None

    def parameters(self, hidden: int) -> int:
        """Number of weights in the matrices."""
        recurrent = 0 if self.recurrent is None else self.recurrent.parameters(hidden)
        return hidden * (self.attention.qkv_width + self.attention.q_width) + recurrent + self.mlp.parameters(hidden)


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
    layer_bytes: float = 0.0  # that a weight of a layer takes on a GPU, where it is stored quantised; 0: as the dtype says

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """The first layer's that has some; widths and heads are those of every layer."""
        return next((layer.attention for layer in self.layers if layer.attention.heads), NO_ATTENTION)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with attention, which have keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.heads)

    @property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The recurrent mixers, in order of the layers."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence."""
        return sum(recurrent.state_bytes for recurrent in self.recurrent)

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
        return max(max(layer.mlp.width, layer.mlp.shared) for layer in self.layers)

    @property
    def expert_layers(self) -> int:
        """Layers with a router."""
        return sum(layer.mlp.router is not None for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer with attention."""
        return tuple(layer.attention.window for layer in self.layers if layer.attention.heads)

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
        "no norm before a part": (layer.mixes and layer.norm_in is None)
        or (m.width > 0 and layer.norm_mlp is None and not layer.parallel),
        "parallel attention and MLP": layer.parallel,
        "residual scale": layer.residual_scale != 1.0,
        "q/k norm": a.qk_norm is not None,
        "q/k norm over the width": a.qk_norm is not None and a.qk_norm.over == "width",
        "sliding window": a.window is not None,
        "attention soft cap": a.soft_cap is not None,
        "attention sinks": a.sinks,
        "queries scaled by position": a.rope is not None and a.rope.query_growth is not None,
        "no rotary": a.heads > 0 and a.rope is None,
        "output gate": a.gate,
        "recurrent beside attention": a.heads > 0 and layer.recurrent is not None,
        "no mixer": not layer.mixes,
        "no MLP": m.width == 0,
        "multipliers of a part": a.out_scale != 1.0 or m.gate_scale != 1.0 or m.out_scale != 1.0,
        "several rotary tables": a.rope is not None and a.rope.has_variants,
        f"{m.activation} activation": m.activation != "silu",
        "ungated MLP": not m.gated,
        "clamped activation": m.clamp is not None,
        "shared expert": m.shared > 0,
        "gate of the shared expert": m.shared_gate,
    }
    kinds = [] if layer.recurrent is None else [layer.recurrent.kind]
    return kinds + [name for name, used in (named | _router_features(m.router)).items() if used]


def _router_features(r: Router | None) -> dict[str, bool]:
    if r is None:
        return {}
    return {
        "mixture of experts": True,
        f"{r.scores} router": r.scores != "softmax",
        "router bias": r.bias,
        "router correction": r.correction,
        "router groups": r.groups > 1,
    }
