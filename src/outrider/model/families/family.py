"""A family of models: the one thing that a file in this folder defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import ModelSpec

__all__ = ["Family"]

_LLAMA_NAMES = Names()


@dataclass(frozen=True, slots=True)
class Family:
    """How a config.json becomes a spec, and how the checkpoint names its tensors."""

    name: str
    models: str  # what people call them
    architectures: tuple[str, ...]
    compile: Callable[[Sizes], ModelSpec]
    names: Names | Callable[[ModelSpec], Names] = _LLAMA_NAMES
    fields: tuple[tuple[str, str], ...] = ()  # sizes that the config names otherwise, see reading.Sizes
    default_ffn: int | None = None  # width of the feed-forward part over hidden, where the config may leave it out

    def names_of(self, spec: ModelSpec) -> Names:
        """The stored names for a spec of this family."""
        return self.names if isinstance(self.names, Names) else self.names(spec)
