"""Weights of a model that has none, from a seed: for tests and measurements of a config.json alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["RandomWeights"]


class RandomWeights:
    """A source of random parameters. They are drawn in their order, so reading them in that order draws each once."""

    def __init__(self, parameters: Mapping[str, Tensor], seed: int, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._seed = seed
        self._dtype = dtype
        self._drawn: Iterator[tuple[str, Tensor]] = iter(())

    def read(self, name: str) -> Tensor:
        for made, parameter in self._drawn:
            if made == name:
                return parameter
        self._drawn = self._draw()
        return next(parameter for made, parameter in self._drawn if made == name)

    def grouped(self, name: str) -> None:
        """Random values are floating point."""

    def packed(self, name: str) -> None:
        """Random values are floating point."""

    def fill(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name))

    def parts(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """As StoredWeights.parts: each parameter is one part."""
        yield slice(None), self.read(name)

    def release(self) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        self._drawn = iter(())

    def _draw(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for name, parameter in self._parameters.items():
            if parameter.dim() == 1:
                yield name, torch.ones(parameter.shape) if "norm" in name else torch.zeros(parameter.shape)
            else:
                std = 0.02 if name in ("embedding", "output") else 1.0 / math.sqrt(parameter.shape[1])
                yield name, (torch.randn(parameter.shape, generator=generator) * std).to(self._dtype)
