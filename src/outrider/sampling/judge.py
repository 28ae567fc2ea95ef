"""A process of its own that compiles grammars first, because a hostile one can hang the compiler or crash it.

Run as a script, it imports nothing of this package: it reads one JSON line with the tokenizer, then one
per grammar, and answers each with one. `Judge` is the other end of the pipe.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

WHITESPACE = r"\x20|\x0A(\x20{0,16}|\x09{0,4})"  # in JSON: unbounded, a model may write nothing else
_PATIENCE_S = 3.0  # for one grammar; most take milliseconds
_LOADING_S = 60.0  # for the process to start and read the tokenizer
_MEMORY = 4 << 30
_STACK = 4 << 20  # half of what a thread has by default: what passes here has room there


def limits() -> Any:
    """What a grammar may cost while it is compiled and at each token."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=16_000, max_lexer_states=50_000, verbose_errors=False)


def compile_grammar(tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher that stands at the beginning; ValueError says what is wrong with the grammar."""
    from llguidance import LLMatcher, grammar_from

    if kind in ("json_schema", "json_object"):
        space: Any = {"whitespace_pattern": WHITESPACE}
        source = LLMatcher.grammar_from_json_schema(text or '{"type": "object"}', defaults=space)
    elif kind == "choice":
        source = LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, json.loads(text))))
    else:
        source = grammar_from(kind, text)  # type: ignore[arg-type]
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if reason.startswith("NoExtension") or not (reason or any(allowed)):
        raise ValueError("nothing matches it")
    if reason:
        raise ValueError(reason)
    return matcher


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Judge:
    """Lets another process compile a grammar, and replaces that process when it hangs or dies."""

    def __init__(self, tokenizer: str, vocab: int | None, eos_id: int | None) -> None:
        self._opening = json.dumps([tokenizer, vocab, eos_id])
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def complaint(self, kind: str, text: str) -> str | None:
        """What is wrong with a grammar; None where it can be used."""
        if self._process is None:
            self._start()
            if self._ask(self._opening, _LOADING_S) is None:
                return "the compiler could not be started for this model's tokenizer"
        answer = self._ask(json.dumps([kind, text]), _PATIENCE_S)
        if answer is None:
            return "it takes too long to compile, or too much memory; make it smaller"
        return json.loads(answer)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        weakref.finalize(self, _end, self._process)

    def _ask(self, line: str, patience: float) -> str | None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=patience)
        except (OSError, queue.Empty):
            answer = None
        if answer is None:
            self.close()
        return answer


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    """Pass answers on, and None when the process is gone."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):  # what was left to write has no reader
            process.stdin.close()


def _serve() -> None:
    """The script: answer null for a grammar that compiles, else what is wrong with it."""
    from llguidance import LLTokenizer

    text, vocab, eos_id = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=eos_id)
    print("null", flush=True)
    for line in sys.stdin:
        kind, source = json.loads(line)
        try:
            compile_grammar(tokenizer, kind, source)
            complaint = None
        except Exception as error:
            complaint = str(error) or type(error).__name__
        print(json.dumps(complaint), flush=True)


if __name__ == "__main__":
    with suppress(ImportError, ValueError, OSError):  # not every system limits memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    threading.stack_size(_STACK)
    worker = threading.Thread(target=_serve, daemon=True)
    worker.start()
    worker.join()
