"""Reasoning: which markers a model writes around it, whether a prompt has opened it, and its separation from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidParameter
from outrider.sampling import Reasoning
from outrider.serve.tool_calls import overlap
from outrider.text import Tokenizer

__all__ = ["PARSERS", "ReasoningFormat", "ReasoningStream", "check_parser", "expected_reasoning", "reasoning_of"]

_TAIL = 32  # tokens at the end of a prompt that are searched for a marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning."""

    begin: str
    end: str
    signs: tuple[str, ...] = ()  # a template with all of them belongs to a model that reasons so
    implied: bool = False  # the output starts inside the reasoning, even where the prompt does not show it
    mentioned: bool = False  # the model reasons only where the prompt tells it of the marker
    field: str = "reasoning_content"  # where the template expects the reasoning of earlier messages
    channels: bool = False  # the output is a series of messages with channels


# In order: a template belongs to the first parser whose signs it has.
PARSERS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|channel|>", "<|message|>", "analysis"),
        field="thinking",
        channels=True,
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]",)),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>", ("seed:think",)),
    "granite": ReasoningFormat(
        "Here is my thought process:", "Here is my response:", ("Here is my thought process:",), mentioned=True
    ),
    "think": ReasoningFormat("<think>", "</think>", ("</think>",)),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implied=True),
}


def check_parser(name: str) -> str:
    """The name of a reasoning parser, "auto" or "none". Raises InvalidParameter for any other."""
    if name not in ("auto", "none", *PARSERS):
        raise InvalidParameter("--reasoning-parser", f"{name!r} is unknown; known: auto, none, {', '.join(PARSERS)}")
    return name


def reasoning_of(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """How a model reasons: as its parser says, or by default as its template shows, or its tokens."""
    name = tokenizer.reasoning_parser
    if name != "auto":
        return PARSERS.get(name)
    template = tokenizer.chat_template or ""
    named = (form for form in PARSERS.values() if form.signs and all(sign in template for sign in form.signs))
    spelled = (form for form in PARSERS.values() if form.signs and None not in map(tokenizer.token_id, (form.begin, form.end)))
    return next(named, None) or next(spelled, None)


def expected_reasoning(
    form: ReasoningFormat, tokenizer: Tokenizer, prompt: Sequence[int], begun: str | None = None
) -> Reasoning | None:
    """The reasoning that may stand in the output after this prompt; None where the prompt has closed it.

    `begun` is an answer that the output continues.
    """
    if begun is not None:
        is_open = begun.rfind(form.begin) > begun.rfind(form.end)
        return Reasoning(form.end) if is_open else None
    tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    if form.implied or tail.endswith(form.begin):
        return None if tail.endswith(form.end) else Reasoning(form.end)
    if tail.endswith(form.end) and not form.channels:
        return None
    if form.mentioned and form.begin not in tokenizer.decode(prompt, skip_special_tokens=False):
        return None
    return Reasoning(form.end, form.begin)


class ReasoningStream:
    """Separates reasoning from the answer in a stream of text. White space around the reasoning is dropped.

    What may still become a marker is held back.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._begin, self._end = reasoning.begin, reasoning.end
        self._buffer = ""
        self._inside = not reasoning.begin
        self._answering = False
        self._fresh = True  # nothing of the reasoning, or of the answer after it, has been written

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new text of the answer."""
        self._buffer += text
        if not self._inside and not self._answering:
            self._open()
        reasoning = self._reason() if self._inside else ""
        return reasoning, self._answer() if self._answering else ""

    def finish(self, cut: bool = False) -> tuple[str, str]:
        """What was held back, at the end of the output. `cut` drops the beginning of a marker."""
        held, self._buffer = self._buffer, ""
        if self._inside:
            held = held[: len(held) - overlap(held, self._end)] if cut else held
            return (held.lstrip() if self._fresh else held).rstrip(), ""
        if self._answering or (cut and held.strip()):
            return "", ""  # white space, or a part of the marker that opens the reasoning
        return "", held

    def _open(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(self._begin):
            self._inside, self._buffer = True, text[len(self._begin) :]
        elif not self._begin.startswith(text):
            self._answering, self._fresh = True, False

    def _reason(self) -> str:
        """Reasoning that can be written. White space and a part of the marker at the end are held back."""
        text, mark, after = self._buffer.partition(self._end)
        if mark:
            self._inside, self._answering, self._buffer = False, True, after
            safe = len(text.rstrip())
        else:
            safe = len(text[: len(text) - overlap(text, self._end)].rstrip())
            self._buffer = text[safe:]
        text = text[:safe].lstrip() if self._fresh else text[:safe]
        self._fresh = bool(mark) or (self._fresh and not text)
        return text

    def _answer(self) -> str:
        text = self._buffer.lstrip() if self._fresh else self._buffer
        self._buffer, self._fresh = "", self._fresh and not text
        return text
