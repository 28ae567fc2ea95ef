"""GPTQ (Frantar et al., 2022): columns are rounded one after the other, and those that are left make up for the error.

`hessian` is X^T X of the rows X that the matrix multiplies in the calibration text. Columns go in order of falling importance;
the groups of inputs and their scales are chosen before, so that they stay where they lie ("static groups").
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.quantize.scheme import Scheme

__all__ = ["corrected"]

_DAMPING = 0.01  # of the mean of the diagonal, added to it
_BLOCK = 128  # columns whose errors reach the others together


def corrected(weight: Tensor, hessian: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix (outputs, inputs) in float32; the inputs' `hessian` is (inputs, inputs)."""
    diagonal = hessian.diagonal()
    scale = scheme.scale_of(weight, diagonal.clamp_min(1e-6 * float(diagonal.mean())))
    order = diagonal.argsort(descending=True, stable=True)
    units = scale.float().T[order // (scheme.group_size or len(order))]  # (inputs, outputs), as what follows
    left, codes = weight.T[order], torch.empty_like(units)
    upper = _inverse_root(hessian[order][:, order])
    for begin in range(0, len(left), _BLOCK):
        end = min(begin + _BLOCK, len(left))
        block, errors = left[begin:end], torch.empty(end - begin, len(weight))
        for i, values in enumerate(block):
            codes[begin + i] = scheme.codes(values, units[begin + i])
            of_inputs = upper[begin + i, begin + i : end]
            errors[i] = (values - codes[begin + i] * units[begin + i]) / of_inputs[0]
            block[i + 1 :].addr_(of_inputs[1:], errors[i], alpha=-1.0)
        left[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1.0)
    return codes[order.argsort()].T.contiguous(), scale


def _inverse_root(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse. Inputs that are always zero count as if they were alone."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal <= 0] = 1.0
    damping = _DAMPING * float(diagonal.mean())
    while True:
        hessian.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            root: Tensor
            root, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return root
        damping *= 10.0
