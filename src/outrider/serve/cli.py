"""`outrider serve`: from flags to a running server."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider import checks
from outrider.errors import InvalidParameter
from outrider.options import ModelFirst, check_threads, json_object, set_threads
from outrider.serve.address import has_terminal, listen, listen_on_path
from outrider.serve.flags import LogFormat, ParallelBackend, ServeFlags, as_command, parse_loras, reread
from outrider.serve.logs import configure
from outrider.serve.settings import Limits, ServerSettings
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from fastapi import FastAPI

    from outrider.config import SpeculationConfig
    from outrider.engine.llm import LLM

__all__ = ["describe", "open_app", "register", "resolve_speculation", "serve", "settings_of"]

_STDERR = 2  # the file descriptor: stacks are written by a handler that runs no Python
_console = PlainConsole(stderr=True)
_log = logging.getLogger("outrider.serve")


def serve(context: typer.Context, flags: ServeFlags) -> None:
    """Serve a model over HTTP, with OpenAI's API. Every flag is also a variable: --max-queue is OUTRIDER_MAX_QUEUE."""
    _take_signals()
    configure(flags.log_format)
    settings = settings_of(flags)
    speculation = resolve_speculation(flags.method, flags.draft_model, flags.draft_tokens, flags.speculative_config)
    template = None if flags.chat_template is None else _read_template(flags.chat_template)
    load = partial(_load, flags, speculation, _sizes(flags), template)
    if flags.data_parallel_backend == ParallelBackend.ray:
        _run_on_ray(settings, speculation)
        return
    with listen(flags.host, flags.port) if flags.uds is None else listen_on_path(flags.uds) as listener:
        _check(flags, speculation)
        if flags.data_parallel_size > 1:
            _run_replicas(settings, listener, lambda: settings_of(replace(flags, **reread(context))))
        else:
            _run(settings, load, listener, lambda: settings_of(replace(flags, **reread(context))))


def _run(
    settings: ServeFlags, load: Callable[[], LLM], listener: socket.socket, reread_settings: Callable[[], ServeFlags]
) -> None:
    """Create the app and serve until a signal stops it."""
    try:
        from outrider.serve.app import create_app
        from outrider.serve.server import serve as run
        from outrider.serve.trace import open_tracer
    except ImportError as error:
        raise InvalidParameter("serve", f"needs {error.name}: pip install 'outrider[serve]'") from None
    tracer = None if settings.otlp_traces_endpoint is None else open_tracer(settings.otlp_traces_endpoint)
    address, name = listener.getsockname()[:2], settings.model_name
    if settings.uds is None:
        app = create_app(settings, load, tracer, lambda llm: _say(settings, describe(llm, settings, address)))
        _say(settings, f"listening on http://{written(address)}; loading {name}")
    else:
        app = create_app(settings, load, tracer, lambda _: _say(settings, f"{name} is ready on {settings.uds}"))
    try:
        run(app, settings, listener, reread_settings)
    finally:
        if tracer is not None:
            tracer.close()


def _run_on_ray(settings: ServeFlags, speculation: SpeculationConfig) -> None:
    try:
        from outrider.serve.fleet.ray_command import load_ray, serve_on_ray
    except ImportError as error:
        raise InvalidParameter("serve", f"needs {error.name}: pip install 'outrider[serve]'") from None
    load_ray()
    _check(settings, speculation)
    serve_on_ray(settings, partial(_say, settings))


def open_app(flags: ServeFlags) -> FastAPI:
    """The app of a server that something else listens for. Its model is loaded when its lifespan begins."""
    from outrider.serve.app import create_app

    speculation = resolve_speculation(flags.method, flags.draft_model, flags.draft_tokens, flags.speculative_config)
    template = None if flags.chat_template is None else flags.chat_template.read_text(encoding="utf-8")
    return create_app(flags, partial(_load, flags, speculation, _sizes(flags), template))


def _run_replicas(settings: ServeFlags, listener: socket.socket, reread_settings: Callable[[], ServeFlags]) -> None:
    """Start the replicas and serve in front of them until a signal stops it."""
    try:
        from outrider.serve.fleet.command import plan_of, serve_replicas
    except ImportError as error:
        raise InvalidParameter("serve", f"needs {error.name}: pip install 'outrider[serve]'") from None
    _sizes(settings)  # are sound
    plan = plan_of(settings, sys.argv[1:])
    place = f"http://{written(listener.getsockname()[:2])}" if settings.uds is None else str(settings.uds)
    _say(settings, f"listening on {place}; starting {plan.replicas} replicas of {settings.model_name}")
    serve_replicas(settings, plan, listener, reread_settings, lambda text: _say(settings, f"{text}\nready on {place}"))


def register(app: typer.Typer) -> None:
    """Add `outrider serve` to the command line."""
    epilog = "`outrider serve --model MODEL` is the same as `outrider serve MODEL`."
    app.command("serve", cls=ModelFirst, epilog=epilog)(as_command(serve))


def settings_of(flags: ServeFlags) -> ServeFlags:
    """The flags with the limits and the model name that follow from them."""
    names = flags.served_model_name or (_short_name(flags.model),)
    return replace(flags, served_model_name=names, limits=Limits(body_bytes=checks.byte_size("--max-body", flags.max_body)))


def _sizes(flags: ServeFlags) -> dict[str, Any]:
    """Engine settings for memory, device and batch size."""
    sizes: dict[str, Any] = {
        "max_num_seqs": flags.slots,
        "max_model_len": flags.max_model_len,
        "device": flags.device,
        "kv_dtype": flags.kv_dtype,
        "max_loras": flags.max_loras,
        "max_lora_rank": flags.max_lora_rank,
        "tensor_parallel_size": flags.tensor_parallel_size,
    }
    if flags.memory is not None:
        sizes["memory"] = checks.memory("--memory", flags.memory)
    if flags.kv_memory is not None:
        sizes["kv_bytes"] = checks.byte_size("--kv-memory", flags.kv_memory)
    return sizes


def _check(flags: ServeFlags, speculation: SpeculationConfig) -> None:
    """Check the settings before the server listens. A model on the hub is checked when it is loaded."""
    from outrider.config import EngineConfig
    from outrider.draft import check_speculation, check_weights
    from outrider.draft.corpus_files import corpus_files, corpus_paths
    from outrider.draft.resolve import resolve_drafters
    from outrider.engine.adapters import check_adapters
    from outrider.engine.device import Device
    from outrider.engine.intake import model_name
    from outrider.engine.ranks import check_parallel
    from outrider.model import LoadOptions, check_model, is_hub_id, locate, read_spec
    from outrider.serve.reasoning import check_parser
    from outrider.serve.rules import read_rules

    if flags.threads is not None:
        check_threads(flags.threads)
    check_parser(flags.reasoning_parser)
    loras = parse_loras(flags.lora, settings_of(flags).names)
    if flags.speculation_rules is not None:
        read_rules(flags.speculation_rules).check_models([*settings_of(flags).names, *loras])
    check_speculation(speculation)
    corpus_files(corpus_paths(flags.corpus))
    device, options, model = Device.resolve(flags.device), LoadOptions(flags.dtype, flags.load_format), model_name(flags.model)
    check_adapters(loras, device.name)
    check_parallel(flags.tensor_parallel_size, device, loras=bool(flags.lora))
    if not is_hub_id(model):
        folder = locate(model)
        check_model(folder, options)
        check_parallel(flags.tensor_parallel_size, device, read_spec(folder))
        EngineConfig(max_model_len=flags.max_model_len).within(read_spec(folder).context)
        check_weights(resolve_drafters(speculation, folder, device.is_gpu), folder, options)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("--chat-template", f"{path} cannot be read: {error}") from None


def _load(flags: ServeFlags, speculation: SpeculationConfig, sizes: dict[str, Any], template: str | None) -> LLM:
    from outrider.engine.llm import LLM

    set_threads(flags.threads)
    llm = LLM(
        flags.model,
        speculation=speculation,
        dtype=flags.dtype,
        load_format=flags.load_format,
        revision=flags.revision,
        lora=parse_loras(flags.lora, settings_of(flags).names) or None,
        corpus=flags.corpus,
        **sizes,
    )
    if llm.tokenizer is not None:
        llm.tokenizer.use_reasoning_parser(flags.reasoning_parser)
        if template is not None:
            llm.tokenizer.use_chat_template(template)
    return llm


def _say(flags: ServeFlags, text: str) -> None:
    """Print a message for the user, or log it if the log format is JSON."""
    if flags.log_format == LogFormat.json:
        _log.info("%s", text)
    else:
        _console.print(text, soft_wrap=True)


def resolve_speculation(
    method: str | None, draft_model: str | None, draft_tokens: int | None, speculative_config: str | None
) -> SpeculationConfig:
    """One setting from vLLM's JSON or from the simple flags."""
    from outrider.config import SpeculationConfig, speculation_of_flags

    if speculative_config is not None:
        for name, value in (("--method", method), ("--draft-model", draft_model), ("--draft-tokens", draft_tokens)):
            if value is not None:
                raise InvalidParameter(name, "cannot be combined with --speculative-config; put it into the JSON")
        return SpeculationConfig.parse(json_object("--speculative-config", speculative_config))
    return speculation_of_flags(method, draft_model, draft_tokens)


def _short_name(model: str | None) -> str:
    return "pyrite" if model is None else Path(model).resolve().name if Path(model).exists() else model


def describe(llm: LLM, settings: ServerSettings, address: tuple[str, int]) -> str:
    """The resolved settings, whether speculation is on and why, and example requests."""
    config, pages = llm.speculation, llm.engine.pages
    drafters = ", ".join(dict.fromkeys(name for name in config.methods() if name != config.method))
    if config.method == "none":
        speculation = "off: no method was asked for (--method auto chooses one)"
    elif config.method == "auto" and not drafters:
        speculation = "off: this model has no drafter"
    elif config.draft_tokens == 0:
        speculation = "off: --draft-tokens is 0"
    elif config.method == "auto":
        speculation = f"on: a controller chooses among {drafters} round by round, and drafts nothing where that does not pay"
    else:
        members = f" of {drafters}" if drafters else ""
        speculation = f"on: {config.method}{members}, up to {config.draft_tokens} tokens a round, rule {config.rule}"
    slots = llm.engine.scheduler.max_num_seqs
    url, key = f"http://{written(address)}", "$OUTRIDER_API_KEY" if settings.needs_key else ""
    header = f" -H 'Authorization: Bearer '\"{key}\"" if key else ""
    secret = "os.environ['OUTRIDER_API_KEY']" if key else "'none'"
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template
    calls, reasons = _formats(llm)
    pool = llm.engine.runner.pool
    mib, ranks = (pool.keys.nbytes + pool.values.nbytes) / 2**20, llm.engine.runner.ranks
    shared = f" in each of {ranks} processes that share the model" if ranks > 1 else ""
    lines = [
        f"model         {settings.model_name} ({llm.directory})",
        f"speculation   {speculation}",
        *([] if llm.corpus is None else [f"corpus        {llm.corpus}"]),
        f"context       {llm.max_model_len} tokens; {slots} sequences at once, {settings.max_queue} may wait",
        f"KV            {pages.count} pages of {pages.page_size} tokens, {mib:.0f} MiB{shared}",
        f"chat          {'yes' if chats else 'no: the model has no chat template; --chat-template gives it one'}",
        f"tools         calls as {calls}; reasoning {reasons}",
        f"key           {'needed' if settings.needs_key else 'none; anybody who can reach the address is served'}",
        "",
        f"  curl {url}/v1/completions{header} -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{settings.model_name}", "prompt": "def main(", "max_tokens": 64}}\'',
        "",
        "  from openai import OpenAI",
        f"  client = OpenAI(base_url='{url}/v1', api_key={secret})",
        f"  client.completions.create(model='{settings.model_name}', prompt='def main(', max_tokens=64)",
        "",
        f"ready on {url}",
    ]
    return "\n".join(lines)


def _formats(llm: LLM) -> tuple[str, str]:
    """The format of tool calls, and the markers of reasoning."""
    from outrider.serve.reasoning import reasoning_of
    from outrider.serve.tool_formats import family_of

    if llm.tokenizer is None:
        return "text", "unknown"
    form = reasoning_of(llm.tokenizer)
    return family_of(llm.tokenizer.chat_template), "is not separated" if form is None else f"ends with {form.end}"


def written(address: tuple[str, int]) -> str:
    """An address as it stands in a URL."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _take_signals() -> None:
    """SIGUSR1 writes all stacks to standard error. SIGTERM ends the process at once until the server sets its handlers."""
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, partial(_hang_up, has_terminal()))
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)


def _hang_up(had_terminal: bool, *_: object) -> None:
    if had_terminal and not has_terminal():
        os._exit(0)


def _leave(*_: object) -> None:
    os._exit(0)
