"""Checks of single values at the boundaries. Each raises InvalidParameter with the name, what is allowed and the value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.errors import InvalidParameter

__all__ = ["MAX_COUNT", "boolean", "byte_size", "choice", "integer", "memory", "nearest", "real", "shown", "text"]

MAX_COUNT = 2**31 - 1  # sizes and ids are 32-bit integers in the kernels
_SHOWN_LETTERS = 80
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BYTES = 2**63


def shown(value: object) -> str:
    """A value as an error message quotes it: short, and never an error itself."""
    try:
        written = repr(value)
    except Exception:  # an integer of 5,000 digits has no repr, and an object's own may raise
        return f"a value of type {type(value).__name__}"
    return written if len(written) <= _SHOWN_LETTERS else f"{written[: _SHOWN_LETTERS - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, to follow the unknown one in a message; often empty."""
    matches = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def integer(name: str, value: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    """An integer in [low, high]; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, f"must be an integer in [{low}, {high}], got {shown(value)}")
    if not low <= value <= high:
        raise InvalidParameter(name, f"must be in [{low}, {high}], got {shown(value)}")
    return value


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf, low_open: bool = False) -> float:
    """A number in [low, high], or in (low, high]; never NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, f"must be a number, got {shown(value)}")
    inside = (low < value if low_open else low <= value) and value <= high  # false for NaN
    if not inside:
        raise InvalidParameter(name, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {shown(value)}")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(name, f"must be True or False, got {shown(value)}")
    return value


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of several words."""
    if not isinstance(value, str) or value not in known:
        raise InvalidParameter(name, f"unknown {shown(value)}; known: {', '.join(known)}")
    return value


def text(name: str, value: Any) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidParameter(name, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            name, f"is not valid Unicode: a lone surrogate {value[error.start]!a} at character {error.start}"
        ) from None
    return value


def byte_size(name: str, value: Any) -> int:
    """A size such as 512MiB, 4G or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", str(value).lower())
    size = 0.0 if match is None or isinstance(value, bool) else float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < _MAX_BYTES:
        raise InvalidParameter(name, f"must be a size such as 512MiB or 4G, got {shown(value)}")
    return int(size)


def memory(name: str, value: Any) -> float | int:
    """A share of the memory, such as 0.9, as a float, or a size such as 8GiB as an integer of bytes."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*(0?\.\d+|[01](\.0*)?)\s*", value):
        number = float(value)
    if isinstance(number, float) or number in (0, 1):
        return float(real(name, number, 0.0, 1.0, low_open=True))
    try:
        return byte_size(name, value)
    except InvalidParameter:
        raise InvalidParameter(name, f"must be a share such as 0.9, or a size such as 8GiB, got {shown(value)}") from None
