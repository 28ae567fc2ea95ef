"""Types of single request fields. Lengths are checked before items, and only the first wrong item of a list is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag

from outrider.serve.settings import Limits

__all__ = ["Bias", "FirstOnly", "Float", "Id", "Ids", "Json", "Prompt", "Stop", "Text", "one_of"]

_L = Limits()


class FirstOnly(FailFast):
    """Report only the first wrong item of a list: millions of errors would cost seconds and gigabytes."""

    def __hash__(self) -> int:  # hashable, so that a list can be a member of a union
        return hash(type(self))


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}


def _json_type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _prompt_type(value: Any) -> str:
    return f"list of {_json_type(value[0])}" if isinstance(value, list) and value else _json_type(value)


def one_of(what: str, by: Callable[[Any], str] = _json_type) -> Discriminator:
    """Choose the branch of a union by the value's type. Without it every branch is tried, and all their errors are reported."""
    return Discriminator(by, custom_error_type="one_of", custom_error_message=f"must be {what}")


def _limited(value: Any) -> Any:
    """Check the length of an object before its values are checked."""
    if isinstance(value, dict) and len(value) > _L.logit_bias:
        raise ValueError(f"must have at most {_L.logit_bias} entries, not {len(value)}")
    return value


Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[Id], Field(max_length=_L.ids), FirstOnly()]
Float = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=_L.stop_chars)]
Json = Annotated[
    Annotated[dict[str, Any], Tag("object")] | Annotated[str, Tag("string")], one_of("a JSON schema, as an object or a string")
]
Stop = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[Text], Field(max_length=_L.stop), FirstOnly(), Tag("list")],
    one_of("a string or a list of strings"),
]
Prompt = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[Id], Field(min_length=1, max_length=_L.prompt_ids), FirstOnly(), Tag("list of integer")]
    | Annotated[list[str], Field(min_length=1, max_length=_L.prompts), FirstOnly(), Tag("list of string")]
    | Annotated[
        list[Annotated[list[Id], Field(min_length=1, max_length=_L.prompt_ids), FirstOnly()]],
        Field(min_length=1, max_length=_L.prompts),
        FirstOnly(),
        Tag("list of list"),
    ],
    one_of("a string, a list of token ids, or a list of either, and not empty", _prompt_type),
]
Bias = Annotated[dict[str, Annotated[Float, Field(ge=-100, le=100)]], BeforeValidator(_limited), Field(max_length=_L.logit_bias)]
