"""Options of drafters: a drafter declares them as a frozen dataclass in its own file, and they are read and checked here.

A drafter of the user's own may declare them in the same way, or by the parameters of its constructor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider import checks
from outrider.config import FIELDS, SPELLINGS
from outrider.errors import InvalidParameter

__all__ = [
    "DtypeOptions", "Option", "Reads", "WeightOptions", "check_names", "declared", "describe", "option", "parameters",
    "read_options",
]  # fmt: skip

T = TypeVar("T")


def option(default: Any, doc: str, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of an `Options` dataclass: what it is for, and which values it takes."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a drafter, as declared. Kinds other than bool, int, float and str are the drafter's to check."""

    name: str
    kind: Any
    default: Any
    doc: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """The value as the drafter gets it, or InvalidParameter. True and False may be 1 and 0, as the command line has them."""
        kind, may_be_none = _without_none(self.kind)
        if value is None and may_be_none:
            return None
        if kind is bool:
            return bool(checks.integer(self.name, int(value) if isinstance(value, bool) else value, 0, 1))
        if kind is int:
            return checks.integer(self.name, value, int(self.low or 0), int(self.high or checks.MAX_COUNT))
        if kind is float:
            low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
            return checks.real(self.name, value, low, high)
        if self.choices:
            return checks.choice(self.name, value, self.choices)
        return checks.text(self.name, value) if kind is str else value


@dataclass(frozen=True)
class DtypeOptions:
    """Options of methods with weights of their own."""

    dtype: str | None = option(
        None, "of the drafter's weights", choices=("auto", "float32", "bfloat16", "int8", "int4", "fp8")
    )  # None: the target's, or int8 where the weights are stored so


@dataclass(frozen=True)
class WeightOptions(DtypeOptions):
    """Options of methods that load a model of their own."""

    load_format: str | None = option(None, "`dummy`: random weights", choices=("dummy", "safetensors"))


class Reads(Mapping[str, Any]):
    """Settings that remember which names were read: what a factory that declares no options makes of them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)


def declared(kind: type) -> dict[str, Option]:
    """The options that a dataclass declares."""
    hints = get_type_hints(kind)
    return {one.name: Option(one.name, hints[one.name], one.default, **one.metadata) for one in fields(kind)}


def parameters(constructor: type[Any]) -> dict[str, Option] | None:
    """The options that a class takes by keyword; None where it takes any."""
    known: dict[str, Option] = {}
    try:
        hints = get_type_hints(constructor.__init__)
    except Exception:  # annotations that mean nothing here: names are checked and kinds are not
        hints = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
            hint = hints.get(name, object)
            known[name] = Option(name, hint, default, low=-checks.MAX_COUNT if _without_none(hint)[0] is int else None)
    return known


def read_options(method: str, known: Mapping[str, Option], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a drafter takes them. One error names the method, what is wrong, and the options there are."""
    check_names(method, known, settings)
    values = {}
    for name, value in settings.items():
        try:
            values[name] = known[name].read(value)
        except InvalidParameter as error:
            reason = str(error).removeprefix(f"{name}: ")
            raise InvalidParameter(name, f"{reason} (an option of method {method!r}; its options: {_listed(known)})") from None
    for name, one in known.items():
        if one.default is MISSING and name not in values:
            raise InvalidParameter(name, f"method {method!r} needs this option; its options: {_listed(known)}")
    return values


def check_names(method: str, known: Mapping[str, Option] | set[str], settings: Mapping[str, Any]) -> None:
    """InvalidParameter where a setting is not an option of the method."""
    for name in settings:
        if name not in known:
            allowed = (*FIELDS, *known, *SPELLINGS)
            raise InvalidParameter(
                "speculation",
                f"unknown setting {name!r} for method {method!r}{checks.nearest(name, allowed)}; "
                f"its options: {_listed(known)}; allowed for every method: {', '.join(FIELDS)}",
            )


def describe(kind: type) -> list[str]:
    """One line for each option, as the docs list them."""
    return [f"- `{one.name}` ({_range(one)}): {one.doc}" for one in declared(kind).values()]


def _range(one: Option) -> str:
    kind, _ = _without_none(one.kind)
    if one.choices:
        values = " or ".join(one.choices)
    elif kind is bool:
        values = "0 or 1"
    elif one.low is not None and one.high is not None:
        values = f"{one.low:g} to {one.high:g}"
    elif one.low is not None:
        values = f"from {one.low:g}"
    else:
        values = ""
    default = "" if one.default is None or one.default == () else f"default {int(one.default) if kind is bool else one.default}"
    return ", ".join(part for part in (values, default) if part) or "optional"


def _listed(known: Mapping[str, Option] | set[str]) -> str:
    return ", ".join(sorted(known) if isinstance(known, set) else known) or "none"


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not NoneType]
        return (kinds[0] if len(kinds) == 1 else object), len(kinds) < len(get_args(kind))
    return kind, False
