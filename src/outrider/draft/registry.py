"""Drafters by name. Each is imported when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.cache import KVPool
from outrider.config import SpeculationConfig
from outrider.draft.protocol import Drafter
from outrider.errors import InvalidParameter, UnknownMethod
from outrider.model import LoadOptions, Runner, locate

__all__ = ["DraftContext", "build_drafter", "method_names"]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a factory may use: the settings, the target, and how to load another model beside it."""

    config: SpeculationConfig
    target: Runner
    directory: Path  # of the target
    load_options: LoadOptions
    load_companion: Callable[[Path], Runner]  # a model with the target's tokenizer, KV in the same pages

    def companion(self, name: str) -> Path:
        """The directory the settings name, or the one that came with the target."""
        if self.config.model:
            return locate(self.config.model)
        own = self.directory / name
        if not (own / "config.json").exists():
            raise InvalidParameter(
                f"{name}_model" if name == "draft" else "model",
                f"method {self.config.method!r} needs the directory or hub id of its weights: {self.directory} brings none",
            )
        return own

    def pool_like_the_target(self, kv_heads: int, head_dim: int) -> KVPool:
        """One layer of KV in the target's pages."""
        pool = self.target.pool
        return KVPool(1, pool.pages, kv_heads, pool.page_size, head_dim)


def _none(context: DraftContext) -> Drafter:  # noqa: ARG001
    from outrider.draft.none import NoDrafter

    return NoDrafter()


def _ngram(context: DraftContext) -> Drafter:
    from outrider.draft.ngram import NGramDrafter

    return NGramDrafter(**context.config.options)


def _draft_model(context: DraftContext) -> Drafter:
    from outrider.draft.draft_model import DraftModel

    return DraftModel(context.load_companion(context.companion("draft")))


def _eagle(context: DraftContext) -> Drafter:
    from outrider.draft.eagle import EagleDrafter, TreeShape
    from outrider.heads import load_eagle

    head = load_eagle(context.companion("eagle"), context.target.decoder, context.load_options)
    pool = context.pool_like_the_target(head.config.shape.kv_heads, head.config.shape.head_dim)
    return EagleDrafter(head, pool, context.target.ops, TreeShape(**context.config.options))


def _medusa(context: DraftContext) -> Drafter:
    from outrider.draft.medusa import MedusaDrafter
    from outrider.heads import load_medusa

    heads = load_medusa(context.companion("medusa"), context.target.decoder, context.load_options)
    return MedusaDrafter(heads, context.target.ops, bool(context.config.options.get("dynamic", False)))


_FACTORIES: dict[str, Callable[[DraftContext], Drafter]] = {
    "none": _none,
    "ngram": _ngram,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "medusa": _medusa,
}


def method_names() -> list[str]:
    return sorted(_FACTORIES)


def build_drafter(context: DraftContext) -> Drafter:
    """The drafter the settings name."""
    try:
        factory = _FACTORIES[context.config.method]
    except KeyError:
        raise UnknownMethod("method", context.config.method, method_names()) from None
    return factory(context)
