"""`outrider chat`: a conversation in the terminal, with its speed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from types import FrameType
from typing import Annotated, Any

import typer

from outrider.errors import InvalidParameter, OutriderError
from outrider.options import Dtype, MaxTokens, Threads, set_threads
from outrider.serve.chat_partner import LocalModel, NoTemplate, Partner, Prompt, RemoteModel, Summary
from outrider.serve.chat_terminal import LiveStats, Screen, TypedMessages, finished, piped_message, totals

__all__ = ["Chat", "chat"]

HELP = """\
/reset            forget the conversation
/system TEXT      set the system message; without TEXT: remove it
/set NAME VALUE   temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, seed; without NAME: show all
/spec on|off      switch speculation on or off; or the name of a loaded method
/stats            statistics of this conversation
/quit             leave, as does Ctrl-D
A line that ends in a backslash goes on in the next; \"\"\" begins and ends several lines. Ctrl-C stops an answer."""

_KINDS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}


class Chat:
    """A conversation: its messages, the sampling parameters and the statistics of its answers."""

    def __init__(self, partner: Partner, params: dict[str, Any], as_text: bool = False, system: str = "") -> None:
        self.partner = partner
        self.params = params
        self.as_text = as_text  # the model continues one text instead of answering in turns
        self.system = system
        self.speculation: bool | dict[str, Any] = True
        self.summaries: list[Summary] = []
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._screen = Screen()

    def run(self) -> None:
        """Read and answer messages until the user leaves or the input ends."""
        screen, read = self._screen, piped_message
        if sys.stdin.isatty():
            read = TypedMessages().read
            screen.note(f"{self.partner.name} · /help shows the commands")
        if self.as_text:
            screen.note("This model was not made for conversation: it continues your text as it stands.")
        while (message := read()) is not None:
            try:
                if message.startswith("/"):
                    if not self.command(message):
                        break
                elif message.strip():
                    self.say(message)
            except OutriderError as error:
                screen.note(f"error: {error}")

    def command(self, line: str) -> bool:
        """Run a command line that begins with a slash. Returns False if the chat ends."""
        name, _, argument = line[1:].partition(" ")
        commands = {
            "help": self._help,
            "reset": self._reset,
            "system": self._set_system,
            "set": self._set,
            "spec": self._spec,
            "stats": self._stats,
        }
        if name in ("quit", "exit"):
            return False
        if name not in commands:
            raise InvalidParameter(f"/{name}", f"is no command; there are /{', /'.join(commands)}, /quit")
        commands[name](argument.strip())
        return True

    def say(self, message: str) -> None:
        """Send a message and show the answer."""
        prompt = self._prompt(message)
        try:
            answer = self._answer(prompt)
        except NoTemplate:
            self.as_text = True
            self._screen.note("This model has no chat template: it continues your text as it stands.")
            prompt = self._prompt(message)
            answer = self._answer(prompt)
        if isinstance(prompt, str):
            self._text = prompt + answer
        else:
            self._messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def _prompt(self, message: str) -> Prompt:
        if self.as_text:
            gap = "\n" if self._text and not self._text.endswith("\n") else ""
            return self._text + gap + message
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages, {"role": "user", "content": message}]

    def _answer(self, prompt: Prompt) -> str:
        """Stream one answer to the screen. A stopped answer keeps the text so far."""
        chunks, stats, parts = self.partner.answer(prompt, self.params, self.speculation), LiveStats(), list[str]()
        summary: Summary | None = None
        reasoned = False  # the screen shows reasoning, which is no part of the answer
        with _stoppable(self.partner.stops_between_rounds) as stopped, contextlib.suppress(KeyboardInterrupt):
            first = next(chunks)  # a refusal is raised before the status row is drawn
            with self._screen.status() as row:
                for chunk in chain([first], chunks):
                    stats.add(chunk.guessed)
                    gap = "\n\n" if chunk.text and reasoned and not any(parts) else ""
                    reasoned = reasoned or bool(chunk.reasoning)
                    parts.append(chunk.text)
                    self._screen.text(chunk.reasoning + gap + chunk.text)
                    row.show(stats.line())
                    summary = chunk.summary or summary
                    if stopped():
                        break
        chunks.close()  # type: ignore[attr-defined]
        self._screen.text("\n")
        if summary is not None:
            self.summaries.append(summary)
        self._screen.note(finished(summary) if summary is not None else f"stopped · {stats.tokens} tokens")
        return "".join(parts)

    def _help(self, _: str) -> None:
        self._screen.note(HELP)

    def _reset(self, _: str) -> None:
        self._messages, self._text, self.summaries = [], "", []
        self._screen.note("forgotten")

    def _set_system(self, text: str) -> None:
        if self.as_text:
            raise InvalidParameter("/system", "has no meaning here: this model continues text")
        self.system = text
        self._screen.note(f"system message: {text or 'none'}")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            return self._screen.note("\n".join(f"{param} {setting}" for param, setting in self.params.items()))
        if name not in _KINDS:
            raise InvalidParameter("/set", f"unknown {name!r}; there are {', '.join(_KINDS)}")
        try:
            self.params = self.params | {name: _KINDS[name](value)}
        except ValueError:
            raise InvalidParameter("/set", f"{name} must be a number, got {value!r}") from None
        return self._screen.note(f"{name} {self.params[name]}")

    def _spec(self, word: str) -> None:
        if word:
            self.speculation = {"on": True, "off": False}.get(word, {"enabled": True, "method": word})
        on = self.speculation
        self._screen.note(f"speculation {'by ' + on['method'] if isinstance(on, dict) else 'on' if on else 'off'}")

    def _stats(self, _: str) -> None:
        self._screen.note(totals(self.summaries))


@contextlib.contextmanager
def _stoppable(stops_between_rounds: bool) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C stops the answer, after the engine's round where one runs here. A second one leaves the program."""
    pressed: list[int] = []

    def press(number: int, _: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            sys.exit(130)
        if not stops_between_rounds:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def chat(
    model: Annotated[str | None, typer.Argument(help="Model directory or hub id. Default: the bundled model.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to a running `outrider serve` instead, as in http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="The server's key.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="How to draft, as in `outrider generate`. Default: auto."),
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=0, max=256, help="Maximum number of draft tokens per round.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    as_text: Annotated[
        bool | None,
        typer.Option(
            "--text/--turns",
            help="Continue a text, or answer in turns through the chat template. "
            "Default: a text for the bundled model and where there is no template.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens with this total probability.")] = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers. Default: a new seed for each answer.")] = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Chat in the terminal, with a model in this process or a server, and see how fast it goes. /help shows the commands."""
    if url is not None and model is not None:
        raise InvalidParameter("--url", "cannot be combined with a model: the server has loaded one")
    partner = RemoteModel(url, api_key) if url is not None else _load(model, method, draft_tokens, dtype, threads)
    params = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens} | ({} if seed is None else {"seed": seed})
    Chat(partner, params, partner.name == "pyrite" if as_text is None else as_text, system).run()


def _load(model: str | None, method: str | None, draft_tokens: int | None, dtype: str, threads: int | None) -> LocalModel:
    from outrider.config import speculation_of_flags
    from outrider.engine.llm import LLM
    from outrider.terminal import PlainConsole

    set_threads(threads)
    speculation = speculation_of_flags(method, None, draft_tokens)
    with PlainConsole(stderr=True).status("loading"):
        llm = LLM(model, speculation=speculation, dtype=dtype)
    return LocalModel(llm, llm.directory.name)
