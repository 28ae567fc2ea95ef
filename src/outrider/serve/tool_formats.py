"""How families of models write tool calls, as data, and which family a chat template belongs to.

A format is a frame around calls and a syntax for one call. `call_readers` reads each syntax, `tool_grammar` makes models
write it. docs/structured.md has the source of every format.
"""

# ruff: noqa: RUF001  (DeepSeek's markers have full-width bars)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["FAMILIES", "FORMATS", "Format", "Tags", "Tool", "describes_tools", "family_of"]

Tool = Mapping[str, Any]  # as in the request: {"type": "function", "function": {"name", "parameters", ...}}
Signs = tuple[tuple[str, ...], ...]  # a template has one of these sets of texts, all of them


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a call whose parameters are written one by one."""

    name_end: str  # after the function's name; empty: white space or the next tag
    key: str  # before a parameter's name
    value: tuple[str, ...]  # between a parameter's name and its value
    value_end: str
    lines: bool  # the value stands on lines of its own
    gap: str  # between two parameters, and after the name


@dataclass(frozen=True, slots=True)
class Format:
    """The syntax of tool calls in a family of models."""

    opening: str = ""  # before a call, or before the first call of a list
    syntax: str = "object"  # how a call is written: object, named, tagged, python or harmony
    key: str = "arguments"  # object: the property that holds the arguments
    head: str = ""  # named, tagged: before the function's name
    separator: str = ""  # named: between the name and the arguments
    tail: str = ""  # named, tagged: after the arguments
    tags: Tags | None = None  # tagged
    call_id: str = ""  # named: before an id that may follow the name
    before: str = ""  # between the opening and the first call
    closing: str = ""  # after a call, or after the last call of a list
    between: str = "\n"  # between two calls
    listed: bool = False  # one opening and closing around all calls
    bare: str = ""  # an answer that begins with this is also read as a call
    control: bool = False  # the markers are control tokens
    short_ids: bool = False  # the template expects ids of nine letters and digits
    text_arguments: bool = False  # the template expects the arguments of earlier calls as text
    system_tools: bool = False  # the template expects the tools in the system message
    signs: Signs = ()

    @property
    def start(self) -> str:
        """How every call starts; empty where it starts with the function's name."""
        return "{" if self.syntax == "object" else self.head

    @property
    def closings(self) -> tuple[str, ...]:
        """What may follow the calls, longest first. Models leave out the bracket of a list, or the marker after it."""
        closing = self.closing.strip()
        marker = closing.removeprefix("]")
        return tuple(text for text in dict.fromkeys((closing, marker, "]" if marker != closing else "")) if text)


_QWEN_TAGS = Tags(name_end=">", key="<parameter=", value=(">",), value_end="</parameter>", lines=True, gap="\n")
_GLM_TAGS = Tags(
    name_end="", key="<arg_key>", value=("</arg_key>", "<arg_value>"), value_end="</arg_value>", lines=False, gap="\n"
)
_DEEPSEEK = Format(
    "<｜tool▁calls▁begin｜>", syntax="named", closing="<｜tool▁calls▁end｜>", listed=True, control=True, text_arguments=True
)

# In order: a template belongs to the first family whose signs it has.
FORMATS: dict[str, Format] = {
    "harmony": Format(
        syntax="harmony",
        head="<|channel|>commentary to=functions.",
        separator=" <|constrain|>json<|message|>",
        control=True,
        signs=(("<|channel|>", "<|message|>", "functions"),),
    ),
    "mistral_args": Format(
        "[TOOL_CALLS]",
        syntax="named",
        separator="[ARGS]",
        call_id="[CALL_ID]",
        between="",
        control=True,
        short_ids=True,
        signs=(("tools", "[TOOL_CALLS]", "[ARGS]"),),
    ),
    "mistral": Format(
        "[TOOL_CALLS]",
        before="[",
        closing="]",
        between=", ",
        listed=True,
        control=True,
        short_ids=True,
        signs=(("tools", "[TOOL_CALLS]"),),
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        separator="\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    "deepseek_v31": replace(
        _DEEPSEEK,
        head="<｜tool▁call▁begin｜>",
        separator="<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        between="",
        signs=(("<｜tool▁calls▁begin｜>",),),
    ),
    "glm": Format("<tool_call>", syntax="tagged", tail="</tool_call>", tags=_GLM_TAGS, signs=(("tools", "<arg_key>"),)),
    "qwen3_coder": Format(
        "<tool_call>",
        syntax="tagged",
        head="<function=",
        tail="</function>",
        tags=_QWEN_TAGS,
        before="\n",
        closing="\n</tool_call>",
        signs=(("tools", "<tool_call>", "<function="),),
    ),
    "phi4_functools": Format("functools", before="[", closing="]", between=", ", listed=True, signs=(("tools", "functools["),)),
    "phi4": Format(
        "<|tool_call|>",
        before="[",
        closing="]<|/tool_call|>",
        between=", ",
        listed=True,
        control=True,
        system_tools=True,
        signs=(("tools", "<|/tool|>"),),
    ),
    "granite": Format(
        "<|tool_call|>",
        before="[",
        closing="]",
        between=", ",
        listed=True,
        control=True,
        signs=(("tools", "<|tool_call|>"),),
    ),
    "hermes": Format("<tool_call>", before="\n", closing="\n</tool_call>", signs=(("tools", "<tool_call>"),)),
    "llama4": Format(
        "<|python_start|>",
        syntax="python",
        before="[",
        closing="]<|python_end|>",
        between=", ",
        listed=True,
        bare="[",
        control=True,
        signs=(("tools", "<|header_start|>", "[func_name1("),),
    ),
    "llama4_json": Format(
        "<|python_start|>",
        key="parameters",
        closing="<|python_end|>",
        between="; ",
        listed=True,
        bare="{",
        control=True,
        signs=(("tools", "<|header_start|>", '"parameters"'),),
    ),
    "llama3": Format(
        "<|python_tag|>",
        key="parameters",
        between="; ",
        listed=True,
        bare="{",
        control=True,
        signs=(("tools", "<|python_tag|>"), ("tools", '"parameters"', "ipython")),
    ),
    "marked": Format("<|tool|>", control=True, signs=(("tools", "<|tool|>"),)),
    "default": Format("<tool_call>", before="\n", closing="\n</tool_call>"),
}
FAMILIES = tuple(FORMATS)


def family_of(chat_template: str | None) -> str:
    """The format of tool calls of a model with this template, or "default" if the template knows none."""
    template = chat_template or ""
    for family, form in FORMATS.items():
        if any(all(sign in template for sign in signs) for signs in form.signs):
            return family
    return "default"


def describes_tools(chat_template: str | None) -> bool:
    """Whether a template tells the model of the tools. Those of DeepSeek only write calls and results."""
    return "tools" in (chat_template or "")
