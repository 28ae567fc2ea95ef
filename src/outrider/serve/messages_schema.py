"""Schemas of /v1/messages and of its token counts, and their answers for the OpenAPI document."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from outrider.serve.schemas import FirstOnly, GenerationRequest, Text, one_of, within
from outrider.serve.settings import Limits

__all__ = [
    "CountRequest", "MessageAnswerObject", "MessageErrorBody", "MessagesRequest", "ResultBlock", "TextBlock", "ThinkingBlock",
    "TokenCount", "Turn", "UseBlock",
]  # fmt: skip

_L = Limits()


class _Block(BaseModel):
    model_config = GenerationRequest.model_config


class TextBlock(_Block):
    type: Literal["text"]
    text: str


def _texts_only(value: Any) -> Any:
    return _checked_blocks(value, ("text",))


def _checked_blocks(value: Any, kinds: tuple[str, ...]) -> Any:
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        if kind not in kinds:
            raise ValueError(f"blocks of type {str(kind)[:80]!r} are not supported; there are {', '.join(kinds)}")
    return value


def _joined(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


JoinedText = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[TextBlock], Field(max_length=_L.parts), FirstOnly(), AfterValidator(_joined), Tag("list")],
    one_of("a string or a list of text blocks"),
    BeforeValidator(_texts_only),
]


_ATTRIBUTION = "x-anthropic-billing-header:"


def _without_attribution(blocks: list[TextBlock]) -> list[TextBlock]:
    """System blocks without the one in which Claude Code counts its requests: it differs every time, so that no prompt after
    it would ever be found in the prefix cache."""
    return [block for block in blocks if not block.text.startswith(_ATTRIBUTION)]


def _instructions(blocks: list[TextBlock]) -> str | None:
    return _joined(kept) if (kept := _without_attribution(blocks)) else None


System = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[TextBlock], Field(max_length=_L.parts), FirstOnly(), AfterValidator(_instructions), Tag("list")],
    one_of("a string or a list of text blocks"),
    BeforeValidator(_texts_only),
]


class UseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: JoinedText = ""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The content. Checking has joined its blocks."""
        assert isinstance(self.content, str)
        return self.content


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(_Block):
    """Thinking that only its maker can read. It is dropped."""

    type: Literal["redacted_thinking"]


def _kind(value: Any) -> str:
    return str(value.get("type") if isinstance(value, dict) else getattr(value, "type", ""))


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[UseBlock, Tag("tool_use")]
    | Annotated[ResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")],
    Discriminator(_kind),
]


def _known_blocks(value: Any) -> Any:
    return _checked_blocks(value, _KINDS)


def _merged(blocks: list[Block]) -> list[Block]:
    """Blocks with neighbouring texts as one, because many blocks take long to hand on from the process that checks them."""
    out: list[Block] = []
    for is_text, run in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        texts = list(run)
        out += [TextBlock(type="text", text=_joined(texts))] if is_text else texts  # type: ignore[arg-type]
    return out


Blocks = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[Block], Field(max_length=_L.parts), FirstOnly(), AfterValidator(_merged), Tag("list")],
    one_of("a string or a list of blocks"),
    BeforeValidator(_known_blocks),
]


class Turn(_Block):
    role: Literal["user", "assistant", "system"]
    content: Blocks


def _few_values(turns: list[Turn]) -> list[Turn]:
    """Refuse inputs of calls that hold so many values that handing them on would hold the interpreter lock for long."""
    level: list[Any] = [block.input for turn in turns for block in turn.content if isinstance(block, UseBlock)]
    count = 0
    while level:
        below: list[Any] = []
        for item in level:
            below += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        count, level = count + len(below), below
    if count > _L.call_values:
        raise ValueError(f"the inputs of tool_use blocks must hold at most {_L.call_values} values, not {count}")
    return turns


def _custom_only(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(f"only tools with an input_schema are supported, got type {str(kind)[:80]!r}: nothing is run here")
    return value


class _Tool(_Block):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(_Block):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Block):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized"] | None = None  # thinking is never left out
    budget_tokens: int | None = Field(None, ge=1, le=2**31 - 1)


class JsonFormat(_Block):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Block):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: JsonFormat | None = None

    @field_validator("format", mode="before")
    @classmethod
    def _small(cls, value: Any) -> Any:
        return within(value, _L.schema_bytes)


class CountRequest(GenerationRequest):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    UNSUPPORTED = (
        *GenerationRequest.UNSUPPORTED,
        "container", "mcp_servers", "prefill", "output_format", "stop", "response_format", "logprobs", "top_logprobs",
        "return_token_ids", "return_token_details",
    )  # fmt: skip

    messages: Annotated[list[Turn], Field(min_length=1, max_length=_L.messages), FirstOnly(), AfterValidator(_few_values)]
    system: System | None = None
    tools: Annotated[list[Annotated[_Tool, BeforeValidator(_custom_only)]], Field(max_length=_L.tools), FirstOnly()] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _small_tools(cls, value: Any) -> Any:
        return within(value, _L.tools_bytes)

    @field_validator("context_management")
    @classmethod
    def _unedited(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Only edits that keep everything are accepted: the conversation is never changed here."""
        edits = (value or {}).get("edits") or []
        if not isinstance(edits, list) or any(not isinstance(edit, dict) or edit.get("keep") != "all" for edit in edits):
            raise ValueError("edits of the conversation are not supported; send the conversation as the model shall see it")
        return None  # it has no effect

    @field_validator("thread")
    @classmethod
    def _present(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Only whether there is one matters."""
        return None if value is None else {}


class MessagesRequest(CountRequest):
    """POST /v1/messages. The sampling parameters of the other routes are accepted too."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stop_sequences: Annotated[list[Text], Field(max_length=_L.stop), FirstOnly()] | None = None


class MessageAnswerObject(BaseModel):
    """The answer of /v1/messages."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class _MessageError(BaseModel):
    type: str
    message: str


class MessageErrorBody(BaseModel):
    """The body of every error under /v1/messages."""

    type: Literal["error"]
    error: _MessageError
    request_id: str
