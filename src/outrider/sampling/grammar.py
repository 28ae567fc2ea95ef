"""Structured output: what a text must look like, and which tokens may come next.

A `Guide` answers for one sequence, at its last token and after any path of drafted ones. The answer
is a function of the grammar and those tokens alone, so it is the same with and without speculation.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameter, OutriderError
from outrider.sampling.judge import Judge, compile_grammar

__all__ = ["KINDS", "Grammars", "Guide", "Structured"]

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "lark")
MAX_BYTES = 64 * 1024
MAX_DEPTH = 96  # brackets within brackets: parsers recurse
MAX_COMPILED = 64  # grammars kept for reuse
_PARAM = "response_format"
_LONGEST_COMPLAINT = 300


@dataclass(frozen=True, slots=True)
class Structured:
    """What the output must match.

    kind            value
    "json_schema"   a schema, as a mapping, a bool or JSON text; properties come in the schema's order
    "json_object"   nothing: any JSON object
    "regex"         a regular expression for the whole output
    "choice"        a list of strings, one of which is the output
    "grammar"       a context-free grammar, in GBNF (`root ::= ...`) or Lark (`start: ...`)
    "lark"          a grammar in llguidance's dialect of Lark
    """

    kind: str
    value: Any = None  # kept as text: equal grammars are equal and hash alike

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter(_PARAM, f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        object.__setattr__(self, "value", _text(self.kind, self.value))
        _check_size(self.kind, self.value)


def _text(kind: str, value: Any) -> str:
    """A grammar's value as one string, or InvalidParameter."""
    if kind == "json_object":
        if value is not None and value != "":
            raise InvalidParameter(_PARAM, "json_object takes no value; use json_schema to say which object")
        return ""
    if kind == "choice":
        return _choices(value)
    if kind == "json_schema" and not isinstance(value, str):
        if not isinstance(value, Mapping | bool):
            raise InvalidParameter(_PARAM, f"a JSON schema is an object or a bool, got {type(value).__name__}")
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameter(_PARAM, f"the schema cannot be written as JSON: {error}") from None
    if not isinstance(value, str) or not value:
        raise InvalidParameter(_PARAM, f"{kind} needs a non-empty string, got {type(value).__name__}")
    return value


def _choices(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidParameter(_PARAM, "choice needs a list of at least one string")
    for item in value:
        if not isinstance(item, str) or not item:
            raise InvalidParameter(_PARAM, f"choice must hold non-empty strings, got {item!r}")
    return json.dumps(list(value), ensure_ascii=False)


def _check_size(kind: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidParameter(_PARAM, f"the {kind} holds a lone surrogate, which no text can contain") from None
    if size > MAX_BYTES:
        raise InvalidParameter(_PARAM, f"the {kind} has {size} bytes; at most {MAX_BYTES} are taken")
    if _depth(text) > MAX_DEPTH:
        raise InvalidParameter(_PARAM, f"the {kind} is nested deeper than {MAX_DEPTH} brackets; flatten it, or use $ref")


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth = max(depth - 1, 0)
    return deepest


class Grammars:
    """Grammars compiled for one tokenizer, the latest of them kept. Safe to use from any thread."""

    def __init__(self, tokenizer_json: Callable[[], str] | None, vocab: int, eos_id: int | None) -> None:
        self._tokenizer_json = tokenizer_json  # None: the model has no tokenizer
        self._vocab = vocab
        self._eos_id = eos_id
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[Structured, Any] = OrderedDict()
        self._tokenizer: Any = None
        self._judge: Judge | None = None

    def check(self, structured: Structured) -> None:
        """Compile it, or say what is wrong with it."""
        self._matcher(structured)

    def guide(self, structured: Structured, stop_ids: frozenset[int]) -> Guide:
        """A guide that stands at the beginning. The text may end by any of the stop ids, or by the tokenizer's own."""
        own = frozenset() if self._eos_id is None else frozenset((self._eos_id,))
        return Guide(self._matcher(structured), self._vocab, stop_ids | own)

    def close(self) -> None:
        """End the process that compiles; it starts again when it is needed."""
        with self._compiling:
            if self._judge is not None:
                self._judge.close()

    def _matcher(self, structured: Structured) -> Any:
        found = self._find(structured)
        if found is not None:
            return found
        with self._compiling:  # one grammar may take seconds; those known are served meanwhile
            found = self._find(structured) or self._compile(structured)
            with self._lock:
                self._compiled[structured] = found
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            return found

    def _find(self, structured: Structured) -> Any:
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
            return self._compiled.get(structured)

    def _compile(self, structured: Structured) -> Any:
        if self._judge is None:
            self._load()
        assert self._judge is not None
        complaint = self._judge.complaint(structured.kind, structured.value)
        if complaint is not None:
            raise InvalidParameter(_PARAM, f"the {structured.kind} cannot be used: {complaint[:_LONGEST_COMPLAINT]}")
        return compile_grammar(self._tokenizer, structured.kind, structured.value)

    def _load(self) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise OutriderError("structured output needs llguidance: pip install 'outrider[serve]'") from None
        if self._tokenizer_json is None:
            raise InvalidParameter(_PARAM, "this model has no tokenizer, so its output cannot follow a grammar")
        text = self._tokenizer_json()
        try:
            known = LLTokenizer(text, eos_token=self._eos_id).vocab_size
            vocab = max(known, self._vocab)
            self._tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=self._eos_id)
        except ValueError as error:
            raise InvalidParameter(_PARAM, f"this model's tokenizer cannot follow a grammar: {error}") from None
        self._judge = Judge(text, vocab, self._eos_id)


class Guide:
    """Where one sequence stands in its grammar, and what may follow."""

    __slots__ = ("_ends", "_fed", "_known", "_length", "_lock", "_matcher", "_settled", "_start", "_vocab", "fault")

    def __init__(self, start: Any, vocab: int, ends: frozenset[int]) -> None:
        self.fault: str | None = None  # why the grammar can be followed no further
        self._start = start
        self._vocab = vocab
        self._ends = ends
        self._known: dict[tuple[int, ...], Tensor | None] = {}  # path -> what may follow it
        self._length = -1  # tokens of the sequence when they were asked for
        self._lock = threading.Lock()  # a drafter left behind by its deadline may still ask
        self._fed: list[int] = []  # tokens the matcher has taken
        self._settled = 0  # leading ones of them that are the sequence's for good
        self._matcher = start.deep_copy()

    def allowed(self, tokens: Sequence[int], start: int, path: Sequence[int] = ()) -> Tensor | None:
        """Which tokens may follow: (V,) bool. None where the path itself leaves the grammar.

        `tokens` are the sequence's, which only grow, its output from `start` on; `path` are drafted ones. Once the grammar is
        complete only the ends may come, and after an end only ends.
        """
        key = tuple(path)
        with self._lock:
            if self._length != len(tokens):
                self._known.clear()
                self._length = len(tokens)
            if key not in self._known:
                self._known[key] = self._ask(tokens[start:], key)
            return self._known[key]

    def forced(self, tokens: Sequence[int], start: int) -> list[int]:
        """Tokens that must follow, spelled as the tokenizer would: others may spell the same text."""
        with self._lock:
            return [] if self._take(tokens[start:], ()) else list(self._matcher.compute_ff_tokens())

    def complete(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the output so far matches the whole grammar."""
        with self._lock:
            return self._take(tokens[start:], ()) is not None and bool(self._matcher.is_accepting())

    def _ask(self, output: Sequence[int], path: tuple[int, ...]) -> Tensor | None:
        mask = self._mask(output, path)
        if not self._matcher.is_error():
            return mask
        # a limit was hit, perhaps only because of all that was tried before: a fresh start decides
        self._restart()
        if path:
            return None
        mask = self._mask(output, path)
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            self._restart()
            return torch.zeros(self._vocab, dtype=torch.bool)
        return mask

    def _mask(self, output: Sequence[int], path: tuple[int, ...]) -> Tensor | None:
        left = self._take(output, path)
        if left is None:
            return None if path else torch.zeros(self._vocab, dtype=torch.bool)
        matcher = self._matcher
        if left or matcher.is_stopped():
            mask = torch.zeros(self._vocab, dtype=torch.bool)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab]).bool()
        if matcher.is_accepting():
            mask[[token for token in self._ends if token < self._vocab]] = True
        return mask

    def _take(self, output: Sequence[int], path: tuple[int, ...]) -> list[int] | None:
        """Bring the matcher behind these tokens; those after the grammar's end, or None where it does not take them."""
        target = [*output, *path]
        same, fed = self._settled, self._fed
        while same < len(fed) and same < len(target) and fed[same] == target[same]:
            same += 1
        if same < len(fed):
            self._matcher.rollback(len(fed) - same)
            del fed[same:]
        self._settled = min(same, len(output))
        taken = self._matcher.try_consume_tokens(target[same:]) if same < len(target) else 0
        fed += target[same : same + taken]
        left = target[len(fed) :]
        return left if not left or (self._matcher.is_accepting() and self._ends.issuperset(left)) else None

    def _restart(self) -> None:
        self._matcher, self._fed, self._settled = self._start.deep_copy(), [], 0
