"""Schemas of /v1/responses: the request with its input items, and the answer for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from outrider.serve.schemas import FirstOnly, GenerationRequest, one_of, within
from outrider.serve.settings import Limits

__all__ = [
    "AnyTool", "CallItem", "CustomCallItem", "CustomTool", "DeletedResponse", "FunctionTool", "InputItem", "MessageItem",
    "NamedTool", "NamespaceTool", "OutputItem", "ReasoningItem", "ResponseObject", "ResponsesRequest", "TextFormat",
]  # fmt: skip

_L = Limits()
_METADATA = 16  # entries
_LOGPROBS = "message.output_text.logprobs"


class _Part(BaseModel):
    model_config = GenerationRequest.model_config


class TextPart(_Part):
    type: Literal["input_text", "output_text", "text"]
    text: str


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _text_only(value: Any) -> Any:
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise ValueError(f"only parts of text are taken, got {kind!r}; nothing is fetched from elsewhere")
    return value


Content = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[TextPart], Field(max_length=_L.parts), FirstOnly(), AfterValidator(_joined), Tag("list")],
    one_of("a string or a list of parts"),
    BeforeValidator(_text_only),
]


class MessageItem(_Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @property
    def text(self) -> str:
        """The content. Checking has joined its parts."""
        assert isinstance(self.content, str)
        return self.content


class CallItem(_Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(_Part):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputItem(_Part):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content

    @property
    def text(self) -> str:
        """The content. Checking has joined its parts."""
        assert isinstance(self.output, str)
        return self.output


class ReasoningText(_Part):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Part):
    """Earlier reasoning. Only its plain text is used: summaries and encrypted content cannot be given to the model."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=_L.parts), FirstOnly()] | None = None


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        kind = value.get("type")
        return str(kind) if kind is not None else "message"
    return str(getattr(value, "type", ""))


def _known(value: Any) -> Any:
    if _kind(value) not in _ITEMS:
        raise ValueError(f"items of type {_kind(value)[:80]!r} are not supported; there are {', '.join(_ITEMS)}")
    return value


_ITEMS = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
    BeforeValidator(_known),
]
Input = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=_L.messages + _L.tool_calls), FirstOnly(), Tag("list")],
    one_of("a string or a list of items"),
]


class FunctionTool(_Part):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(_Part):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(_Part):
    """A tool whose input is free text. A grammar for it is told to the model and not enforced."""

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    format: InputFormat | None = None


def _runnable(value: Any) -> Any:
    return _of_kind(value, ("function", "custom"))


class NamespaceTool(_Part):
    """Tools under a common name, such as those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
                Discriminator(_kind),
                BeforeValidator(_runnable),
            ]
        ],
        Field(min_length=1, max_length=_L.tools),
        FirstOnly(),
    ]


_TOOLS = ("function", "custom", "namespace")
_SERVICES = (
    "web_search", "image_generation", "file_search", "code_interpreter", "computer", "mcp", "tool_search", "local_shell", "shell",
    "apply_patch", "programmatic_tool_calling",
)  # fmt: skip


def _of_kind(value: Any, kinds: tuple[str, ...]) -> Any:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in kinds:
        raise ValueError(f"tools of type {str(kind)[:80]!r} are not supported; there are {', '.join(kinds)}: nothing is run here")
    return value


def _any_tool(value: Any) -> Any:
    return _of_kind(value, _TOOLS)


def _is_service(tool: Any) -> bool:
    """Whether a tool is run by OpenAI's service, or is one that its models alone know."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(_SERVICES)


AnyTool = FunctionTool | CustomTool | NamespaceTool
ListedTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")] | Annotated[NamespaceTool, Tag("namespace")],
    Discriminator(_kind),
    BeforeValidator(_any_tool),
]


class NamedTool(_Part):
    type: Literal["function", "custom"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedTool, Tag("object")],
    one_of("none, auto, required or an object that names a tool"),
]


class TextFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextSettings(_Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None

    @field_validator("format", mode="before")
    @classmethod
    def _small(cls, value: Any) -> Any:
        return within(value, _L.schema_bytes)


class Reasoning(_Part):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


def _short(value: Any) -> Any:
    """Check the length of an object before its values are checked."""
    if isinstance(value, dict) and len(value) > _METADATA:
        raise ValueError(f"must have at most {_METADATA} entries, not {len(value)}")
    return value


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=_METADATA), BeforeValidator(_short)]


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses. The sampling parameters of the other routes are accepted too."""

    UNSUPPORTED = (
        *GenerationRequest.UNSUPPORTED,
        "background", "conversation", "prompt", "context_management", "moderation", "messages", "max_tokens",
        "max_completion_tokens", "response_format", "logprobs", "return_token_ids", "return_token_details",
    )  # fmt: skip

    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    tools: Annotated[list[ListedTool], Field(max_length=_L.tools), FirstOnly()] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Field(max_length=16), FirstOnly()] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _own_tools(cls, value: Any) -> Any:
        """Leave out tools of OpenAI's service where there are others: agents always send them."""
        kept = [tool for tool in value if not _is_service(tool)] if isinstance(value, list) else None
        return within(kept or value, _L.tools_bytes)

    @field_validator("include")
    @classmethod
    def _included(cls, value: list[str] | None) -> list[str] | None:
        if _LOGPROBS in (value or ()):
            raise ValueError(f"{_LOGPROBS} is not supported; /v1/chat/completions returns log probabilities")
        return value


class ResponseObject(BaseModel):
    """The answer of /v1/responses."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(BaseModel):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
