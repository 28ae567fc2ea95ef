"""From the API's requests to the engine's requests: templates, tokens, sampling parameters and grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from outrider.core import Request
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter
from outrider.sampling import Markers, Reasoning, SamplingParams, Structured
from outrider.serve.errors import ApiError
from outrider.serve.reasoning import ReasoningFormat, expected_reasoning, reasoning_of
from outrider.serve.rules import Rules, Traits
from outrider.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest, Message, TokenizeChat, TokenizePrompt
from outrider.serve.settings import Limits
from outrider.serve.tool_formats import describes_tools, family_of
from outrider.serve.tool_grammar import tool_grammar, tool_or_answer, with_whitespace, wrapped
from outrider.serve.tools import check_tools, with_tools
from outrider.text import Tokenizer

__all__ = [
    "PreparedRequest",
    "as_messages",
    "count_sequences",
    "grammar_of",
    "may_name_grammar",
    "prepare_chat",
    "prepare_completion",
    "prepare_message",
    "renamed",
    "tokenize",
]

NO_RULES = Rules()
_COPIED = {field.name for field in fields(SamplingParams)} & GenerationRequest.model_fields.keys() - {"max_tokens"}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A client's request, ready for the engine."""

    jobs: list[tuple[list[Request], str]]  # for each prompt: its samples, and the method that drafts for them
    texts: list[str] = field(default_factory=list)  # texts that `echo` puts before each answer
    family: str = ""  # format of tool calls; empty if there are no tools
    tools: list[dict[str, Any]] = field(default_factory=list)
    reasoning: Reasoning | None = None  # that the output may begin with
    markers: Markers | None = None  # counts its tokens
    channels: bool = False  # the output is a series of messages with channels
    cut: bool = False  # max_tokens is 0: the one generated token is dropped
    logprob_entries: int = 0  # number of prompt log probabilities in the answer

    @property
    def sequences(self) -> int:
        return sum(len(requests) for requests, _ in self.jobs)


def count_sequences(body: GenerationRequest, limits: Limits) -> int:
    """The number of sequences of a request. Raises ApiError above the limit."""
    prompts = len(_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1
    sequences = prompts * (body.n or 1)
    if sequences > limits.sequences:
        raise ApiError(400, f"n: prompts times n must be at most {limits.sequences}", "n")
    return sequences


def prepare_completion(llm: LLM, body: CompletionRequest, limits: Limits, rules: Rules = NO_RULES) -> PreparedRequest:
    """Tokenise and check every prompt of a completion request."""
    prompts = _prompts(body.prompt)
    tokenizer = llm.tokenizer
    cut = body.max_tokens == 0
    if cut and not body.echo:
        raise InvalidParameter("max_tokens", "must be at least 1, unless echo is set")
    _check_lengths(llm, prompts)
    changes = _sampling(body) | {"max_tokens": 1 if cut else 16 if body.max_tokens is None else body.max_tokens}
    changes["logprobs"] = body.logprobs
    changes["prompt_logprobs"] = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    params = llm.default_params(**changes)
    jobs = [_requests(llm, prompt, params, body, rules) for prompt in prompts]
    entries = _prompt_entries(jobs, body, limits)
    texts: list[str] = []
    if body.echo:
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) if tokenizer else "" for prompt in prompts]
    return PreparedRequest(jobs, texts, cut=cut, logprob_entries=entries)


def prepare_message(llm: LLM, body: ChatRequest, limits: Limits, rules: Rules = NO_RULES) -> PreparedRequest:
    """A chat request whose output may fill the context before it has `max_tokens`."""
    return prepare_chat(llm, body, limits, rules, fills=True)


def prepare_chat(
    llm: LLM,
    body: ChatRequest,
    limits: Limits,  # noqa: ARG001 (as for completions)
    rules: Rules = NO_RULES,
    fills: bool = False,
) -> PreparedRequest:
    """Render and check the conversation of a chat request. `fills`: a limit of tokens beyond the context is taken as its end."""
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        raise InvalidParameter("max_completion_tokens", "must be at least 1")
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidParameter("messages", "this model has no tokenizer; send token ids to /v1/completions")
    _check_messages(llm, body.messages)
    form = reasoning_of(tokenizer)
    if form is None and body.thinking_token_budget is not None:
        raise InvalidParameter(
            "thinking_token_budget",
            "this model's template shows no markers of reasoning; the server's --reasoning-parser names them",
        )
    has_developer = "developer" in (tokenizer.chat_template or "")
    messages = as_messages(body.messages, form.field if form is not None else "", has_developer)
    changes = _sampling(body) | {"max_tokens": max_tokens, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    settings = _template_settings(body)
    tools, family = _tools(body), ""
    if check_tools(tools, _tool_choice(body)) != "none":
        family = family_of(tokenizer.chat_template)
        messages = with_tools(messages, tools, family, describes_tools(tokenizer.chat_template))
        settings["tools"] = None if family == "default" else tools
    try:
        ids = tokenizer.chat(messages, max_chars=tokenizer.longest * llm.max_model_len, **settings)
        if fills and max_tokens is not None:
            changes["max_tokens"] = max(1, min(max_tokens, llm.max_model_len - len(ids)))
        reasoning = None if form is None else _reasoning(form, tokenizer, ids, body)
        if family or reasoning is not None:
            changes["skip_special_tokens"] = False
        changes["structured"] = _after_reasoning(grammar_of(llm, body), reasoning, body)
        jobs = [_requests(llm, ids, llm.default_params(**changes), body, rules)]
    except InvalidParameter as error:
        raise renamed(error, body) from None
    channels = form is not None and form.channels and reasoning is not None
    markers = None if reasoning is None else Markers(reasoning, tokenizer.bytes_of)
    if markers is not None:
        markers.count([0])  # the bytes of all tokens are looked up here and not where answers are written
    return PreparedRequest(jobs, family=family, tools=tools, reasoning=reasoning, markers=markers, channels=channels)


def _template_settings(body: ChatRequest) -> dict[str, Any]:
    """The variables of the template. An effort also switches reasoning in templates that know only on and off."""
    settings: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        settings |= {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    settings |= body.chat_template_kwargs or {}
    if body.continue_final_message:
        settings |= {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is not None:
        settings["add_generation_prompt"] = body.add_generation_prompt
    return settings


def _reasoning(form: ReasoningFormat, tokenizer: Tokenizer, ids: Sequence[int], body: ChatRequest) -> Reasoning | None:
    begun = str(body.messages[-1].content or "") if body.continue_final_message else None
    reasoning = expected_reasoning(form, tokenizer, ids, begun)
    return None if reasoning is None else replace(reasoning, budget=body.thinking_token_budget)


def _after_reasoning(answer: Structured | None, reasoning: Reasoning | None, body: ChatRequest) -> Structured | None:
    """The grammar of an answer, from where the reasoning ends, and the budget of the reasoning."""
    if reasoning is None:
        return answer
    if answer is not None:
        return replace(answer, reasoning=reasoning)
    return None if body.thinking_token_budget is None else Structured("text", reasoning=reasoning)


def may_name_grammar(body: GenerationRequest) -> bool:
    """Whether the request may need a grammar, which is compiled before the request is prepared."""
    named = (body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice)
    return any(value is not None for value in (*named, body.guided_grammar)) or bool(getattr(body, "tools", None))


def grammar_of(llm: LLM, body: GenerationRequest) -> Structured | None:
    """The grammar that the output must follow, or None."""
    tokenizer = llm.tokenizer
    if not isinstance(body, ChatRequest) or tokenizer is None:
        return _structured(body)
    if check_tools(_tools(body), _tool_choice(body)) != "none":
        return _with_calls(body, tokenizer)
    answer, form = _structured(body), reasoning_of(tokenizer)
    has_channels = answer is not None and form is not None and form.channels and not body.continue_final_message
    return wrapped(answer, tokenizer.token_id) if answer is not None and has_channels else answer


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _tool_choice(body: ChatRequest) -> Any:
    return body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()


def _with_calls(body: ChatRequest, tokenizer: Tokenizer) -> Structured | None:
    """The grammar of an answer that may call tools: a required call, or a call or an answer in the requested format."""
    tools, choice, answer = _tools(body), _tool_choice(body), _structured(body)
    space = _whitespace(body)
    if space is not None:
        for tool in tools:
            tool["function"]["parameters"] = with_whitespace(tool["function"].get("parameters") or {}, space)
    must_call = check_tools(tools, choice) != "auto"
    if must_call and answer is not None:
        raise InvalidParameter(
            "response_format", "cannot be kept where tool_choice makes the model call a tool; leave one of the two out"
        )
    if not must_call and answer is None:
        return None
    family, parallel = family_of(tokenizer.chat_template), body.parallel_tool_calls is not False
    calls = tool_grammar(tools, choice if must_call else "required", family, parallel, tokenizer.token_id)
    assert calls is not None
    return calls if answer is None else tool_or_answer(calls, answer, family, tokenizer.token_id)


def as_messages(
    messages: list[Message], reasoning: str = "reasoning_content", has_developer: bool = True
) -> list[dict[str, Any]]:
    """Messages as templates expect them, without fields that the request did not set.

    Where a template does not know the developer, what a developer says is the system's: else it would be left out or refused.
    `reasoning` is the field where the template expects the reasoning of earlier messages. A message of gpt-oss that calls
    tools has one text, so there the reasoning gives way to the content.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        fields = message.model_dump(include={"role", "content", "name", "tool_calls", "tool_call_id"}, exclude_none=True)
        fields.setdefault("content", "")
        if message.role == "developer" and not has_developer:
            fields["role"] = "system"
            if [other["role"] for other in out] == ["system"]:  # many templates take no second one
                out[0]["content"] += f"\n\n{fields['content']}"
                continue
        is_single = reasoning == "thinking" and bool(fields.get("tool_calls")) and bool(fields["content"])
        if message.reasoning_content and reasoning and not is_single:
            fields[reasoning] = message.reasoning_content
        out.append(fields)
    return out


def tokenize(llm: LLM, body: TokenizePrompt | TokenizeChat) -> Sequence[int]:
    """Token ids of a text or a conversation."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    if isinstance(body, TokenizeChat):
        _check_messages(llm, body.messages)
        return tokenizer.chat(as_messages(body.messages), max_chars=tokenizer.longest * llm.max_model_len)
    _check_chars(llm, "prompt", len(body.prompt))
    return tokenizer.encode(body.prompt) if body.add_special_tokens else tokenizer.encode_bare(body.prompt)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _check_lengths(llm: LLM, prompts: list[str | list[int]]) -> None:
    """Refuse prompts that cannot fit the context, before they are tokenised or their ids are checked."""
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_chars(llm, "prompt", len(prompt))
        else:
            llm.intake.check_length(len(prompt))


def _check_messages(llm: LLM, messages: list[Message]) -> None:
    """Refuse conversations that cannot fit the context, before the template is rendered.

    Only texts that every template writes are counted. Some templates drop earlier assistant messages, or white space
    around a text.
    """
    written = as_messages([message for message in messages if message.role != "assistant"])
    _check_chars(llm, "messages", sum(len(message["content"].strip()) for message in written))


def _check_chars(llm: LLM, param: str, chars: int) -> None:
    """Refuse a text that cannot fit the context even if every token were the longest one."""
    if llm.tokenizer is not None and chars > llm.tokenizer.longest * llm.max_model_len:
        raise InvalidParameter(
            param,
            f"has {chars} characters; the context holds {llm.max_model_len} tokens, output included",
            "context_length_exceeded",
        )


def _prompt_entries(jobs: list[tuple[list[Request], str]], body: CompletionRequest, limits: Limits) -> int:
    """The number of prompt log probabilities in the answer. Raises InvalidParameter above the limit."""
    params = jobs[0][0][0].params
    if params.prompt_logprobs is None:
        return 0
    tokens = sum(len(request.prompt_ids) for requests, _ in jobs for request in requests)
    entries = tokens * (params.prompt_logprobs + 1)
    if entries > limits.logprob_entries:
        raise InvalidParameter(
            "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
            f"{tokens} prompt tokens, counted n times, with {params.prompt_logprobs + 1} log probabilities each make {entries}; "
            f"at most {limits.logprob_entries} fit in one answer: request fewer, or send fewer prompts at once",
        )
    return entries


def _requests(
    llm: LLM, prompt: str | list[int], params: SamplingParams, body: GenerationRequest, rules: Rules
) -> tuple[list[Request], str]:
    speculation, rule = _speculation(params, body, rules)
    prediction = body.prediction.text if isinstance(body, ChatRequest) and body.prediction is not None else None
    if prediction is not None:
        _check_chars(llm, "prediction", len(prediction))
    lora = body.model if body.model in llm.loras else None
    requests, method = llm.intake.prepare(
        prompt, params, speculation, body.cache_salt, body.priority or 0, lora=lora, prediction=prediction
    )
    if body.tag is None and rule is None:
        return requests, method
    return [replace(request, tag=body.tag, rule=rule) for request in requests], method


def _speculation(params: SamplingParams, body: GenerationRequest, rules: Rules) -> tuple[Any, str | None]:
    """What a request sets of speculation, with what a rule sets, and the name of that rule."""
    requested: Any = body.speculation
    if requested is not None and not isinstance(requested, bool):
        requested = requested.model_dump(exclude_unset=True, exclude_none=True)
    if not rules.rules:
        return requested, None
    rule = rules.first(Traits(body.tag, body.model or "", params.temperature, _format(body)))
    if rule is None:
        return requested, None
    return rule.merged(requested, params), rule.name


def _format(body: GenerationRequest) -> str:
    """The format of the answer, as rules name it."""
    for kind, _ in _named_grammars(body):
        return kind
    tools = isinstance(body, ChatRequest) and check_tools(_tools(body), _tool_choice(body)) != "none"
    return "tools" if tools else "text"


def _sampling(body: GenerationRequest) -> dict[str, Any]:
    changes = {name: getattr(body, name) for name in _COPIED if getattr(body, name) is not None}
    structured = _structured(body)
    return changes if structured is None else changes | {"structured": structured}


def _structured(body: GenerationRequest) -> Structured | None:
    """The grammar of a request, from whichever field sets it."""
    grammars = _named_grammars(body)
    if not grammars:
        return None
    if len(grammars) > 1:
        raise InvalidParameter("response_format", "only one of response_format, structured_outputs and guided_* may be set")
    ((kind, value),) = grammars
    return Structured(kind, value, _whitespace(body) if kind in ("json_schema", "json_object") else None)


def _whitespace(body: GenerationRequest) -> str | None:
    """The pattern of white space in JSON that the request sets, or None."""
    other = body.structured_outputs
    return body.guided_whitespace_pattern or (other.whitespace_pattern if other is not None else None)


def _named_grammars(body: GenerationRequest) -> list[tuple[str, Any]]:
    grammars: list[tuple[str, Any]] = []
    form, other = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        grammars.append(("json_object", None))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidParameter("response_format", "json_schema needs its schema")
        grammars.append(("json_schema", form.json_schema.schema_))
    if other is not None and other.json_object:
        grammars.append(("json_object", None))
    named: Mapping[str, tuple[Any, ...]] = {
        "json_schema": (body.guided_json, other and other.json_),
        "regex": (body.guided_regex, other and other.regex),
        "choice": (body.guided_choice, other and other.choice),
        "grammar": (body.guided_grammar, other and other.grammar),
    }
    return grammars + [(kind, value) for kind, values in named.items() for value in values if value is not None]


def renamed(error: InvalidParameter, body: GenerationRequest) -> InvalidParameter:
    """The error with the parameter names of the chat API. A grammar that was built from tools is called by their name."""
    if not isinstance(body, ChatRequest):
        return error
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.tools and _structured(body) is None:
        names["response_format"] = "tools"
    name = names.get(error.param)
    if name is None:
        return error
    message = str(error).partition(": ")[2].replace("the lark cannot be used", "the grammar of their calls cannot be used")
    return InvalidParameter(name, message, error.code)
