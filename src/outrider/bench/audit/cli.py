"""`outrider audit`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from outrider.errors import InvalidParameter
from outrider.options import json_object, spread
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from outrider.bench.audit.audit import AuditPlan
    from outrider.bench.audit.records import Side

__all__ = ["audit"]

_errors = PlainConsole(stderr=True)
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class AuditFlags:
    """Options of `outrider audit`."""

    self_: Annotated[bool, typer.Option("--self", help="Audit `outrider serve`: its model with and without speculation.")] = False
    url: Annotated[str | None, typer.Option(help="A server that speculates, with or without /v1.")] = None
    plain_url: Annotated[str | None, typer.Option(help="The same model without speculation. Default: --url.")] = None
    command: Annotated[
        str | None, typer.Option(help="Start the speculating server with this; {port} becomes a free port of 127.0.0.1.")
    ] = None
    plain_command: Annotated[str | None, typer.Option(help="Start the plain server with this. Default: --command's.")] = None
    body: Annotated[str | None, typer.Option(help="JSON added to the requests that speculate.")] = None
    plain_body: Annotated[
        str | None, typer.Option(help="JSON added to the plain requests, as in '{\"speculation\": false}'.")
    ] = None
    transformers: Annotated[Path | None, typer.Option(help="A model folder for Transformers' generate instead of servers.")] = (
        None
    )
    assistant: Annotated[Path | None, typer.Option(help="With --transformers: the folder of its assistant_model.")] = None
    prompt_lookup: Annotated[int | None, typer.Option(min=1, help="With --transformers: prompt_lookup_num_tokens.")] = None
    dtype: Annotated[str, typer.Option(help="With --transformers: float32, bfloat16 or auto.")] = "auto"
    model: Annotated[
        str | None, typer.Option(help="With --self: a model directory or hub id. Otherwise: the name to ask servers for.")
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")] = False
    workload: Annotated[str, typer.Option(help="Comma-separated: code, editing, json, or JSONL files of prompts.")] = (
        "editing,code"
    )
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests: faults of 1 in 1,000 tokens may be missed.")] = False
    seed: Annotated[int, typer.Option(min=0, help="Seeds of all requests are counted from it.")] = 0
    near_tie: Annotated[float, typer.Option(min=0, help="Margin in nats up to which a divergence is rounding.")] = 0.25
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds after which no further request is sent.")] = 1800.0
    max_requests: Annotated[int, typer.Option(min=1, help="Requests after which no further one is sent.")] = 20_000
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte after which a request has failed.")] = 300.0
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a started server may take.")] = 600.0
    name: Annotated[str | None, typer.Option(help="Title of the card.")] = None
    output: Annotated[Path | None, typer.Option(help="Folder for the card: audit.json, audit.md and audit.html.")] = None


@spread
def audit(flags: AuditFlags) -> None:
    """Is an engine's speculation lossless, and what is it worth?

    Sends the same requests to an engine with and without speculation and compares texts, margins, sampled distributions,
    schemas, log probabilities, acceptance and speed. Works with every server that speaks OpenAI's API (vLLM, SGLang,
    llama.cpp, Ollama, Outrider) and with Transformers. A key in OUTRIDER_API_KEY is sent as a bearer token. Prints one JSON
    line last; exits with 0 where speculation is lossless, 1 where it is not or cannot be judged, 130 after Ctrl-C.
    """
    plan = _plan(flags)
    with ExitStack() as stack:
        plain, speculative, title = _sides(flags, stack)
        try:
            result = _run(plain, speculative, plan)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
    _report(result, {"plain": plain.name, "speculative": speculative.name}, flags.name or title, flags.output)


def _plan(flags: AuditFlags) -> AuditPlan:
    from outrider.bench.audit.audit import AuditPlan
    from outrider.bench.audit.cases import QUICK, STANDARD
    from outrider.bench.workloads import Conversation, load_prompts

    prompts: list[str] = []
    for workload in flags.workload.split(","):
        items = [item for category in load_prompts(workload).categories.values() for item in category]
        prompts += [item.turns[0] if isinstance(item, Conversation) else item for item in items if not isinstance(item, tuple)]
    size = QUICK if flags.quick else STANDARD
    limits = (flags.near_tie, flags.time_limit, flags.max_requests)
    return AuditPlan(_alternating(prompts), size, flags.seed, *limits)


def _alternating(prompts: list[str]) -> list[str]:
    """Prompts from both ends of the list in turn, so that a few of them are of several workloads."""
    return [prompts[i // 2] if i % 2 == 0 else prompts[-1 - i // 2] for i in range(len(prompts))]


def _sides(flags: AuditFlags, stack: ExitStack) -> tuple[Side, Side, str]:
    """Both sides and a title. Servers that are started end with the stack."""
    if sum(map(bool, (flags.self_, flags.url, flags.command, flags.transformers))) != 1:
        raise InvalidParameter("audit", "needs one of --self, --url, --command and --transformers")
    if flags.transformers is not None:
        return _transformers_sides(flags, flags.transformers)
    if flags.self_:
        model = f" {quote(flags.model)}" if flags.model else ""
        command = f"{quote(sys.executable)} -m outrider.cli serve{model} --port {{port}}"
        flags = replace(flags, command=command, plain_body='{"speculation": false}', model=None)
    if not (flags.plain_url or flags.plain_command or flags.plain_body or flags.body):
        raise InvalidParameter(
            "--plain-url", "is missing: name a plain server (--plain-url, --plain-command) or a switch (--plain-body)"
        )
    return _http_sides(flags, stack)


def _http_sides(flags: AuditFlags, stack: ExitStack) -> tuple[Side, Side, str]:
    from outrider.bench.audit.http_side import HttpSide
    from outrider.bench.audit.launched import launched
    from outrider.bench.client import Endpoint

    def server(url: str | None, command: str | None, default: str) -> str:
        if command is not None:
            with _errors.status(f"starting {command}"):
                return stack.enter_context(launched(command, flags.start_timeout))
        return (url or default).rstrip("/").removesuffix("/v1")

    bodies = json_object("--plain-body", flags.plain_body or "{}"), json_object("--body", flags.body or "{}")
    address = server(flags.url, flags.command, "")
    plain_address = server(flags.plain_url, flags.plain_command, address)
    key, sides = os.environ.get("OUTRIDER_API_KEY"), []
    for label, where, extra in (("plain", plain_address, bodies[0]), ("speculative", address, bodies[1])):
        shown = _place(flags, label, where) + (f" with {json.dumps(extra)}" if extra else "")
        endpoint = Endpoint(where, flags.model or "", flags.chat, key, flags.timeout, extra)
        sides.append(HttpSide(f"{label}: {shown}", endpoint))
    return sides[0], sides[1], "Outrider" if flags.self_ else flags.command or address


def _place(flags: AuditFlags, label: str, address: str) -> str:
    """The command or the address of a side, without the folders of the files it names."""
    command = flags.plain_command if label == "plain" and flags.plain_command else flags.command
    if command is None or (label == "plain" and flags.plain_url):
        return address
    return " ".join(Path(word).name if word.startswith("/") else word for word in command.split())


def _transformers_sides(flags: AuditFlags, folder: Path) -> tuple[Side, Side, str]:
    from outrider.bench.audit.transformers_side import load_sides

    if (flags.assistant is None) == (flags.prompt_lookup is None):
        raise InvalidParameter("--transformers", "needs one of --assistant and --prompt-lookup")
    with _errors.status("loading"):
        plain, other = load_sides(folder, flags.assistant, flags.prompt_lookup, flags.dtype)
    how = f"prompt lookup of {flags.prompt_lookup}" if flags.assistant is None else "assistant_model"
    engine = f"Transformers {version('transformers')} generate, {folder.name}, {flags.dtype}"
    plain.name, other.name = f"plain: {engine}", f"speculative: {engine}, {how}"
    return plain, other, f"Transformers, {how}"


def _run(plain: Side, speculative: Side, plan: AuditPlan) -> dict[str, Any]:
    from outrider.bench.audit.audit import audit as run
    from outrider.bench.audit.audit import planned_requests

    total = min(planned_requests(plan), plan.requests)
    _errors.print(f"about {total} requests, at most {plan.seconds:g} seconds")
    with _shown(total) as advance:
        return run(plain, speculative, plan, advance)


@contextmanager
def _shown(total: int) -> Iterator[Any]:
    """A bar on a terminal, a line for each stage elsewhere."""
    stages: set[str] = set()
    with Progress(console=_errors, transient=True, disable=not _errors.is_terminal) as progress:
        task = progress.add_task("warming up", total=total)

        def advance(stage: str, sent: int) -> None:
            progress.update(task, description=stage, completed=sent)
            if stage not in stages and not _errors.is_terminal:
                _errors.print(f"{sent} of about {total}: {stage}")
            stages.add(stage)

        yield advance


def _report(result: dict[str, Any], sides: dict[str, str], title: str, output: Path | None) -> None:
    """The card on the console and in files, one JSON line, and the exit code."""
    from outrider.bench.audit.card import markdown_card, write_card
    from outrider.bench.audit.verdict import LOSSLESS, SAME
    from outrider.bench.environment import environment

    card = {"name": title, "sides": sides, "about": environment()} | result
    _errors.print(markdown_card(card), soft_wrap=True)
    if output is not None:
        _errors.print("card: " + ", ".join(map(str, write_card(card, output))), soft_wrap=True)
    print(json.dumps(card), flush=True)
    if result["verdict"] not in (SAME, LOSSLESS):
        raise typer.Exit(1)
