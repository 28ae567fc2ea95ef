"""A chat answer as a sequence of parts (reasoning, text, tool calls), for APIs whose answers are lists of items or blocks.

The deltas of the chat answer are read one by one. A complete answer is read in the same way as a stream, so that both
have the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outrider.engine.outputs import CompletionOutput, StreamPiece
from outrider.serve.answers import ChatAnswer
from outrider.serve.errors import ApiError

__all__ = ["Part", "Parts", "PartsAnswer", "Step"]


@dataclass(slots=True)
class Part:
    """A stretch of an answer: reasoning, text, or one tool call with its arguments as text."""

    kind: Literal["reasoning", "text", "call"]
    index: int  # its place in the answer
    call_id: str = ""
    name: str = ""
    written: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.written)


class Step(NamedTuple):
    """A part begins, grows by `text`, or ends."""

    action: Literal["open", "add", "close"]
    part: Part
    text: str = ""


class Parts:
    """Turns the deltas of a chat answer into steps. At most one part, the last, is open."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open = False

    def push(self, delta: Mapping[str, Any]) -> Iterator[Step]:
        """The steps of one delta."""
        if delta.get("reasoning_content"):
            yield from self._write("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._write("text", delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if call.get("id") is not None:
                yield from self._begin(Part("call", len(self.parts), call["id"], function["name"]))
            if function.get("arguments"):
                yield self._add(function["arguments"])

    def close(self) -> Iterator[Step]:
        """The end of the open part, if there is one."""
        if self._open:
            self._open = False
            yield Step("close", self.parts[-1])

    def _write(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if not self._open or self.parts[-1].kind != kind:
            yield from self._begin(Part(kind, len(self.parts)))
        yield self._add(text)

    def _begin(self, part: Part) -> Iterator[Step]:
        yield from self.close()
        self.parts.append(part)
        self._open = True
        yield Step("open", part)

    def _add(self, text: str) -> Step:
        self.parts[-1].written.append(text)
        return Step("add", self.parts[-1], text)


class PartsAnswer(ChatAnswer):
    """A chat answer in the format of another API, which names its events and has one choice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts = Parts()
        self.begun = False  # whether the first events were made
        self.document: dict[str, Any] = {}  # the complete answer, when the output has ended

    def check(self, outputs: Sequence[CompletionOutput]) -> None:
        """Raise the API error of an output that failed or that the stopping server cut off."""
        super().check(outputs)
        if any(output.finish_reason == "abort" for output in outputs):
            raise ApiError(503, "the server stopped before the answer was complete", code="draining")

    def whole(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The answer to a request that does not stream: what remains of its events."""
        for output in outputs:
            for _ in self._events([(0, StreamPiece(0, output.text, output.token_ids, output.from_draft, output))]):
                pass
        return self.document

    def reasoning_tokens(self, usage: Mapping[str, Any]) -> int:
        """The tokens of reasoning, of a chat answer's usage."""
        return (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0

    def lead(self, event: dict[str, Any]) -> str:
        return f"event: {event['type']}\ndata: "

    def closing(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return self.framed([*self._begin(), *self.failed(error)])

    def _events(self, chunks: Sequence[tuple[int, StreamPiece]]) -> Iterator[dict[str, Any]]:
        for index, chunk in chunks:
            self._counts[index] += len(chunk.token_ids)
            yield from self._begin()
            choices = self.chunk_choices(index, chunk)
            for choice in choices:
                for step in self.parts.push(choice["delta"]):
                    yield from self.step(step)
            if chunk.output is not None:
                yield from self._end(chunk.output, choices[-1]["finish_reason"])

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self.begun:
            self.begun = True
            yield from self.beginning()

    def _end(self, output: CompletionOutput, reason: str) -> Iterator[dict[str, Any]]:
        try:
            self.check([output])
        except ApiError as error:
            yield from self.failed(error)
            return
        for step in self.parts.close():
            yield from self.step(step, cut=reason == "length")
        yield from self.ending(output, reason)

    def beginning(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        raise NotImplementedError

    def step(self, step: Step, cut: bool = False) -> Iterator[dict[str, Any]]:
        """The events of a step. `cut`: the output ended at its limit of tokens, inside this part."""
        raise NotImplementedError

    def ending(self, output: CompletionOutput, reason: str) -> Iterator[dict[str, Any]]:
        """The last events, which also make the document."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The last events of an answer that failed."""
        raise NotImplementedError
