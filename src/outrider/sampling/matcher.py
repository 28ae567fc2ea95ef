"""Compiling and following a grammar with llguidance.

A sandbox (see `sandbox`) runs this file in a separate process, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

Spec = tuple[str, str, str | None]  # a grammar: its kind, its text, and the white space between the parts of JSON

WHITESPACE = r"\x20"  # in JSON: at most one blank, because indentation would cost tokens
# Limits of one step. In the server's process a row of 1,000 items of an ambiguous grammar takes up to 30 ms and holds the
# interpreter's lock. The process of a sandbox serves nothing else and can be killed.
QUICK_LIMITS = {"max_items_in_row": 1_000, "step_max_items": 10_000, "max_lexer_states": 50_000}
SANDBOX_LIMITS = {"max_items_in_row": 16_000, "step_max_items": 50_000, "max_lexer_states": 50_000}
_ADDRESSES = 4 << 30  # bytes a sandbox may map, reserved ones included
_MEMORY = 1 << 30  # bytes it may write to
_STACK = 4 << 20  # half the default of a thread: what compiles here also fits the server's stack
_MAX_FOLLOWED = 16  # texts a sandbox follows at once; the least recently used is dropped and replayed when it returns


class Step(NamedTuple):
    """The tokens that may follow a text."""

    bits: bytes | None  # one bit for each token, lowest first; None where the grammar allows no token
    accepting: bool  # the text is complete
    fault: str | None = None  # the grammar can be followed no further, and why


def compile_grammar(tokenizer: Any, spec: Spec, limits: Mapping[str, Any]) -> Any:
    """A matcher at the start of the output. The message of ValueError names the fault of the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, _source(*spec), log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    reason = " ".join(_error_of(matcher).split())
    if reason.startswith("NoExtension") or not (reason or any(allowed)):
        raise ValueError("nothing matches it")
    if reason:
        raise ValueError(reason)
    return matcher


def _source(kind: str, text: str, whitespace: str | None) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind in ("json_schema", "json_object"):
        space: Any = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
        return LLMatcher.grammar_from_json_schema(text or '{"type": "object"}', defaults=space)
    if kind == "choice":
        words = (json.dumps(word, ensure_ascii=False) for word in json.loads(text))
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(words))
    return grammar_from(kind, text)  # type: ignore[arg-type]


def _error_of(matcher: Any) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()  # type: ignore[no-any-return]


class Follower:
    """The state of one text in a grammar. It is not thread-safe.

    Drafted paths are followed by copies of the matcher. In an ambiguous grammar llguidance's `rollback` can leave rows of
    the abandoned path, and the next mask then holds tokens that the grammar forbids.
    """

    def __init__(self, start: Any, ends: frozenset[int]) -> None:
        self._start = start
        self._ends = ends  # tokens that may come once the grammar is complete
        self._text = _Branch(start.deep_copy())
        self._draft: _Branch | None = None  # the drafted path followed last

    def step(self, output: Sequence[int], path: Sequence[int] = ()) -> Step | None:
        """The tokens that may follow the text and a path of drafted tokens; None where that is unknown for the path.

        The text only grows. A matcher that hit a limit allows everything or nothing from then on, so its answers are not
        used. Earlier paths may have used up the limit, so for the text itself a fresh matcher decides.
        """
        branch = self._branch(output, path)
        step = self._step_of(branch, path)
        if not branch.matcher.is_error():
            return step
        self._draft = None
        if path:
            return None
        branch = self._restart(output)
        step = self._step_of(branch, path)
        if not branch.matcher.is_error():
            return step
        fault = _error_of(branch.matcher)
        branch = self._restart(output)
        accepting = not branch.matcher.is_error() and self._follows(branch) and bool(branch.matcher.is_accepting())
        return Step(None, accepting, fault)

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that must follow, in the tokenizer's spelling. Other tokens may spell the same text."""
        branch = self._branch(output, ())
        forced = [] if branch.refused else list(branch.matcher.compute_ff_tokens())
        if branch.matcher.is_error():
            self._restart(output)
            return []
        return forced

    def _step_of(self, branch: _Branch, path: Sequence[int]) -> Step | None:
        if not self._follows(branch):
            return None if path else Step(None, False)
        matcher = branch.matcher
        bits = None if branch.refused or matcher.is_stopped() else matcher.compute_bitmask()
        return Step(bits, bool(matcher.is_accepting()))

    def _follows(self, branch: _Branch) -> bool:
        """Whether the grammar takes the tokens; after its end only ends may come."""
        return not branch.refused or (bool(branch.matcher.is_accepting()) and self._ends.issuperset(branch.refused))

    def _branch(self, output: Sequence[int], path: Sequence[int]) -> _Branch:
        """A matcher that has consumed these tokens."""
        text = self._text
        if text.matcher.is_error():
            text = self._restart(output)
        elif text.length < len(output):
            self._draft = None
            text.take(output[text.length :])
        if not path:
            return text
        draft = self._draft
        if draft is None or draft.tokens != list(path[: draft.length]):
            draft = self._draft = _Branch(text.matcher.deep_copy(), [], list(text.refused))
        draft.take(path[draft.length :])
        return draft

    def _restart(self, output: Sequence[int]) -> _Branch:
        self._text, self._draft = _Branch(self._start.deep_copy()), None
        self._text.take(output)
        return self._text


class _Branch:
    """A matcher and the tokens it was shown."""

    def __init__(self, matcher: Any, tokens: list[int] | None = None, refused: list[int] | None = None) -> None:
        self.matcher = matcher
        self.tokens = tokens or []
        self.refused = refused or []  # the first token that the matcher did not take, and all after it

    @property
    def length(self) -> int:
        return len(self.tokens)

    def take(self, tokens: Sequence[int]) -> None:
        taken = 0 if self.refused or not tokens else self.matcher.try_consume_tokens(list(tokens))
        self.tokens += tokens
        self.refused += tokens[taken:]


def answers(tokenizer: str, vocab: int, eos_id: int | None, limits: Mapping[str, Any], niceness: int) -> Callable[..., Any]:
    """Limit what this process may take, and return the function that answers a sandbox's questions."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # each thread's stack counts as memory
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a parser that panics writes there
    with suppress(ImportError, ValueError, OSError):  # not every system limits memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    with suppress(OSError):
        os.nice(niceness)
    from llguidance import LLTokenizer

    process = _Process(LLTokenizer(tokenizer, n_vocab=vocab, eos_token=eos_id), limits)
    threading.stack_size(_STACK)
    thread = ThreadPoolExecutor(1)
    return lambda verb, *question: thread.submit(getattr(process, verb), *question).result()


class _Process:
    """The calls that a sandbox's process answers."""

    def __init__(self, tokenizer: Any, limits: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._followers: OrderedDict[int, Follower] = OrderedDict()

    def compile(self, spec: Spec) -> str | None:
        """None for a grammar that compiles, else its fault."""
        try:
            compile_grammar(self._tokenizer, spec, self._limits)
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    def step(self, spec: Spec, name: int, ends: Sequence[int], output: Sequence[int]) -> tuple[Any, ...]:
        """The tokens that may follow the text of this name: the fields of a `Step`."""
        if name not in self._followers:
            self._followers[name] = Follower(compile_grammar(self._tokenizer, spec, self._limits), frozenset(ends))
            if len(self._followers) > _MAX_FOLLOWED:
                self._followers.popitem(last=False)
        self._followers.move_to_end(name)
        step = self._followers[name].step(output)
        assert step is not None  # it has no path
        return tuple(step)
