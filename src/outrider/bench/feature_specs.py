"""Small random models that together use every feature of a spec, and the check that their rows keep their bits.

`outrider doctor` runs the check on the user's machine; the tests of every backend run it over the same models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from outrider.cache import SequenceState
from outrider.model import Decoder, Feed, LlamaShape, ModelSpec, Rope, Runner
from outrider.model.load import DTYPES
from outrider.model.recurrent import Recurrent
from outrider.model.spec import NO_ATTENTION, NO_MLP, Clamp, FeedForward, LearnedPositions, Norm, QKNorm, Router

__all__ = ["FEATURE_SPECS", "keeps_bits", "random_decoder"]

_CONTEXT = 256
_ROPE = Rope(context=_CONTEXT)
_SHAPE = LlamaShape(
    "LlamaForCausalLM", vocab=97, hidden=48, layers=2, heads=6, kv_heads=2, head_dim=16, ffn=72, context=_CONTEXT, rope=_ROPE
)
_RMS, _LAYER, _BIASED = Norm("rms", 1e-6), Norm("layer", 1e-5), Norm("layer", 1e-5, bias=True)


def _with(attention: Mapping[str, object], layer: Mapping[str, object], **model: object) -> ModelSpec:
    """The base model with fields of attention, layers and model changed."""
    spec = _SHAPE.spec().with_layers(**attention)
    return replace(spec, layers=tuple(replace(part, **layer) for part in spec.layers), **model)  # type: ignore[arg-type]


def _second(spec: ModelSpec, **attention: object) -> ModelSpec:
    """The spec with another attention in its second layer."""
    first, second = spec.layers
    return replace(spec, layers=(first, replace(second, attention=replace(second.attention, **attention))))  # type: ignore[arg-type]


def _ungated(activation: str, bias: bool = True) -> FeedForward:
    return FeedForward(72, activation, gated=False, bias=bias)


def _sandwich() -> ModelSpec:
    norms = dict.fromkeys(("norm_in", "norm_mlp", "norm_attn_out", "norm_mlp_out"), _RMS)
    attention = {"scale": 0.2, "soft_cap": 5.0, "window": 9, "qk_norm": QKNorm(_RMS), "rope": Rope(100.0, context=_CONTEXT)}
    spec = _with(
        attention, {"mlp": FeedForward(72, "gelu_tanh"), **norms}, embedding_scale=math.sqrt(48), logit_cap=3.0, tied=True
    )
    return _second(spec, window=None, rope=Rope(1e6, "linear", factor=8.0, context=_CONTEXT))


def _parallel() -> ModelSpec:
    attention = {"qk_norm": QKNorm(_LAYER, shared=False), "rope": Rope(interleaved=True, context=_CONTEXT)}
    layer = {"norm_in": _LAYER, "norm_mlp": None, "parallel": True}
    return _second(_with(attention, layer, norm=_LAYER, logit_scale=0.25, tied=True), rope=None)


def _two_norms() -> ModelSpec:
    attention = {"rope": Rope(rotary_dim=4, context=_CONTEXT), "bias": True, "out_bias": True}
    layer = {"norm_in": _BIASED, "norm_mlp": _BIASED, "parallel": True, "mlp": _ungated("gelu")}
    return _with(attention, layer, norm=_BIASED, output_bias=True)


def _learned(activation: str, offset: int = 0) -> ModelSpec:
    attention = {"rope": None, "bias": True, "out_bias": True}
    layer = {"norm_in": _BIASED, "norm_mlp": _BIASED, "mlp": _ungated(activation)}
    return _with(attention, layer, norm=_BIASED, positions=LearnedPositions(_CONTEXT + offset, offset))


def _norms_after() -> ModelSpec:
    layer = {"norm_in": None, "norm_mlp": None, "norm_attn_out": _RMS, "norm_mlp_out": _RMS}
    return _with({"qk_norm": QKNorm(_RMS, over="width")}, layer, norm=_RMS)


def _longrope() -> ModelSpec:
    factors = {"short_factor": (1.0,) * 8, "long_factor": tuple(1.0 + i for i in range(8))}
    return _with({"rope": Rope(kind="longrope", context=_CONTEXT, original_context=32, factor=8.0, **factors)}, {})  # type: ignore[arg-type]


def _second_dense(mlp: FeedForward, **attention: object) -> ModelSpec:
    """The mixture in the first layer, the base model's MLP in the second."""
    spec = _with(attention, {})
    first, second = spec.layers
    return replace(spec, layers=(replace(first, mlp=mlp), second))


def _sinks() -> ModelSpec:
    router = Router(5, 3, bias=True)
    mlp = FeedForward(40, bias=True, clamp=Clamp(1.5, 1.702), router=router)
    return _second(_with({"sinks": True, "window": 9, "bias": True, "out_bias": True}, {"mlp": mlp}), window=None)


_GROUPED = Router(8, 3, "sigmoid", correction=True, groups=4, chosen_groups=2, scale=2.5)
_SPARSE = Router(6, 2, "sparsemixer", closeness=0.02)


def _hybrid(*mixers: tuple[Recurrent | None, bool], **layer: object) -> ModelSpec:
    """A layer for each pair: its recurrent mixer, and whether it has attention."""
    gated = replace(_SHAPE.spec().attention, gate=True, qk_norm=QKNorm(_RMS), rope=Rope(rotary_dim=4, context=_CONTEXT))
    base = _SHAPE.spec().layers[0]
    layers = tuple(
        replace(base, attention=gated if attends else NO_ATTENTION, recurrent=mixer, **layer)  # type: ignore[arg-type]
        for mixer, attends in mixers
    )
    return replace(_SHAPE.spec(), layers=layers)


def _single_parts() -> ModelSpec:
    """A mixer or a feed-forward part in each layer."""
    spec = _hybrid((_MAMBA, False), (None, False), (None, True))
    first, second, third = spec.layers
    return replace(spec, layers=(replace(first, mlp=NO_MLP), second, replace(third, mlp=NO_MLP)))


_CONV = Recurrent("short convolution", 1, 48, 3, bias=True, conv_bias=True, out_bias=True)
_DELTA = Recurrent("gated delta rule", 6, 10, 4, key_heads=2, key_dim=12, norm_eps=1e-6, norm_groups=6, norm_first=True)
_MAMBA = Recurrent("Mamba-2", 6, 8, 4, key_heads=2, key_dim=9, conv_bias=True, norm_eps=1e-6, norm_groups=2)
_MAMBA_SCALED = replace(_MAMBA, norm_eps=None, scales=(0.5, 1.5, 0.7, 1.2, 0.9), out_scale=0.6, step_limit=(0.01, 1.0), bias=True)
_SCALED_MLP = FeedForward(72, gate_scale=1.3, out_scale=0.7)

_YARN = Rope(kind="yarn", factor=4.0, original_context=64, context=_CONTEXT, query_growth=(0.1, 16))

FEATURE_SPECS: dict[str, ModelSpec] = {
    "Llama": _SHAPE.spec(),
    "sandwich norms, soft caps, windows, two rotary tables": _sandwich(),
    "parallel, layer norm, norms of every head, a layer without rotary": _parallel(),
    "parallel with two norms, partial rotary, gelu, biases": _two_norms(),
    "learned positions, gelu_tanh": _learned("gelu_tanh"),
    "learned positions with an offset, relu": _learned("relu", offset=2),
    "norms after the parts, q/k norm over the width": _norms_after(),
    "relu2": _with({}, {"norm_in": _BIASED, "norm_mlp": _BIASED, "mlp": _ungated("relu2", bias=False)}, norm=_BIASED),
    "multipliers": _with({"scale": 0.1}, {"residual_scale": 0.22}, embedding_scale=12.0, logit_scale=0.125),
    "rotary tables by length": _longrope(),
    "yarn, queries scaled by position": _with({"rope": _YARN}, {}),
    "experts, a shared one behind a gate, a dense layer": _second_dense(
        FeedForward(24, router=Router(7, 2, normalised=False), shared=40, shared_gate=True)
    ),
    "experts in groups by sigmoid with a correction, a shared one, a norm after": _with(
        {}, {"mlp": FeedForward(24, router=_GROUPED, shared=32), "norm_mlp_out": _RMS, "residual_scale": 0.5}
    ),
    "experts with biases, clamped, attention sinks and windows": _sinks(),
    "experts by sparsemixer, parallel": _with(
        {}, {"mlp": FeedForward(24, "gelu_tanh", router=_SPARSE), "norm_mlp": None, "parallel": True}
    ),
    "short convolutions": _hybrid((_CONV, False), (None, True), (_CONV, False)),
    "gated delta rule, gated attention": _hybrid((_DELTA, False), (None, True), (_DELTA, False)),
    "Mamba-2, experts": _hybrid((_MAMBA, False), (None, True), mlp=FeedForward(24, router=Router(5, 2), shared=40)),
    "Mamba-2 beside attention, multipliers": _hybrid((_MAMBA_SCALED, True), (_MAMBA_SCALED, True), mlp=_SCALED_MLP),
    "layers of one part": _single_parts(),
}


def random_decoder(spec: ModelSpec, dtype: str = "float32", seed: int = 5) -> Decoder:
    """A decoder with random weights, none of them trivial."""
    decoder = Decoder(replace(spec, dtype=dtype), DTYPES.get(dtype, torch.float32)).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        scale = 0.3 if parameter.dim() == 1 else 1.0 if name == "embedding" else parameter.shape[1] ** -0.5
        is_norm = parameter.dim() == 1 and "norm" in name and not name.endswith("_bias")
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + is_norm)
    return decoder


def keeps_bits(runner: Runner, pages: int, page_size: int) -> bool:
    """Whether tokens have the same logits in a prompt, decoded one by one beside others, and as nodes of a draft tree."""
    spec = runner.decoder.spec
    size = 3 * page_size // 2 + 7
    text = [i * 37 % spec.vocab for i in range(size)]
    mine, other = list(range(pages // 2)), list(range(pages // 2, pages))
    start = runner.decoder.rotary_start(_CONTEXT)  # the last table, where there are several

    def logits(feeds: list[Feed]) -> torch.Tensor:
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        return runner.logits(runner.forward(feeds).last, range(rows))

    def fed(first: int, tokens: list[int], state: SequenceState) -> Feed:
        return Feed(mine, first, tokens, rotary_start=start, state=state)

    decoded, drafted = SequenceState(), SequenceState()  # of recurrent layers
    prompt = logits([fed(0, text, SequenceState())])
    if not bool(torch.isfinite(prompt).all()):
        return False
    beside = Feed(other, 0, [3, 1, 4])  # which uses the first table
    one_by_one = torch.cat([logits([beside, fed(i, [token], decoded)])[-1:] for i, token in enumerate(text)])
    nodes, parents = [9, *text[-2:], 8, 7], [-1, -1, 1, 0, 2]
    logits([fed(0, text[:-3], drafted)])
    tree = logits([fed(size - 3, text[-3:-2], drafted)._replace(nodes=nodes, parents=parents), beside])
    return torch.equal(prompt, one_by_one) and torch.equal(tree[[0, 2, 3]], prompt[-3:])
