"""Chat templates of every family of tool calls, written for these tests, and what they render.

They follow the formats that docs/structured.md cites, without the system prompts of the models.
"""

# ruff: noqa: RUF001  (DeepSeek's markers have full-width bars)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.serve.tool_formats import describes_tools
from outrider.serve.tools import with_tools
from outrider.text import Tokenizer


class Template(NamedTuple):
    """A template, and the texts around what the assistant wrote."""

    text: str
    start: str
    end: str


def _chatml(system: str, call: str, between: str = "\n", end: str = "") -> Template:
    """A template in the style of ChatML."""
    return Template(
        "{%- if tools %}<|im_start|>system\n" + system + "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
        "<|im_end|>\n{% endif %}"
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}{{ '" + between.replace("\n", "\\n") + "' if not loop.first }}"
        + call + "{{ '" + end.replace("\n", "\\n") + "' if loop.last }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n",
        "<|im_end|>",
    )  # fmt: skip


_OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_LLAMA = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
_QWEN_CODER = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_PYTHONIC = (
    "{{ '[' if loop.first }}{{ c.function.name }}({% for k, v in c.function.arguments | items %}"
    "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson if v is string else v }}{% endfor %})"
)


def _deepseek(call: str, between: str) -> Template:
    """DeepSeek's templates do not tell of the tools, and expect the arguments as text."""
    return Template(
        "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content or '' }}{% if m.tool_calls %}"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '" + between + "' if not loop.first }}" + call + "{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>"
        "{{ m.content }}<｜tool▁output▁end｜>{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    )


def _mistral(call: str, opening: str, between: str, closing: str) -> Template:
    return Template(
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.tool_calls %}{{ m.content or '' }}" + opening + "{% for c in m.tool_calls %}"
        "{{ '" + between + "' if not loop.first }}" + call + "{% endfor %}" + closing + "</s>{% else %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        "[/INST]",
        "</s>",
    )


_HARMONY = Template(
    "<|start|>system<|message|>{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}\n{% endif %}# Valid channels: "
    "analysis, commentary, final.<|end|>{% if tools %}<|start|>developer<|message|>namespace functions {\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% if m.content %}<|start|>assistant<|channel|>"
    "{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} "
    "<|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "<|start|>assistant",
    "",
)

TEMPLATES: dict[str, Template] = {
    "harmony": _HARMONY,
    "mistral_args": _mistral("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}", "", "", ""),
    "mistral": _mistral(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    "deepseek_v3": _deepseek(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n"
        "```json\n{{ c.function.arguments }}\n```<｜tool▁call▁end｜>",
        "\\n",
    ),
    "deepseek_v31": _deepseek(
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments }}<｜tool▁call▁end｜>", ""
    ),
    "glm": _chatml("Write <arg_key> and <arg_value> in <tool_call>.", _GLM),
    "qwen3_coder": _chatml("Write <tool_call>\n<function=name>.", _QWEN_CODER),
    "phi4_functools": _chatml("Write functools[{...}].", "{{ 'functools[' if loop.first }}" + _OBJECT, ", ", "]"),
    "phi4": Template(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}"
        "{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}" + _OBJECT + "{% endfor %}]"
        "<|/tool_call|>{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|assistant|>",
        "<|end|>",
    ),
    "granite": _chatml("Answer with <|tool_call|> and a list.", "{{ '<|tool_call|>[' if loop.first }}" + _OBJECT, ", ", "]"),
    "hermes": _chatml("In <tool_call></tool_call>:", "<tool_call>\n" + _OBJECT + "\n</tool_call>"),
    "llama4": _chatml("<|header_start|> Use exact format: [func_name1(param1=value1)]", _PYTHONIC, ", ", "]"),
    "llama4_json": _chatml('<|header_start|> Respond in the format {"name": name, "parameters": values}.', _LLAMA, "; "),
    "llama3": _chatml('Environment: ipython. Respond in the format {"name": name, "parameters": values}.', _LLAMA, "; "),
    "marked": _chatml("After <|tool|>:", "<|tool|>" + _OBJECT),
}  # fmt: skip


def tool_calls(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """Calls as a request's messages have them."""
    return [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]


def rendered(
    tokenizer: Tokenizer, family: str, tools: Sequence[Mapping[str, Any]], message: Mapping[str, Any], **settings: Any
) -> str:
    """What an assistant's message looks like in a family's template, rendered by the template engine."""
    template = TEMPLATES[family]
    tokenizer.use_chat_template(template.text)
    messages = with_tools(
        [{"role": "user", "content": "Go."}, {"role": "assistant", "content": ""} | dict(message)],
        tools,
        family,
        describes_tools(template.text),
    )
    ids = tokenizer.chat(messages, tools=tools, add_generation_prompt=False, **settings)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    _, start, output = text.partition(template.start)
    assert start, text
    return output.rpartition(template.end)[0] if template.end else output
