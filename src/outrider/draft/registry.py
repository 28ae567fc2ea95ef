"""Drafters by name. Each is imported when first asked for; users bring their own by class or by registering it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outrider.cache import KVPool
from outrider.config import SpeculationConfig
from outrider.core import Needs
from outrider.draft.deadline import DEADLINE_S, Deadline
from outrider.draft.protocol import Drafter, Lookup
from outrider.errors import InvalidParameter, UnknownMethod
from outrider.model import LoadOptions, Runner, locate
from outrider.text import Tokenizer

if TYPE_CHECKING:
    from outrider.draft.vocabulary import Vocabulary
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["DraftContext", "Factory", "build_drafter", "check_method", "method_names", "register_drafter"]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a factory may use: the settings, the target, and how to load another model beside it."""

    config: SpeculationConfig
    target: Runner
    directory: Path  # of the target
    load_options: LoadOptions
    load_companion: Callable[[Path], Runner]  # another model, its KV in as many pages
    tokenizer: Tokenizer | None = None  # the target's

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


Factory = Callable[[DraftContext], Drafter]


def _none(context: DraftContext) -> Drafter:  # noqa: ARG001
    from outrider.draft.none import NoDrafter

    return NoDrafter()


def _ngram(context: DraftContext) -> Drafter:
    from outrider.draft.ngram import NGramDrafter

    return NGramDrafter(**context.config.options)


def _suffix(context: DraftContext) -> Drafter:
    from outrider.draft.suffix import SuffixDrafter, SuffixShape

    options = dict(context.config.options)
    shared_tokens = options.pop("shared_tokens", 0)
    return SuffixDrafter(SuffixShape(**options), shared_tokens)


def _recycle(context: DraftContext) -> Drafter:
    from outrider.draft.recycle import RecycleDrafter

    return RecycleDrafter(**context.config.options)


def _lookahead(context: DraftContext) -> Drafter:
    from outrider.draft.lookahead import LookaheadDrafter

    return LookaheadDrafter(**context.config.options)


def _draft_model(context: DraftContext) -> Drafter:
    from outrider.draft.draft_model import DraftModel
    from outrider.draft.growth import TreeShape
    from outrider.draft.retokenized import RetokenizedModel

    runner, tokenizer, vocabulary = _related(context, context.config.options.get("vocabulary", "auto"))
    if vocabulary is None:
        assert context.tokenizer is not None
        assert tokenizer is not None
        return RetokenizedModel(runner, context.tokenizer, tokenizer)
    shape = {key: value for key, value in context.config.options.items() if key in ("beam", "branch", "depth")}
    return DraftModel(runner, TreeShape(**shape), vocabulary)


def _related(context: DraftContext, way: str = "auto") -> tuple[Runner, Tokenizer | None, Vocabulary | None]:
    """A draft model, its tokenizer, and how its tokens become the target's (None: by way of text)."""
    from outrider.draft.vocabulary import Side, relate

    directory = context.companion("draft")
    runner, tokenizer = context.load_companion(directory), Tokenizer.load(directory)
    ours = Side(str(context.directory), context.tokenizer, context.target.decoder.config.vocab)
    return runner, tokenizer, relate(ours, Side(str(directory), tokenizer, runner.decoder.config.vocab), way)


def _eagle(context: DraftContext) -> Drafter:
    from outrider.draft.eagle import EagleDrafter
    from outrider.draft.growth import TreeShape
    from outrider.heads import load_eagle

    head = load_eagle(context.companion("eagle"), context.target.decoder, context.load_options)
    pool = context.pool_like_the_target(head.config.shape.kv_heads, head.config.shape.head_dim)
    runner = None
    if context.target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaEagleRunner, fits

        runner = CudaEagleRunner(head, cast("CudaRunner", context.target)) if fits(head) else None
    return EagleDrafter(head, pool, context.target.ops, TreeShape(**context.config.options), runner)


def _medusa(context: DraftContext) -> Drafter:
    from outrider.draft.medusa import MedusaDrafter
    from outrider.heads import load_medusa

    heads = load_medusa(context.companion("medusa"), context.target.decoder, context.load_options)
    dynamic = bool(context.config.options.get("dynamic", True))
    runner = None
    if context.target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaMedusaRunner

        runner = CudaMedusaRunner(heads, cast("CudaRunner", context.target))
    return MedusaDrafter(heads, context.target.ops, dynamic, context.target.pool.page_size, runner)


def _early_exit(context: DraftContext) -> Drafter:
    from outrider.draft.early_exit import EarlyExit

    if context.target.device_name != "cpu":
        raise InvalidParameter(
            "method", "early_exit runs some of the target's layers alone, which the GPU path cannot; pass device=cpu"
        )
    return EarlyExit(context.target, **context.config.options)


def _cascade(context: DraftContext) -> Drafter:
    from outrider.draft.cascade import CascadeDrafter, ModelLevel
    from outrider.draft.vocabulary import SameTokens

    lowest, *_ = configs = context.config.nested()
    lookup = None
    if lowest.method != "draft_model":
        lookup = build_drafter(replace(context, config=lowest))
        configs = configs[1:]
        if not lookup.needs.follows:
            raise InvalidParameter("levels", f"{lowest.method!r} cannot draft for a model: it guesses after committed text alone")
    for own in configs:
        if own.method != "draft_model":
            raise InvalidParameter("levels", f"levels above the lowest must be draft_model, got {own.method!r}")
    models = []
    for own in configs:
        runner, _, vocabulary = _related(replace(context, config=own))
        if not isinstance(vocabulary, SameTokens):
            raise InvalidParameter("levels", f"{own.model or 'the draft model'} must have the target's tokenizer")
        models.append(ModelLevel(runner, own.draft_tokens))
    return CascadeDrafter(models, cast("Lookup | None", lookup), lowest.draft_tokens)


def _mixture(context: DraftContext) -> Drafter:
    from outrider.draft.mixture import Member, MixtureDrafter

    configs = context.config.nested()
    members = [Member(build_drafter(replace(context, config=own)), own.draft_tokens) for own in configs]
    options = {name: context.config.options[name] for name in ("merge", "splice", "enough") if name in context.config.options}
    return MixtureDrafter(members, **options)


def _auto(context: DraftContext) -> Drafter:
    from outrider.draft.auto import AutoDrafter

    return AutoDrafter([build_drafter(replace(context, config=own)) for own in context.config.nested()])


_FACTORIES: dict[str, Factory] = {
    "none": _none,
    "ngram": _ngram,
    "suffix": _suffix,
    "recycle": _recycle,
    "lookahead": _lookahead,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "medusa": _medusa,
    "early_exit": _early_exit,
    "cascade": _cascade,
    "mixture": _mixture,
    "auto": _auto,
}


_REGISTERED: dict[str, Factory] = {}  # by register_drafter; the package itself never adds to it
_VERBS = ("begin", "propose", "commit", "end")


def method_names() -> list[str]:
    return sorted((*_FACTORIES, *_REGISTERED))


def register_drafter(name: str, factory: Factory) -> None:
    """Make a drafter of your own a method, by name. Registering a name again replaces it."""
    if name in _FACTORIES:
        raise InvalidParameter("name", f"{name!r} is built in; choose another")
    if not name.isidentifier():
        raise InvalidParameter("name", f"must be letters, digits and underscores, got {name!r}")
    if not callable(factory):
        raise InvalidParameter("factory", f"must take a DraftContext and return a drafter, got {factory!r}")
    _REGISTERED[name] = factory


def check_method(name: str) -> None:
    """Fail now, before anything is loaded, where no drafter has this name or its class is unfit."""
    if ":" in name:
        _imported(name)
    elif name not in _FACTORIES and name not in _REGISTERED:
        raise UnknownMethod("method", name, [*method_names(), "package.module:Class"])


def build_drafter(context: DraftContext) -> Drafter:
    """The drafter the settings name."""
    name = context.config.method
    check_method(name)
    if name in _FACTORIES:
        return _FACTORIES[name](context)
    options = dict(context.config.options)
    seconds = options.pop("deadline_s", DEADLINE_S)
    stranger = _constructed(name, options) if ":" in name else _REGISTERED[name](context)
    return Deadline(_checked(name, stranger), seconds)


def _imported(name: str) -> Callable[..., Any]:
    """The class that `package.module:Class` names."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever a stranger's module raises, its name belongs in the message
        raise InvalidParameter("method", f"{name!r}: cannot import {module!r} ({type(error).__name__}: {error})") from error
    if found is None:
        raise InvalidParameter("method", f"{name!r}: {module!r} has no attribute {attribute!r}")
    if not isinstance(found, type):
        raise InvalidParameter("method", f"{name!r} is not a class but {type(found).__name__}")
    _require_verbs(name, found)
    return found


def _constructed(name: str, options: Mapping[str, Any]) -> object:
    drafter = _imported(name)
    try:
        inspect.signature(drafter).bind(**options)
    except TypeError as error:
        given = ", ".join(sorted(options)) or "none"
        raise InvalidParameter("speculation", f"{name!r} does not take these settings ({given}): {error}") from None
    return drafter(**options)


def _checked(name: str, drafter: object) -> Drafter:
    _require_verbs(name, drafter)
    if not isinstance(getattr(drafter, "needs", None), Needs):
        raise InvalidParameter("method", f"{name!r} has no attribute `needs` of type Needs")
    return cast(Drafter, drafter)


def _require_verbs(name: str, drafter: object) -> None:
    missing = [verb for verb in _VERBS if not callable(getattr(drafter, verb, None))]
    if missing:
        raise InvalidParameter("method", f"{name!r} lacks {', '.join(missing)}; a drafter has {', '.join(_VERBS)} and needs")
