"""Grammars compiled for one tokenizer: a pool of compile sandboxes, and caches of compiled and refused grammars."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from outrider.errors import InvalidParameter, OutriderError, QueueFull
from outrider.sampling import matcher
from outrider.sampling.guide import Compiled, Guide, MaskWorkers
from outrider.sampling.reasoning_guide import ReasoningGuide
from outrider.sampling.sandbox import Sandbox, SandboxLost
from outrider.sampling.structured import Structured
from outrider.sampling.vocabulary import Vocabulary

__all__ = ["Grammars"]

COMPILE_S = 3.0  # for one grammar; common ones take milliseconds
MAX_COMPILING = 32  # grammars that wait for the compiler; more are refused
MAX_COMPILED, MAX_REFUSED = 64, 1024  # kept for reuse
MAX_CACHED_BYTES = 4 << 20  # of grammar text in each of the two caches
REFUSED_S = 60.0  # how long a refusal is cached: a timeout on a busy machine must not last
_SANDBOXES = 2  # sandboxes that compile grammars, and as many that compute masks
_COMPILE_NICENESS, _FOLLOW_NICENESS = 5, 19  # the engine comes first, then what others wait for
_PARAM = "response_format"
_LONGEST_COMPLAINT = 300
V = TypeVar("V")


class LruCache(Generic[V]):
    """The least recently used values are dropped, by number and by the bytes of their grammars."""

    def __init__(self, items: int, size: int) -> None:
        self._items, self._size = items, size
        self._values: OrderedDict[Structured, V] = OrderedDict()
        self._bytes = 0

    def get(self, structured: Structured) -> V | None:
        if structured in self._values:
            self._values.move_to_end(structured)
        return self._values.get(structured)

    def put(self, structured: Structured, value: V) -> None:
        self.drop(structured)
        self._values[structured] = value
        self._bytes += len(structured.value)
        while len(self._values) > self._items or (self._bytes > self._size and len(self._values) > 1):
            self.drop(next(iter(self._values)))

    def drop(self, structured: Structured) -> None:
        if self._values.pop(structured, None) is not None:
            self._bytes -= len(structured.value)


class Grammars:
    """Compiles and caches grammars. Any thread may call it; only `check` waits."""

    def __init__(self, tokenizer_json: Callable[[], str] | None, vocab: int, eos_id: int | None) -> None:
        self._tokenizer_json = tokenizer_json  # None: the model has no tokenizer
        self._vocab = vocab
        self._eos_id = eos_id
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._compiled: LruCache[Future[Compiled]] = LruCache(MAX_COMPILED, MAX_CACHED_BYTES)
        self._refused: LruCache[tuple[float, InvalidParameter]] = LruCache(MAX_REFUSED, MAX_CACHED_BYTES)
        self._compiling: dict[Structured, Future[Compiled]] = {}
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._tokenizer_text = ""
        self._sandboxes = self._new_sandboxes(_COMPILE_NICENESS, "outrider-compile")
        self.masks = MaskWorkers(self._new_sandboxes(_FOLLOW_NICENESS, "outrider-follow"))

    def check(self, structured: Structured) -> None:
        """Compile it, or say what is wrong with it."""
        if structured.reasoning is not None:
            end = structured.reasoning.end
            if not self._words().spell(end.encode()):
                raise InvalidParameter("reasoning", f"this model's tokenizer cannot spell the marker {end!r}")
        if structured.answer is not None:
            self.compiled(structured.answer).result()

    def compiled(self, structured: Structured) -> Future[Compiled]:
        """The grammar, compiled once for all requests. The future raises InvalidParameter where the grammar is wrong.

        Raises QueueFull where too many grammars wait to be compiled.
        """
        with self._lock:
            known = self._compiled.get(structured) or self._compiling.get(structured) or self._refusal(structured)
            if known is not None:
                return known
            if len(self._compiling) >= MAX_COMPILING:
                raise QueueFull(f"{MAX_COMPILING} grammars wait to be compiled; try again later")
            sandbox = min(self._sandboxes, key=lambda sandbox: sandbox.load)
            future = self._compiling[structured] = sandbox.submit(lambda: self._compile(structured, sandbox))
        future.add_done_callback(lambda _: self._keep(structured, future))
        return future

    def guide(self, structured: Structured, stop_ids: frozenset[int]) -> Guide | ReasoningGuide:
        """A guide at the start of the output. The output may end with any of the stop ids or with the tokenizer's EOS."""
        ends = stop_ids | (frozenset() if self._eos_id is None else frozenset((self._eos_id,)))
        grammar = structured.answer
        answer = None if grammar is None else partial(self._guide, grammar, ends)
        if structured.reasoning is not None:
            return ReasoningGuide(structured.reasoning, self._words(), self._vocab, ends, answer)
        assert grammar is not None
        return self._guide(grammar, ends)

    def _guide(self, grammar: Structured, ends: frozenset[int]) -> Guide:
        return Guide(self.compiled(grammar), self.masks, self._vocab, ends)

    def _words(self) -> Vocabulary:
        self._load()
        assert self._vocabulary is not None
        return self._vocabulary

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for sandbox in (*self._sandboxes, *self.masks.sandboxes):
            sandbox.close()

    def _refusal(self, structured: Structured) -> Future[Compiled] | None:
        kept = self._refused.get(structured)
        if kept is None:
            return None
        since, error = kept
        if time.monotonic() - since > REFUSED_S:
            self._refused.drop(structured)
            return None
        future: Future[Compiled] = Future()
        future.set_exception(InvalidParameter(error.param, str(error).partition(": ")[2]))
        return future

    def _keep(self, structured: Structured, future: Future[Compiled]) -> None:
        with self._lock:
            self._compiling.pop(structured, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._compiled.put(structured, future)
            elif isinstance(error, InvalidParameter):
                self._refused.put(structured, (time.monotonic(), error))

    def _compile(self, structured: Structured, sandbox: Sandbox) -> Compiled:
        """Compile in the sandbox, on its thread; then again in this process, where masks are computed faster."""
        self._load()
        try:
            complaint = sandbox.ask(["compile", structured.spec], COMPILE_S)
        except SandboxLost as lost:
            complaint = f"{lost}, to compile; it is too long or too large: make it smaller"
        if complaint is not None:
            raise InvalidParameter(_PARAM, f"the {structured.kind} cannot be used: {complaint[:_LONGEST_COMPLAINT]}")
        try:
            start = matcher.compile_grammar(self._tokenizer, structured.spec, matcher.QUICK_LIMITS)
        except ValueError:  # beyond the limits of this process
            start = None
        return Compiled(structured.spec, start)

    def _new_sandboxes(self, niceness: int, name: str) -> list[Sandbox]:
        def setup() -> tuple[Any, ...]:
            return self._tokenizer_text, self._tokenizer.vocab_size, self._eos_id, matcher.SANDBOX_LIMITS, niceness

        return [Sandbox(setup, name) for _ in range(_SANDBOXES)]

    def _load(self) -> None:
        with self._loading:
            if self._tokenizer is not None:
                return
            try:
                from llguidance import LLTokenizer
            except ImportError:
                raise OutriderError("structured output needs llguidance: pip install 'outrider[serve]'") from None
            if self._tokenizer_json is None:
                raise InvalidParameter(_PARAM, "this model has no tokenizer, so its output cannot follow a grammar")
            text = self._tokenizer_text = self._tokenizer_json()
            try:
                known = LLTokenizer(text, eos_token=self._eos_id).vocab_size
                self._tokenizer = LLTokenizer(text, n_vocab=max(known, self._vocab), eos_token=self._eos_id)
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab)
            except ValueError as error:
                raise InvalidParameter(_PARAM, f"this model's tokenizer cannot follow a grammar: {error}") from None
