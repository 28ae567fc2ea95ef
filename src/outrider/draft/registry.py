"""Drafters by name. Each is imported when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import SpeculationConfig
from outrider.draft.protocol import Drafter
from outrider.errors import InvalidParameter, UnknownMethod
from outrider.model import Runner

__all__ = ["DraftContext", "build_drafter", "method_names"]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a factory may use: the settings, the target, and how to load another model beside it."""

    config: SpeculationConfig
    target: Runner
    load_companion: Callable[[str], Runner]  # a model with the target's tokenizer, KV in the same pages


def _none(context: DraftContext) -> Drafter:  # noqa: ARG001
    from outrider.draft.none import NoDrafter

    return NoDrafter()


def _ngram(context: DraftContext) -> Drafter:
    from outrider.draft.ngram import NGramDrafter

    return NGramDrafter(**context.config.options)


def _draft_model(context: DraftContext) -> Drafter:
    from outrider.draft.draft_model import DraftModel

    if not context.config.model:
        raise InvalidParameter("draft_model", "method 'draft_model' needs the draft model's directory or hub id")
    return DraftModel(context.load_companion(context.config.model))


_FACTORIES: dict[str, Callable[[DraftContext], Drafter]] = {"none": _none, "ngram": _ngram, "draft_model": _draft_model}


def method_names() -> list[str]:
    return sorted(_FACTORIES)


def build_drafter(context: DraftContext) -> Drafter:
    """The drafter the settings name."""
    try:
        factory = _FACTORIES[context.config.method]
    except KeyError:
        raise UnknownMethod("method", context.config.method, method_names()) from None
    return factory(context)
