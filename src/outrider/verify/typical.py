"""`typical`: accept whatever the target finds typical (Medusa, 2401.10774). It changes the distribution.

Text made with this rule does not have the target's distribution, so it is reachable only through an
option whose name contains "lossy".
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count"]


def count(p: Tensor, tokens: Tensor, eps: float = 0.09, delta: float = 0.3) -> int:
    """Leading draft tokens with p(x) > min(eps, delta exp(-H(p))), H the entropy in nats.

    p (K + 1, V): the target's probabilities after all parameters; tokens (K,). The next token is the caller's draw
    from the distribution after the accepted ones.
    """
    p = p[: len(tokens)].double()
    entropy = torch.special.entr(p).sum(1)
    threshold = (delta * torch.exp(-entropy)).clamp(max=eps)
    return int((p.gather(1, tokens[:, None])[:, 0] > threshold).long().cumprod(0).sum())
