"""Fields of a JSON file, read with their types and bounds. Errors name the file, the field and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from outrider import checks
from outrider.errors import InvalidParameter, ModelError

__all__ = ["Fields", "read_json"]

T = TypeVar("T")
_LARGEST_JSON = 256 * 2**20  # bytes; tokenizers and indexes of the largest models are far smaller


def read_json(path: Path, missing: str = "") -> dict[str, Any]:
    """The object in a JSON file. `missing` says what the file is for, where there is none."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ModelError(f"{path} is larger than {_LARGEST_JSON // 2**20} MiB, which no such file is")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing{missing and f': {missing}'}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, numbers of thousands of digits, endless nesting
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, got {checks.shown(data)}")
    return data


class Fields:
    """The fields of one object. A field that is absent or null has its default; without one it must be there."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self._read(name, default, lambda value: checks.integer(name, value, low, high))

    def real(self, name: str, low: float, high: float, default: float) -> float:
        """A number in (low, high]."""
        return self._read(name, default, lambda value: float(checks.real(name, value, low, high, low_open=True)))

    def optional_real(self, name: str, default: float | None) -> float | None:
        """A positive number; None where the field is null."""
        return (
            None if self.is_null(name) or (name not in self and default is None) else self.real(name, 0.0, 1e30, default or 1.0)
        )

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says null."""
        return name in self._data and self._data[name] is None

    def word_or_integer(self, name: str, default: int) -> str | int:
        """A word, or a whole number from 0 on."""
        value = self._data.get(name)
        return value if isinstance(value, str) else self.integer(name, 0, 2**16, default)

    def boolean(self, name: str, default: bool) -> bool:
        return self._read(name, default, lambda value: checks.boolean(name, value))

    def word(self, name: str, default: str) -> str:
        return self._read(name, default, lambda value: checks.text(name, value))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The object in a field; empty where there is none."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, got {checks.shown(value)}")
        return value or {}

    def nested(self, name: str) -> Fields:
        """The fields of the object in a field."""
        return Fields(self.mapping(name), f"{self._where}: {name}")

    def items(self, name: str) -> list[Any]:
        """The list in a field; empty where there is none."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self.error(f"{name} must be a list, got {checks.shown(value)}")
        return list(value or ())

    def reals(self, name: str, low: float, high: float) -> list[float]:
        """The numbers in (low, high] of a list."""
        listed = {f"{name}[{i}]": value for i, value in enumerate(self.items(name))}
        return [Fields(listed, self._where).real(item, low, high, 0.0) for item in listed]

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them. They are whole numbers; which of them the model has is another question."""
        value = self._data.get(name)
        listed = value if isinstance(value, list | tuple) else () if value is None else (value,)
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.error(f"{name} must be a token id or a list of them, got {checks.shown(value)}")
        return tuple(listed)

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self._where}: {message}")

    def _read(self, name: str, default: T | None, check: Callable[[Any], T]) -> T:
        value = self._data.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self._where} lacks the field {name!r}")
            return default
        try:
            return check(value)
        except InvalidParameter as error:
            raise self.error(str(error).replace(": ", " ", 1)) from None
