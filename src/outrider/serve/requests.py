"""From what a client asked to what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core import Request
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams, Structured
from outrider.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest, Message
from outrider.serve.tools import check_tools, family_of, tool_grammar, with_tools

__all__ = ["Prepared", "as_messages", "prepare_chat", "prepare_completion"]

_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """A client's request, ready for the engine."""

    jobs: list[tuple[list[Request], str]]  # for each prompt its samples, and the method that drafts for them
    texts: list[str] = field(default_factory=list)  # what `echo` puts before each answer
    family: str = ""  # how calls of tools are written; empty where there are none
    tools: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False  # the one token generated is not to be shown

    @property
    def sequences(self) -> int:
        return sum(len(requests) for requests, _ in self.jobs)


def prepare_completion(llm: LLM, body: CompletionRequest) -> Prepared:
    """Tokenise and check every prompt of a completion."""
    prompts = _prompts(body.prompt)
    tokenizer = llm.tokenizer
    cut = body.max_tokens == 0
    if cut and not body.echo:
        raise InvalidParameter("max_tokens", "must be at least 1, unless echo is asked for")
    _check_lengths(llm, prompts)
    changes = _sampling(body) | {"max_tokens": 1 if cut else 16 if body.max_tokens is None else body.max_tokens}
    changes["logprobs"] = body.logprobs
    changes["prompt_logprobs"] = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    params = llm.default_params(**changes)
    jobs = [_requests(llm, prompt, params, body) for prompt in prompts]
    texts: list[str] = []
    if body.echo:
        texts = [own if isinstance(own, str) else tokenizer.decode(own) if tokenizer else "" for own in prompts]
    return Prepared(jobs, texts, cut=cut)


def prepare_chat(llm: LLM, body: ChatRequest) -> Prepared:
    """Render and check a conversation."""
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most == 0:
        raise InvalidParameter("max_completion_tokens", "must be at least 1")
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidParameter("messages", "this model has no tokenizer; send token ids to /v1/completions")
    messages = as_messages(body.messages)
    changes = _sampling(body) | {"max_tokens": most, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    settings: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        settings["reasoning_effort"] = body.reasoning_effort
    if body.continue_final_message:
        settings |= {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is not None:
        settings["add_generation_prompt"] = body.add_generation_prompt
    family, tools = "", [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if tools:
        choice: Any = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
        if check_tools(tools, choice) != "none":
            family = family_of(tokenizer.chat_template)
            messages = with_tools(messages, tools, family)
            settings["tools"] = None if family == "default" else tools
            forced = tool_grammar(tools, choice, family, body.parallel_tool_calls is not False, tokenizer.table().get)
            changes |= {"skip_special_tokens": False} | ({} if forced is None else {"structured": forced})
    try:
        ids = tokenizer.chat(messages, **settings)
        jobs = [_requests(llm, ids, llm.default_params(**changes), body)]
    except InvalidParameter as error:
        raise _renamed(error, body) from None
    return Prepared(jobs, family=family, tools=tools)


def as_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: text joined, nothing that was not said."""
    out = []
    for message in messages:
        own = message.model_dump(include={"role", "content", "name", "tool_calls", "tool_call_id"}, exclude_none=True)
        if isinstance(message.content, list):
            own["content"] = "".join(part.text for part in message.content)
        own.setdefault("content", "")
        out.append(own)
    return out


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _check_lengths(llm: LLM, prompts: list[str | list[int]]) -> None:
    """Refuse what cannot fit before it is tokenised."""
    longest = llm.tokenizer.longest if llm.tokenizer is not None else 0
    for prompt in prompts:
        if isinstance(prompt, str) and longest and len(prompt) > longest * llm.max_model_len:
            raise InvalidParameter(
                "prompt", f"has {len(prompt)} characters; the context holds {llm.max_model_len} tokens, output included"
            )


def _requests(llm: LLM, prompt: str | list[int], params: SamplingParams, body: GenerationRequest) -> tuple[list[Request], str]:
    asked: Any = body.speculation
    if asked is not None and not isinstance(asked, bool):
        asked = asked.model_dump(include={"enabled", "method", "max_tokens"}, exclude_none=True)
    return llm.requests(prompt, params, asked, body.cache_salt, body.priority or 0)


def _sampling(body: GenerationRequest) -> dict[str, Any]:
    changes = {name: getattr(body, name) for name in _COPIED if getattr(body, name) is not None}
    structured = _structured(body)
    return changes if structured is None else changes | {"structured": structured}


def _structured(body: GenerationRequest) -> Structured | None:
    """The one grammar a request names, in any of the ways to name one."""
    found = _named_grammars(body)
    if not found:
        return None
    if len(found) > 1:
        raise InvalidParameter("response_format", "only one of response_format, structured_outputs and guided_* may be given")
    ((kind, value),) = found
    return Structured(kind, value)


def _named_grammars(body: GenerationRequest) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    form, other = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        found.append(("json_object", None))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidParameter("response_format", "json_schema needs its schema")
        found.append(("json_schema", form.json_schema.schema_))
    if other is not None and other.json_object:
        found.append(("json_object", None))
    named: Mapping[str, tuple[Any, ...]] = {
        "json_schema": (body.guided_json, other and other.json_),
        "regex": (body.guided_regex, other and other.regex),
        "choice": (body.guided_choice, other and other.choice),
        "grammar": (body.guided_grammar, other and other.grammar),
    }
    return found + [(kind, value) for kind, values in named.items() for value in values if value is not None]


def _renamed(error: InvalidParameter, body: ChatRequest) -> InvalidParameter:
    """The error in the words the client used."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    name = names.get(error.param)
    return error if name is None else InvalidParameter(name, str(error).partition(": ")[2])
