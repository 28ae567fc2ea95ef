"""Whether outputs meet a JSON schema, by a library that the engine does not use itself."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter

__all__ = ["meets", "read_schema", "require_validator"]


def read_schema(path: Path) -> dict[str, Any]:
    """A schema from a file."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter("--schema", f"{path} cannot be read: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidParameter("--schema", f"{path} must hold a JSON schema, an object")
    return schema


def require_validator() -> Any:
    """The module jsonschema, or an error with how to install it."""
    try:
        return import_module("jsonschema")
    except ImportError:
        raise InvalidParameter("--schema", "needs jsonschema: pip install 'outrider[bench]'") from None


def meets(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of this schema."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(require_validator().Draft202012Validator(schema).is_valid(value))
