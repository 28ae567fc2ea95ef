"""Schemas of requests. Unknown fields are ignored, and known but unsupported ones are refused.

Lengths are checked before items, and only the first wrong item of a list is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from outrider.serve.settings import Limits
from outrider.serve.tags import TAG, tag_of_metadata
from outrider.serve.unserved import check_served

__all__ = [
    "ChatRequest", "CompletionRequest", "DetokenizeRequest", "ForgetRequest", "GenerationRequest", "Message", "TokenizeChat",
    "TokenizePrompt", "TokenizeRequest",
]  # fmt: skip

_L = Limits()
_SEED = 2**63


class FirstOnly(FailFast):
    """Report only the first wrong item of a list: millions of errors would cost seconds and gigabytes."""

    def __hash__(self) -> int:  # hashable, so that a list can be a member of a union
        return hash(type(self))


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}


def _json_type(value: Any) -> str:
    return "object" if isinstance(value, BaseModel) else _JSON_TYPES.get(type(value), "null")  # also when it is dumped


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


def within(value: Any, limit: int) -> Any:
    """A value whose JSON has at most `limit` bytes."""
    if value is not None and len(json.dumps(value)) > limit:
        raise ValueError(f"is larger than {limit} bytes")
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


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Passed(_Request):
    """Objects that are passed to templates with all fields, including unknown ones."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(_Request):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationRequest(_Request):
    """The speculation settings of a request. They never change its tokens."""

    enabled: bool = True
    method: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=256)
    return_rejected: bool = False
    remember: bool = True


Speculation = Annotated[
    Annotated[SpeculationRequest, Tag("object")] | Annotated[bool, Tag("boolean")],
    one_of("true, false or an object of enabled, method and max_tokens"),
]


class JsonSchema(_Request):
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Request):
    json_: Json | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], FirstOnly()] | None = None
    grammar: str | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class GenerationRequest(_Request):
    """Fields that completions and chats share."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        "best_of", "suffix", "functions", "function_call", "audio", "prediction", "web_search_options", "lora",
    )  # fmt: skip

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Float | None = Field(None, ge=0, le=2)
    top_p: Float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: Float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=_L.n)
    seed: int | None = Field(None, ge=-_SEED, le=_SEED - 1)
    stop: Stop | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100)  # smaller values make logits infinite
    logit_bias: Bias | None = None
    bad_words: Annotated[list[Text], Field(max_length=_L.ids), FirstOnly()] | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FirstOnly()] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    speculation: Speculation | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=256)
    prompt_lookup_num_tokens: int | None = Field(None, ge=0, le=256)
    return_token_ids: bool | None = None
    return_token_details: bool | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.\-]{1,128}$")  # appears in logs and in the answer's id
    tag: str | None = Field(None, pattern=TAG)
    user: str | None = None
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Unknown fields of the body."""
        return self._ignored

    def ignore(self, fields: tuple[str, ...]) -> None:
        """Note the unknown fields of the body."""
        self._ignored = fields

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in cls.UNSUPPORTED:
                value = data.get(name)
                if value is None or value is False or value in ([], {}) or (name == "best_of" and value == (data.get("n") or 1)):
                    continue
                if name == "function_call" and value in ("none", "auto") and not data.get("functions"):
                    continue  # without functions it has no effect
                raise ValueError(f"{name} is not supported")
            check_served(data, cls.model_fields)
            if data.get("modalities") not in (None, ["text"]):
                raise ValueError("modalities is not supported beyond text")
            return data if "tag" in data else data | tag_of_metadata(data.get("metadata"))
        return data

    @field_validator("logit_bias")
    @classmethod
    def _bias_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if any(not (key.isascii() and key.isdecimal() and len(key) < 10) for key in value or ()):
            raise ValueError("keys must be token ids")
        return value

    @field_validator("response_format", "structured_outputs", "guided_json", "guided_choice", mode="before")
    @classmethod
    def _small(cls, value: Any) -> Any:
        return within(value, _L.schema_bytes)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=_L.logprobs)
    prompt_logprobs: int | None = Field(None, ge=0, le=_L.logprobs)
    echo: bool | None = None


class Function(_Passed):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Passed):
    type: Literal["function"]
    function: Function


class NamedFunction(_Request):
    name: str


class NamedTool(_Request):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(_Request):
    name: str
    arguments: str = "{}"


class PastCall(_Request):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(_Request):
    type: Literal["text"]
    text: str


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


Content = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[TextPart], Field(max_length=_L.parts), FirstOnly(), AfterValidator(_joined), Tag("list")],
    one_of("a string or a list of parts"),
]


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = Field(None, max_length=128)
    tool_calls: Annotated[list[PastCall], Field(max_length=_L.tools), FirstOnly()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer; templates may show it to the model

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"only parts of type 'text' are taken, got {kind!r}; nothing is fetched from elsewhere")
        return value


def _few_calls(messages: list[Message]) -> list[Message]:
    calls = sum(len(message.tool_calls or ()) for message in messages)
    if calls > _L.tool_calls:
        raise ValueError(f"must hold at most {_L.tool_calls} tool calls, not {calls}")
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=_L.messages), FirstOnly(), AfterValidator(_few_calls)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedTool, Tag("object")],
    one_of("none, auto, required or an object that names a function"),
]


class Prediction(_Request):
    """A text that the answer is likely to be like."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else _joined(self.content)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = tuple(name for name in GenerationRequest.UNSUPPORTED if name != "prediction")

    prediction: Prediction | None = None
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_L.logprobs)
    tools: Annotated[list[Tool], Field(max_length=_L.tools), FirstOnly()] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    thinking_token_budget: int | None = Field(None, ge=0, le=2**31 - 1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _small_tools(cls, value: Any) -> Any:
        return within(value, _L.tools_bytes)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_settings(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        allowed = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "preserve_thinking", "clear_thinking")
        for name, setting in (value or {}).items():
            if name not in allowed or not isinstance(setting, str | bool | int | None) or len(str(setting)) > _L.stop_chars:
                raise ValueError(f"may set {', '.join(allowed)} to a plain value, not {name}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class TokenizePrompt(_Request):
    """POST /tokenize with a prompt."""

    prompt: str
    add_special_tokens: bool = True


class TokenizeChat(_Request):
    """POST /tokenize with a conversation."""

    messages: Messages


def _tokenize_type(value: Any) -> str:
    chat = "messages" in value if isinstance(value, dict) else isinstance(value, TokenizeChat)
    return "messages" if chat else "prompt"


TokenizeRequest = Annotated[
    Annotated[TokenizePrompt, Tag("prompt")] | Annotated[TokenizeChat, Tag("messages")],
    one_of("an object with a prompt or messages", _tokenize_type),
]


class ForgetRequest(_Request):
    """POST /forget."""

    cache_salt: str | None = Field(None, min_length=1, max_length=256)


class RememberRequest(_Request):
    """POST /remember."""

    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_L.texts)]
    cache_salt: str | None = Field(None, min_length=1, max_length=256)


class LoadLoraRequest(_Request):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(_Request):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    tokens: Annotated[list[Id], Field(max_length=2**17), FirstOnly()]
