"""Attention for training: whole rows of text at once, no cache, torch's fused kernels.

The decoder takes flat rows of tokens; attention needs them as (B, T).

A head is unrolled ("training-time test", EAGLE-3) as follows. Row r is the draft that starts after the target's feature of
position r. At depth 0 attention is causal over the rows. At depth j row r holds the j-th drafted position of chain r; it
attends to the keys of depth 0 up to r and to the earlier keys of chain r, one per depth. Chains share no keys, so these scores
are a diagonal. `plain_chain` is the specification; `flash_chain` computes it with torch's flash kernel and corrects for the
diagonal, in memory and time linear in the depth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.model import Attend

__all__ = ["Unroll", "causal_attend", "flash_chain", "plain_chain", "usable_chain"]


def causal_attend(rows: int, context: int) -> Attend:
    """Attention within each of `rows` rows of `context` tokens that lie end to end."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # the fused kernels of CUDA take nothing wider than bf16
        dtype = torch.bfloat16 if q.is_cuda or torch.is_autocast_enabled(q.device.type) else q.dtype
        query, key, value = (x.to(dtype).view(rows, context, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return mixed.transpose(1, 2).reshape(rows * context, q.shape[1], q.shape[2]).to(q.dtype)

    return attend


class Unroll:
    """The `attend` of one unrolled pass over `rows` texts of `span` positions; call it once per depth."""

    def __init__(self, rows: int, span: int, fused: bool) -> None:
        self._rows = rows
        self._span = span
        self._fused = fused
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention at the next depth; keeps its keys and values for the deeper ones."""
        self._keys.append(self._by_head(k, q.shape[1]))
        self._values.append(self._by_head(v, q.shape[1]))
        if len(self._keys) == 1:
            return causal_attend(self._rows, self._span)(layer, q, k, v)
        chain_keys, chain_values = torch.stack(self._keys[1:]), torch.stack(self._values[1:])
        chain = flash_chain if self._fused else plain_chain
        mixed = chain(self._by_head(q, q.shape[1]), self._keys[0], self._values[0], chain_keys, chain_values)
        return mixed.transpose(1, 2).reshape(q.shape).to(q.dtype)

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        """(rows, heads, span, d) with every KV head repeated for the queries that share it."""
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        split = x.to(dtype).view(self._rows, self._span, x.shape[1], x.shape[2]).transpose(1, 2)
        return split.repeat_interleave(heads // x.shape[1], dim=1).contiguous()


def plain_chain(q: Tensor, keys: Tensor, values: Tensor, chain_keys: Tensor, chain_values: Tensor) -> Tensor:
    """q, keys, values (B, H, T, d); chain (depths, B, H, T, d). One product over all keys, masked."""
    span, depths = q.shape[2], chain_keys.shape[0]
    causal = torch.ones(span, span, dtype=torch.bool, device=q.device).tril()
    diagonal = torch.eye(span, dtype=torch.bool, device=q.device)
    mask = torch.cat((causal, *[diagonal] * depths), dim=1)
    every_key = torch.cat((keys, *chain_keys.unbind()), dim=2)
    every_value = torch.cat((values, *chain_values.unbind()), dim=2)
    return F.scaled_dot_product_attention(q, every_key, every_value, attn_mask=mask)


@torch.library.custom_op("outrider::flash_chain", mutates_args=())
def _flash_chain(q: Tensor, keys: Tensor, values: Tensor, chain_keys: Tensor, chain_values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log normaliser (B, H, T): the flash part and the diagonal, merged."""
    scale = q.shape[-1] ** -0.5
    part, part_total = _flash_forward(q, keys, values)
    scores = (q.float() * chain_keys.float()).sum(-1) * scale  # (depths, B, H, T)
    total = torch.logaddexp(part_total, torch.logsumexp(scores, dim=0))
    weights = (scores - total).exp()[..., None]
    mixed = part.float() * (part_total - total).exp()[..., None] + (weights * chain_values.float()).sum(0)
    return mixed.to(q.dtype).contiguous(), total.contiguous()


@_flash_chain.register_fake
def _(q: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("outrider::flash_chain_backward", mutates_args=())
def _flash_chain_backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    chain_keys: Tensor,
    chain_values: Tensor,
    mixed: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With the merged output and normaliser, the flash backward is exact for its share of the keys."""
    scale = q.shape[-1] ** -0.5
    gradient = gradient.contiguous()
    grad_q, grad_keys, grad_values = _flash_backward(gradient, q, keys, values, mixed, total)
    wide = gradient.float()
    queries, keys_of_chain = q.float(), chain_keys.float()
    share = ((queries * keys_of_chain).sum(-1) * scale - total).exp()
    centre = (wide * mixed.float()).sum(-1)
    slope = (share * ((wide * chain_values.float()).sum(-1) - centre) * scale)[..., None]
    grad_q = grad_q.float() + (slope * keys_of_chain).sum(0)
    grads = (grad_q, grad_keys, grad_values, slope * queries, share[..., None] * wide)
    return tuple(grad.to(q.dtype).contiguous() for grad in grads)  # type: ignore[return-value]


@_flash_chain_backward.register_fake
def _(_gradient: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in others[:5])  # type: ignore[return-value]


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _total: Tensor | None) -> tuple[Tensor, ...]:
    saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
    grads: tuple[Tensor, ...] = _flash_chain_backward(gradient, *saved)
    return grads


_flash_chain.register_autograd(_backward, setup_context=_keep)


def flash_chain(q: Tensor, keys: Tensor, values: Tensor, chain_keys: Tensor, chain_values: Tensor) -> Tensor:
    """`plain_chain` by a fused kernel."""
    mixed: Tensor = _flash_chain(q, keys, values, chain_keys, chain_values)[0]
    return mixed


def usable_chain(device: torch.device) -> bool:
    """Whether the fused kernel runs here and agrees with the plain one; the CPU needs neither."""
    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, 4, 144, 64)
    inputs = [torch.randn(shape, generator=generator, device=device) for _ in range(3)]
    inputs += [torch.randn((3, *shape), generator=generator, device=device) for _ in range(2)]
    try:
        results = [_with_gradients(chain, inputs) for chain in (plain_chain, flash_chain)]
    except Exception as error:  # private operators of torch: they may change with any release
        print(f"unroll: the fused kernel is not usable ({type(error).__name__}: {str(error).splitlines()[0]})", flush=True)
        return False
    worst = max(float((one - other).norm() / one.norm()) for one, other in zip(*results, strict=True))
    print(f"unroll: fused kernel within {worst:.4f} of the plain one", flush=True)
    return worst < 0.03


def _with_gradients(chain: object, inputs: list[Tensor]) -> list[Tensor]:
    assert callable(chain)
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in inputs]
    out: Tensor = chain(*leaves)
    torch.autograd.backward(out, torch.ones_like(out) * out.detach())
    grads = [leaf.grad for leaf in leaves]
    return [out.detach().float(), *(grad.float() for grad in grads if grad is not None)]


def _flash_forward(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True, False)
        return out, total
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, True)
    return out, total


def _flash_backward(
    gradient: Tensor, q: Tensor, keys: Tensor, values: Tensor, mixed: Tensor, total: Tensor
) -> tuple[Tensor, ...]:
    if q.is_cuda:
        nothing = torch.zeros(2, dtype=torch.int64, device=q.device)  # dropout state, unused
        span = q.shape[2]
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, keys, values, mixed, total, None, None, span, span, 0.0, True, nothing, nothing
        )
        return grads
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, keys, values, mixed, total, 0.0, True
    )
    return grads  # noqa: RET504 (typed above)
