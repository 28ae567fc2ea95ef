"""Tools: how a model is told of them, made to call them, and how its calls are read back.

Pure functions of text and the request's `tools`; nothing here calls a tool.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidParameter
from outrider.sampling import Structured
from outrider.sampling.judge import WHITESPACE

__all__ = [
    "FAMILIES",
    "CallDelta",
    "ToolCall",
    "ToolStream",
    "check_tools",
    "family_of",
    "parse_tool_calls",
    "tool_grammar",
    "with_tools",
]

Tool = Mapping[str, Any]  # as the request has it: {"type": "function", "function": {"name", "parameters", ...}}
ToolChoice = str | Mapping[str, Any] | None  # "none", "auto", "required", or {"type": "function", "function": {"name"}}
MAX_TOOLS = 128
_MOST_CALLS = 8  # in one answer, where a grammar makes it call
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls."""

    opening: str  # before a call, or before the first of a list
    key: str = "arguments"  # the property that holds them
    before: str = ""  # between the opening and the call's object
    closing: str = ""  # after a call, or after the last of a list
    between: str = "\n"  # from one call to the next
    listed: bool = False  # one opening and closing around all calls
    named: bool = False  # name[ARGS]{...} instead of an object
    bare: bool = False  # an answer that begins with an object is a call too
    control: bool = False  # the opening is one control token


_FORMATS = {
    "hermes": Format("<tool_call>", before="\n", closing="\n</tool_call>"),
    "llama3": Format("<|python_tag|>", key="parameters", between="; ", listed=True, bare=True),
    "mistral": Format("[TOOL_CALLS]", before="[", closing="]", between=", ", listed=True, control=True),
    "mistral_args": Format("[TOOL_CALLS]", between="", named=True, control=True),
    "marked": Format("<|tool|>", control=True),
    "default": Format("<tool_call>", before="\n", closing="\n</tool_call>"),
}
FAMILIES = tuple(_FORMATS)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call a model made. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a stream adds: text of the answer, or a piece of call `index`; id and name come once, with its first piece."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def check_tools(tools: Sequence[Tool], choice: ToolChoice = None) -> str:
    """Refuse tools that are malformed (InvalidParameter names "tools" or "tool_choice").

    Returns the choice in short: "none", "auto", "required", or the name of the one tool to call.
    """
    names = [_checked_name(tool) for tool in tools]
    if len(names) > MAX_TOOLS:
        raise InvalidParameter("tools", f"holds {len(names)} tools; at most {MAX_TOOLS} are taken")
    if len(set(names)) < len(names):
        raise InvalidParameter("tools", f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidParameter("tool_choice", f"must be none, auto, required or a function, got {choice!r}")
        if choice == "required" and not tools:
            raise InvalidParameter("tool_choice", "is required, but there are no tools")
        return choice if tools else "none"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise InvalidParameter("tool_choice", f"names {name!r}; the tools are: {', '.join(names) or 'none'}")
    return str(name)


def _checked_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidParameter("tools", 'must hold {"type": "function", "function": {"name": ..., "parameters": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("tools", f"a function's name has 1 to 64 letters, digits or any of _ . -, got {name!r}")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidParameter("tools", f"the parameters of {name!r} must be a JSON schema")
    return name


def family_of(chat_template: str | None) -> str:
    """The format in which a model with this template writes its calls; "default" where it knows none of them."""
    template = chat_template or ""
    if "tools" not in template:
        return "default"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    return "marked" if "<|tool|>" in template else "default"


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: str) -> list[dict[str, Any]]:
    """Messages as the template takes them: arguments of earlier calls as objects, not as text.

    A template that knows no tools gets all of it in the text of messages, in the default format. Pass the
    result to `Tokenizer.chat(messages, tools=None if family == "default" else tools)`.
    """
    out = [_with_objects(message) for message in messages]
    if family != "default":
        return out
    told = [_told(message) for message in out]
    first = told[0]["content"] + "\n\n" if told and told[0]["role"] == "system" else ""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    system = {"role": "system", "content": first + _DEFAULT_PROMPT.format(tools=lines)}
    return [system, *(told[1:] if first else told)]


_DEFAULT_PROMPT = """You may call these functions, one JSON object per line:
{tools}

To call one, write its name and arguments as JSON between two tags, and nothing after them:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Results come back between <tool_response> tags."""


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return out


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # whatever the caller wrote, it is theirs
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of plain text, for templates that know only those."""
    role, content = message.get("role"), message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        "<tool_call>\n" + json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}) + "\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": role, "content": "\n".join([content, *calls] if content else calls) if calls else content}


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    family: str,
    parallel: bool = True,
    token_id: Callable[[str], int | None] | None = None,
) -> Structured | None:
    """What makes the model call: a grammar in its own format for "required" and for a named tool, None otherwise.

    `token_id` finds control tokens by name (`Tokenizer.table().get`); without it they are written as text.
    """
    wanted = check_tools(tools, choice)
    if wanted in ("none", "auto"):
        return None
    named = [tool["function"] for tool in tools if wanted in ("required", tool["function"]["name"])]
    own = _FORMATS[family]
    opening = "" if own.bare else _marker(own, token_id)
    several = f" ({_quoted(own.between) if own.between else ''} {'call' if own.listed else 'whole'}){{0,{_MOST_CALLS - 1}}}"
    repeated = several if parallel and wanted == "required" else ""
    before, closing = (_quoted(text) if text else "" for text in (own.before, own.closing))
    rules = [
        f"start: {opening} {before} call{repeated} {closing}" if own.listed else f"start: whole{repeated}",
        *([] if own.listed else [f"whole: {opening} {before} call {closing}"]),
        "call: " + " | ".join(f"call{i}" for i in range(len(named))),
    ]
    for i, function in enumerate(named):
        rules.append(f"call{i}: {_call(own, function['name'], f'args{i}')}")
        rules.append(f"args{i}: %json {json.dumps(_schema(function), ensure_ascii=False)}")
    return Structured("lark", "\n".join(rules))


def _marker(own: Format, token_id: Callable[[str], int | None] | None) -> str:
    token = token_id(own.opening) if own.control and token_id is not None else None
    return _quoted(own.opening) if token is None else f"<[{token}]>"


def _call(own: Format, name: str, arguments: str) -> str:
    if own.named:
        return f"{_quoted(name + '[ARGS]')} {arguments}"
    head = f'{{"name": {json.dumps(name)}, "{own.key}": '
    return f'{_quoted(head)} {arguments} "}}"'


def _schema(function: Tool) -> dict[str, Any]:
    """The schema of a function's arguments; keywords that cannot be enforced are passed over, as OpenAI does."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    own = schema.get("x-guidance")
    return schema | {"x-guidance": {"lenient": True, "whitespace_pattern": WHITESPACE} | (own if isinstance(own, dict) else {})}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def parse_tool_calls(text: str, tools: Sequence[Tool], family: str) -> tuple[str | None, list[ToolCall]]:
    """The answer's text (None where there is only a call) and the calls in it. Text that is no sound call stays text."""
    stream = ToolStream(tools, family)
    content = ""
    calls: list[ToolCall] = []
    for delta in [*stream.push(text), *stream.finish()]:
        if delta.index is None:
            content += delta.content
        elif delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name or "", delta.arguments))
        else:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + delta.arguments)
    return (content if content or not calls else None), calls


class ToolStream:
    """The same, piece by piece: text that may be the beginning of a call is held back.

    A call is told once its name is known to be a tool's; from then on its arguments flow. White space
    around calls is dropped.
    """

    def __init__(self, tools: Sequence[Tool], family: str) -> None:
        self._format = _FORMATS[family]
        self._names = {tool["function"]["name"] for tool in tools}
        self._short_ids = family.startswith("mistral")
        self._buffer = ""  # text not decided about
        self._call: _CallReader | None = None
        self._after = False  # a call has just ended: another may follow without an opening
        self._calls = 0
        self._fresh = True  # nothing but white space so far

    @property
    def called(self) -> bool:
        """Whether a call was seen: the finish reason is then "tool_calls"."""
        return self._calls > 0

    def push(self, text: str) -> list[CallDelta]:
        """What a new piece of text amounts to."""
        self._buffer += text
        out: list[CallDelta] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[CallDelta]:
        """What was held back, now that nothing follows."""
        out: list[CallDelta] = []
        if self._call is not None and not self._call.told:
            self._buffer = self._call.text + self._buffer
            self._call = None
        cut = self._after and self._format.closing.strip().startswith(self._buffer.strip())
        if not cut and (self._buffer.strip() or not self.called):
            self._say(self._buffer, out)
        self._buffer = ""
        return out

    def _step(self, out: list[CallDelta]) -> bool:
        """Decide about the front of the buffer; False where more text is needed."""
        if not self._buffer:
            return False
        if self._call is not None:
            return self._read(self._call, out)
        if self._after:
            return self._between()
        return self._look(out)

    def _look(self, out: list[CallDelta]) -> bool:
        """Find the next opening; text before it is the answer's."""
        marker = self._format.opening
        bare = self._format.bare and self._fresh and self._buffer.lstrip().startswith("{")
        found = 0 if bare else self._buffer.find(marker)
        if found >= 0:
            text, rest = self._buffer[:found], self._buffer[found + (0 if bare else len(marker)) :]
            if text.strip():
                self._say(text.rstrip(), out)
            self._call = _CallReader(self._format, "" if bare else marker, self._names)
            self._buffer = rest
            return True
        safe = len(self._buffer) - _overlap(self._buffer, marker)
        safe = len(self._buffer[:safe].rstrip())  # white space before a call is no answer
        self._say(self._buffer[:safe], out)
        self._buffer = self._buffer[safe:]
        return False

    def _read(self, call: _CallReader, out: list[CallDelta]) -> bool:
        """Give a call its text until it ends; one that is no call becomes text again."""
        used = call.take(self._buffer)
        self._buffer = self._buffer[used:]
        if not call.sound:
            self._call, self._fresh = None, False
            self._say("" if call.told else call.text, out)
            return True
        if call.name is not None:
            first = not call.told
            piece = call.news()
            if first:
                out.append(CallDelta(index=self._calls, id=_new_id(self._short_ids), name=call.name, arguments=piece))
                self._calls += 1
            elif piece:
                out.append(CallDelta(index=self._calls - 1, arguments=piece))
        if call.done:
            self._call, self._after = None, True
        return call.done

    def _between(self) -> bool:
        """After a call: its closing, then perhaps another one."""
        own, text = self._format, self._buffer.lstrip()
        closing, between = own.closing.strip(), own.between.strip()
        if not text:
            return False
        if own.listed and (text.startswith("{") or (between and text.startswith(between))):
            self._call = _CallReader(own, "", self._names)
            self._buffer = text.removeprefix(between)
        elif closing and closing.startswith(text) and text != closing:
            return False
        elif closing and text.startswith(closing):
            self._buffer = text.removeprefix(closing)
        self._after = False
        return True

    def _say(self, text: str, out: list[CallDelta]) -> None:
        text = text.lstrip() if self._fresh and self.called else text
        if text:
            out.append(CallDelta(content=text))
            self._fresh = self._fresh and not text.strip()


class _CallReader:
    """One call, letter by letter: {"name": ..., "arguments": {...}}, or name[ARGS]{...}."""

    def __init__(self, own: Format, opening: str, names: Set[str]) -> None:
        self.sound = True
        self.done = False
        self.told = False
        self.name: str | None = None  # once the call may be told
        self._format = own
        self._names = names
        self._text = [opening]  # all of it until it is told, in case it is no call
        self._depth = 0
        self._string = self._escaped = False
        self._key: str | None = None  # the property being read
        self._word: list[str] = []  # its name, or what is not yet told of its value
        self._values: dict[str, str] = {}

    @property
    def text(self) -> str:
        return "".join(self._text)

    def take(self, text: str) -> int:
        """Read on; how many letters were its own."""
        used = 0
        while used < len(text) and self.sound and not self.done:
            self._letter(text[used])
            if not self.told:
                self._text.append(text[used])
            used += 1
        self._decide()
        return used

    def news(self) -> str:
        """What the arguments gained since the last time."""
        first, self.told = not self.told, True
        if self._key in _ARGUMENTS:
            piece = "".join(self._word)
            self._word.clear()
        else:
            piece = next((self._values.pop(key) for key in _ARGUMENTS if key in self._values), "{}" if first else "")
        return piece.lstrip() if first else piece

    def _decide(self) -> None:
        """Whether it can be told by now: a tool's name is known, and its arguments have begun or are not there."""
        if self.told or not self.sound:
            return
        name = self._values.get("name")
        if name is None:
            self.sound = not self.done
            return
        reading = "".join(self._word) if self._key in _ARGUMENTS else ""
        begun = next((self._values[key] for key in _ARGUMENTS if key in self._values), reading).lstrip()
        self.sound = name in self._names and (not begun or begun.startswith("{"))
        if self.sound and (begun or self.done):
            self.name = name

    def _letter(self, letter: str) -> None:
        if self._depth == 0:
            self._open(letter)
            return
        if self._string:
            self._word.append(letter)
            self._string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
            return
        if letter == '"':
            self._string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if self._depth == 0 or (self._depth == 1 and letter == ","):
            self._end_value()
            self.done = self._depth == 0
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._begin_value()
        else:
            self._word.append(letter)
            if self._format.named and self._depth == 1 and letter == "}":
                self._end_value()
                self.done = True

    def _open(self, letter: str) -> None:
        """Before the object: white space, a list's bracket, or a name."""
        if self._format.named:
            self._word.append(letter)
            if letter == "]" and (name := "".join(self._word)).endswith("[ARGS]"):
                self._values["name"], self._key, self._depth = name.removesuffix("[ARGS]").strip(), "arguments", 1
                self._word.clear()
            self.sound = len(self._word) < _LONGEST_NAME
        elif letter == "{":
            self._depth = 1
        elif not (letter.isspace() or (letter == "[" and self._format.listed)):
            self.sound = False

    def _begin_value(self) -> None:
        self._key = _text_of(self._word)
        self._word.clear()
        self.sound = self._key in _KEYS and self._key not in self._values

    def _end_value(self) -> None:
        if self._key is None:  # an empty object, or a comma too many
            self.sound = False
            return
        value = _text_of(self._word) if self._key == "name" else "".join(self._word).rstrip()
        self.sound = value is not None
        self._values[self._key] = value or ""
        self._word.clear()
        self._key = None


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_LONGEST_NAME = 80


def _text_of(raw: Sequence[str]) -> str | None:
    try:
        value = json.loads("".join(raw))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, marker: str) -> int:
    """How many letters at the end of the text may begin the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _new_id(short: bool) -> str:
    """Mistral's templates take nine letters and digits."""
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return "call_" + secrets.token_hex(12)
