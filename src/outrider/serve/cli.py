"""`outrider serve`: its flags, their twins in the environment and in a file, and what it says when it starts."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.config import SpeculationConfig
    from outrider.engine.llm import LLM
    from outrider.serve.settings import Settings

__all__ = ["register", "serve"]

_NAMED = ("draft_model", "eagle", "medusa")  # methods with weights of their own
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_console = Console(stderr=True)


def _option(name: str, text: str, *spellings: str, **more: Any) -> Any:
    """A flag with its twin in the environment."""
    return typer.Option(f"--{name}", *spellings, envvar=f"OUTRIDER_{name.replace('-', '_').upper()}", help=text, **more)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Values from a file lie below flags and the environment."""
    if path is not None:
        given = _yaml(path)
        names = {parameter.name for parameter in context.command.params} - {"config"}
        values = {str(key).replace("-", "_"): value for key, value in given.items()}
        for key in values:
            if key not in names:
                raise InvalidParameter("--config", f"{path} sets {key!r}, which is no flag; see outrider serve --help")
        context.default_map = {
            key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in values.items()
        } | dict(context.default_map or {})
    return path


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise InvalidParameter("--config", "needs PyYAML: pip install 'outrider[serve]'") from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameter("--config", f"{path} cannot be read: {error}") from None
    if not isinstance(found, Mapping):
        raise InvalidParameter("--config", f"{path} must hold flags and their values, such as 'port: 8000'")
    return found


def serve(
    model: Annotated[
        str | None, typer.Argument(envvar="OUTRIDER_MODEL", help="Model directory or hub id. Default: the bundled model.")
    ] = None,
    config: Annotated[  # noqa: ARG001 (its callback has read it)
        Path | None,
        _option(
            "config",
            "YAML file of flags and their values; flags and the environment go before it.",
            callback=_read_config,
            is_eager=True,
        ),
    ] = None,
    host: Annotated[str, _option("host", "Address to listen on. Others than this machine's own need --api-key.")] = "127.0.0.1",
    port: Annotated[int, _option("port", "Port to listen on; 0 takes any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, _option("api-key", "Key that every request must carry, /health excepted.", show_default=False)
    ] = None,
    insecure: Annotated[bool, _option("insecure", "Serve everybody who can reach --host, without a key.")] = False,
    allowed_host: Annotated[
        list[str] | None, _option("allowed-host", "Further name by which clients may address the server; may be repeated.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option("served-model-name", "Name in the API; further ones are aliases. Default: the directory's name."),
    ] = None,
    method: Annotated[
        str | None,
        _option("method", 'How to draft: auto, none, ngram, suffix, eagle, ..., with settings as in "eagle:24". Default: auto.'),
    ] = None,
    draft_model: Annotated[
        str | None, _option("draft-model", "Directory or hub id of the drafter's weights.", "--speculative-model")
    ] = None,
    draft_tokens: Annotated[
        int | None, _option("draft-tokens", "Most tokens guessed per round.", "--num-speculative-tokens", min=0, max=256)
    ] = None,
    speculative_config: Annotated[
        str | None,
        _option(
            "speculative-config",
            'JSON: {"method": ..., "model": ..., "num_speculative_tokens": ...}, instead of the three above.',
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, _option("max-model-len", "Longest prompt and output together. Default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, _option("max-num-seqs", "Sequences that run at once.", min=1)] = 32,
    max_queue: Annotated[int, _option("max-queue", "Sequences that may wait; more get 429.", min=0)] = 256,
    memory: Annotated[
        str | None,
        _option(
            "memory",
            "Memory for KV, such as 4GiB, or the share of a GPU that weights, KV and graphs may take, such as 0.9. "
            "Default: a quarter of the machine's memory; 0.9 of a GPU's.",
        ),
    ] = None,
    device: Annotated[str, _option("device", "auto (a GPU where there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[str, _option("dtype", "auto, bfloat16, float32 or int8.")] = "auto",
    load_format: Annotated[
        str, _option("load-format", "safetensors, or dummy for random weights from config.json.")
    ] = "safetensors",
    revision: Annotated[str | None, _option("revision", "Commit, tag or branch of a model on the hub.")] = None,
    chat_template: Annotated[
        Path | None,
        _option("chat-template", "File with a Jinja chat template, instead of the model's own.", exists=True, dir_okay=False),
    ] = None,
    threads: Annotated[int | None, _option("threads", "CPU threads. Default: torch's choice.", min=1)] = None,
    stream_interval: Annotated[int, _option("stream-interval", "Tokens that make a chunk, at least.", min=1)] = 1,
    ping_interval: Annotated[
        float, _option("ping-interval", "Seconds of silence after which a stream gets a comment.", min=0.05)
    ] = 15.0,
    drain_timeout: Annotated[
        float, _option("drain-timeout", "Seconds that running requests get when the server stops.", min=0)
    ] = 30.0,
    max_body: Annotated[str, _option("max-body", "Largest request body.")] = "4MiB",
    otlp_traces_endpoint: Annotated[
        str | None, _option("otlp-traces-endpoint", "Send OpenTelemetry spans there (OTLP over HTTP).")
    ] = None,
    log_requests: Annotated[bool, _option("log-requests", "Log what is asked, prompts included.")] = False,
    access_log: Annotated[bool, _option("access-log", "Log a line for each request: address, path and status.")] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. Every flag is also a variable: --max-queue is OUTRIDER_MAX_QUEUE."""
    signal.signal(signal.SIGTERM, _leave)  # until the server has handlers of its own
    from outrider.serve.address import listen
    from outrider.serve.settings import Limits, Settings

    logging.getLogger("outrider").setLevel(logging.INFO)
    names = served_model_name or [_short_name(model)]
    settings = Settings(
        model_name=names[0],
        aliases=tuple(names[1:]),
        host=host,
        port=port,
        api_key=api_key,
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        max_queue=max_queue,
        stream_interval=stream_interval,
        ping_s=ping_interval,
        drain_s=drain_timeout,
        log_requests=log_requests,
        limits=Limits(body_bytes=parse_bytes("--max-body", max_body)),
    )
    speculation = resolve_speculation(method, draft_model, draft_tokens, speculative_config)
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "device": device}
    if memory is not None:
        sizes |= (
            {"memory": float(memory)} if re.fullmatch(r"0?\.\d+|1\.0", memory) else {"kv_bytes": parse_bytes("--memory", memory)}
        )
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    own = listen(host, port)
    address = own.getsockname()[:2]
    _console.print(f"listening on http://{_written(address)}; loading {names[0]}", highlight=False)
    try:
        from outrider.serve.app import create_app
        from outrider.serve.server import serve as run
        from outrider.serve.trace import open_tracer
    except ImportError as error:
        raise InvalidParameter("serve", f"needs {error.name}: pip install 'outrider[serve]'") from None
    tracer = None if otlp_traces_endpoint is None else open_tracer(otlp_traces_endpoint)

    def load() -> LLM:
        import torch

        from outrider.engine.llm import LLM

        if threads is not None:
            torch.set_num_threads(threads)
        llm = LLM(model, speculation=speculation, dtype=dtype, load_format=load_format, revision=revision, **sizes)
        if template is not None and llm.tokenizer is not None:
            llm.tokenizer.use_chat_template(template)
        llm.measure_costs()
        _console.print(describe(llm, settings, address), highlight=False, markup=False, soft_wrap=True)
        return llm

    run(create_app(settings, load, tracer), settings, own, access_log)
    if tracer is not None:
        tracer.close()


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(serve)


def resolve_speculation(
    method: str | None, draft_model: str | None, draft_tokens: int | None, speculative_config: str | None
) -> SpeculationConfig:
    """One setting from vLLM's JSON or from the simple flags."""
    from outrider.config import SpeculationConfig, parse_method

    if speculative_config is not None:
        for name, value in (("--method", method), ("--draft-model", draft_model), ("--draft-tokens", draft_tokens)):
            if value is not None:
                raise InvalidParameter(name, "was given beside --speculative-config; put it into the JSON")
        try:
            given = json.loads(speculative_config)
        except json.JSONDecodeError as error:
            raise InvalidParameter("--speculative-config", f"is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise InvalidParameter("--speculative-config", f"must be a JSON object, got {speculative_config}")
        return SpeculationConfig.parse(given)
    settings = parse_method(method or ("draft_model" if draft_model else "auto"))
    if draft_model is not None and settings["method"] not in _NAMED:
        raise InvalidParameter("--draft-model", f"is for methods with weights of their own, and {settings['method']!r} has none")
    given = {"model": draft_model, "draft_tokens": draft_tokens}
    return SpeculationConfig.parse(settings | {name: value for name, value in given.items() if value is not None})


def describe(llm: LLM, settings: Settings, address: tuple[str, int]) -> str:
    """What was resolved, whether speculation is on and why, and how to ask."""
    own, pages = llm.speculation, llm.engine.pages
    drafters = ", ".join(dict.fromkeys(name for name in own.methods() if name != own.method))
    if own.method == "none":
        speculation = "off: no method was asked for (--method auto chooses one)"
    elif own.method == "auto" and not drafters:
        speculation = "off: nothing to draft with was found"
    elif own.draft_tokens == 0:
        speculation = "off: --draft-tokens is 0"
    elif own.method == "auto":
        speculation = f"on: a controller chooses among {drafters} round by round, and drafts nothing where that does not pay"
    else:
        speculation = (
            f"on: {own.method}{f' of {drafters}' if drafters else ''}, up to {own.draft_tokens} tokens a round, rule {own.rule}"
        )
    url, key = f"http://{_written(address)}", "$OUTRIDER_API_KEY" if settings.api_key else ""
    header = f" -H 'Authorization: Bearer '\"{key}\"" if key else ""
    secret = "os.environ['OUTRIDER_API_KEY']" if key else "'none'"
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template
    pool = llm.engine.runner.pool
    mib = (pool.keys.nbytes + pool.values.nbytes) / 2**20
    lines = [
        f"model         {settings.model_name} ({llm.directory})",
        f"speculation   {speculation}",
        f"context       {llm.max_model_len} tokens; {llm.engine.scheduler.most} sequences at once, {settings.max_queue} may wait",
        f"KV            {pages.count} pages of {pages.page_size} tokens, {mib:.0f} MiB",
        f"chat          {'yes' if chats else 'no: the model has no chat template; --chat-template gives it one'}",
        f"key           {'needed' if settings.api_key else 'none; anybody who can reach the address is served'}",
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


def parse_bytes(flag: str, text: str) -> int:
    """A size such as 512MiB, 4G or a plain number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if found is None or not float(found[1]):
        raise InvalidParameter(flag, f"must be a size such as 512MiB or 4G, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def _short_name(model: str | None) -> str:
    return "pyrite" if model is None else Path(model).resolve().name if Path(model).exists() else model


def _written(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _leave(*_: object) -> None:
    os._exit(0)
