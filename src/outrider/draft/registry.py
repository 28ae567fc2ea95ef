"""Drafters by name: a table of classes, each imported when it is first named, and the drafters that users bring."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from outrider import checks
from outrider.config import WITH_WEIGHTS, SpeculationConfig
from outrider.core import Needs
from outrider.draft.context import DraftContext, weights_directory
from outrider.draft.deadline import DEADLINE_S, Deadline
from outrider.draft.options import Option, Reads, check_names, declared, parameters, read_options
from outrider.draft.protocol import Drafter
from outrider.errors import InvalidParameter, ModelError, OutriderError, UnknownMethod
from outrider.model import LoadOptions, check_model, is_hub_id

__all__ = ["Factory", "build_drafter", "check_speculation", "check_weights", "drafter_class", "method_names", "register_drafter"]

Factory = Callable[[DraftContext], Drafter]

_CLASSES = {
    "none": "outrider.draft.none:NoDrafter",
    "ngram": "outrider.draft.ngram:NGramDrafter",
    "suffix": "outrider.draft.suffix:SuffixDrafter",
    "recycle": "outrider.draft.recycle:RecycleDrafter",
    "lookahead": "outrider.draft.lookahead:LookaheadDrafter",
    "draft_model": "outrider.draft.draft_model:DraftModel",
    "eagle": "outrider.draft.eagle:EagleDrafter",
    "mtp": "outrider.draft.mtp:MtpDrafter",
    "medusa": "outrider.draft.medusa:MedusaDrafter",
    "dflash": "outrider.draft.dflash:BlockDrafter",
    "early_exit": "outrider.draft.early_exit:EarlyExit",
    "cascade": "outrider.draft.cascade:CascadeDrafter",
    "mixture": "outrider.draft.mixture:MixtureDrafter",
    "auto": "outrider.draft.auto:AutoDrafter",
}
_REGISTERED: dict[str, Factory | DrafterClass] = {}  # by register_drafter; the package itself never adds to it
_VERBS = ("begin", "propose", "commit", "end")
_DEADLINE = Option("deadline_s", float, DEADLINE_S, "seconds that a call may take")


class DrafterClass(Protocol):
    """A class that declares its options and builds a drafter from a context; the built-in ones all do."""

    Options: type

    def build(self, context: DraftContext) -> Drafter: ...


def method_names() -> list[str]:
    return sorted((*_CLASSES, *_REGISTERED))


def drafter_class(method: str) -> DrafterClass:
    """The class of a built-in method."""
    module, _, name = _CLASSES[method].partition(":")
    return cast(DrafterClass, getattr(importlib.import_module(module), name))


def register_drafter(name: str, factory: Factory | type) -> None:
    """Make a drafter of your own a method, by name. Registering a name again replaces it.

    `factory` takes a DraftContext and returns a drafter, or is a class with `Options`, a dataclass of the options it
    takes, and a class method `build(context)`.
    """
    if not checks.text("name", name).isidentifier():
        raise InvalidParameter("name", f"must be letters, digits and underscores, got {checks.shown(name)}")
    if name in _CLASSES:
        raise InvalidParameter("name", f"{name!r} is built in; choose another")
    if not callable(factory):
        raise InvalidParameter("factory", f"must take a DraftContext and return a drafter, got {checks.shown(factory)}")
    _REGISTERED[name] = cast("Factory | DrafterClass", factory)


def check_speculation(config: SpeculationConfig) -> None:
    """Fail now, before anything is loaded, where a method or an option does not exist or a class is unfit."""
    for one in config.flat():
        method = one.method
        if method in _CLASSES:
            kind = drafter_class(method).Options
            kind(**read_options(method, declared(kind), one.options))
        elif ":" not in method and method not in _REGISTERED:
            raise UnknownMethod("method", method, [*method_names(), "package.module:Class"])
        else:
            known = _declared_by_user(method)
            if known is not None:
                read_options(method, known | {_DEADLINE.name: _DEADLINE}, one.options)


def check_weights(config: SpeculationConfig, directory: Path, options: LoadOptions) -> None:
    """Fail now, before anything is loaded, where a drafter's weights are missing. What is on the hub is not fetched."""
    options = replace(options, **{name: config.options[name] for name in ("dtype", "load_format") if name in config.options})
    for one in config.flat():
        if one.method not in WITH_WEIGHTS or (one.model is not None and is_hub_id(one.model)):
            continue
        weights = weights_directory(one, directory, WITH_WEIGHTS[one.method])
        if one.method == "draft_model":
            check_model(weights, options)
        elif not (weights / "config.json").exists():
            raise ModelError(f"{weights}/config.json is missing: the folder of a head holds config.json and *.safetensors")


def build_drafter(context: DraftContext) -> Drafter:
    """The drafter the settings name; one of the user's own runs behind a deadline."""
    check_speculation(context.config)
    method = context.config.method
    if method in _CLASSES:
        return drafter_class(method).build(context)
    options = dict(context.config.options)
    seconds = checks.real("deadline_s", options.pop("deadline_s", DEADLINE_S), 0.0, 3600.0, low_open=True)
    try:
        drafter = _built(replace(context, config=replace(context.config, options=options)))
    except OutriderError:
        raise
    except Exception as error:  # whatever a user's constructor raises, its name belongs in the message
        raise InvalidParameter("method", f"{method!r} cannot be built ({type(error).__name__}: {error})") from error
    model = context.target.decoder.spec
    return Deadline(_checked(method, drafter, model.depth), seconds, model.vocab)


def _built(context: DraftContext) -> object:
    """A user's drafter, from a class that builds itself, a class with a constructor, or a factory."""
    method, settings = context.config.method, context.config.options
    factory = _user_class(method)
    if _builds_itself(factory):
        return factory.build(context)
    if ":" in method:
        return factory(**settings)
    reads = Reads(settings)
    drafter = factory(replace(context, config=replace(context.config, options=reads)))
    check_names(method, reads.names, settings)
    return drafter


def _user_class(method: str) -> Any:
    """What a user registered under this name, or the class that `package.module:Class` names."""
    return _imported(method) if ":" in method else _REGISTERED[method]


def _declared_by_user(method: str) -> dict[str, Option] | None:
    """The options that a user's drafter declares; None where it is known only when it has been built."""
    factory = _user_class(method)
    if _builds_itself(factory):
        return declared(factory.Options)
    return parameters(factory) if ":" in method else None


def _builds_itself(factory: object) -> bool:
    return hasattr(factory, "Options") and callable(getattr(factory, "build", None))


def _imported(name: str) -> type:
    """The class that `package.module:Class` names."""
    module, _, attribute = name.partition(":")
    if not sys.flags.safe_path and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append("")  # a console script's path lacks the current folder, where a user's drafter lies
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever a user's module raises, its name belongs in the message
        raise InvalidParameter("method", f"{name!r}: cannot import {module!r} ({type(error).__name__}: {error})") from error
    if kind is None:
        raise InvalidParameter("method", f"{name!r}: {module!r} has no attribute {attribute!r}")
    if not isinstance(kind, type):
        raise InvalidParameter("method", f"{name!r} is not a class but {type(kind).__name__}")
    _require_verbs(name, kind)
    return kind


def _checked(name: str, drafter: object, layers: int) -> Drafter:
    _require_verbs(name, drafter)
    needs = getattr(drafter, "needs", None)
    if not isinstance(needs, Needs):
        raise InvalidParameter("method", f"{name!r} has no attribute `needs` of type Needs")
    checks.integer(f"{name}: needs.kv_bytes_per_token", needs.kv_bytes_per_token)
    if needs.follows and not callable(getattr(drafter, "follow", None)):
        raise InvalidParameter("method", f"{name!r} needs `follow` where needs.follows is True")
    taps = needs.taps
    if not isinstance(taps, tuple) or not all(type(tap) is int and 0 <= tap <= layers for tap in taps):
        raise InvalidParameter(
            "method", f"{name!r}: needs.taps must be a tuple of layers in [0, {layers}], got {checks.shown(taps)}"
        )
    return cast(Drafter, drafter)


def _require_verbs(name: str, drafter: object) -> None:
    missing = [verb for verb in _VERBS if not callable(getattr(drafter, verb, None))]
    if missing:
        raise InvalidParameter("method", f"{name!r} lacks {', '.join(missing)}; a drafter has {', '.join(_VERBS)} and needs")
