"""The flags of `outrider serve`: names, meanings and defaults. `cli` applies them."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import InvalidParameter

__all__ = ["LogFormat", "ServeFlags", "reread"]

_RELOADED = ("max_queue", "max_body", "stream_interval", "ping_interval", "drain_timeout", "watchdog_timeout")


class LogFormat(enum.StrEnum):
    """The format of a log record."""

    text = "text"
    json = "json"


def _option(name: str, text: str, *spellings: str, **more: Any) -> Any:
    """A flag with its environment variable."""
    return typer.Option(f"--{name}", *spellings, envvar=f"OUTRIDER_{name.replace('-', '_').upper()}", help=text, **more)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values as defaults, below flags and the environment."""
    if path is not None:
        context.default_map = _values(context, path) | dict(context.default_map or {})
    return path


def _read_keys(context: typer.Context, keys: list[str] | None) -> list[str] | None:
    """Read one key per line of the environment variable. Keys may contain spaces, at which the parser would split it."""
    source = context.get_parameter_source("api_key")
    if source is None or source.name != "ENVIRONMENT":
        return keys
    return [line for line in os.environ["OUTRIDER_API_KEY"].split("\n") if line.strip()] or [""]


def _values(context: typer.Context, path: Path) -> dict[str, Any]:
    """The flags that a file sets, by field name."""
    names = {parameter.name for parameter in context.command.params} - {"config"}
    values = {str(key).replace("-", "_"): value for key, value in _yaml(path).items()}
    for key in values:
        if key not in names:
            raise InvalidParameter("--config", f"{path} sets {key!r}, which is no flag; see outrider serve --help")
    return {key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise InvalidParameter("--config", "needs PyYAML: pip install 'outrider[serve]'") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameter("--config", f"{path} cannot be read: {error}") from None
    if not isinstance(values, Mapping):
        raise InvalidParameter("--config", f"{path} must hold flags and their values, such as 'port: 8000'")
    return values


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The flags of one start of `outrider serve`."""

    model: Annotated[
        str | None, typer.Argument(envvar="OUTRIDER_MODEL", help="Model directory or hub id. Default: the bundled model.")
    ] = None
    config: Annotated[
        Path | None,
        _option(
            "config",
            "YAML file of flags and their values. Flags and the environment take precedence.",
            callback=_read_config,
            is_eager=True,
        ),
    ] = None
    host: Annotated[str, _option("host", "Address to listen on. An address other than loopback needs --api-key.")] = "127.0.0.1"
    port: Annotated[int, _option("port", "Port to listen on; 0 takes any free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        list[str] | None,
        _option(
            "api-key",
            "Key that every request must carry, except health checks; may be repeated.",
            show_default=False,
            callback=_read_keys,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _option("api-key-file", "File with one key per line: KEY or NAME:KEY. Reloaded on SIGHUP.", exists=True, dir_okay=False),
    ] = None
    insecure: Annotated[bool, _option("insecure", "Serve everybody who can reach --host, without a key.")] = False
    allowed_host: Annotated[
        list[str] | None, _option("allowed-host", "Additional host name that clients may use for the server; may be repeated.")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        _option("allow-origin", "Site whose pages may send requests (CORS), as in https://example.org; * for all; repeatable."),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _option("served-model-name", "Model name in the API; may be repeated for aliases. Default: the directory's name."),
    ] = None
    method: Annotated[
        str | None,
        _option("method", 'How to draft: auto, none, ngram, suffix, eagle, ..., with settings as in "eagle:24". Default: auto.'),
    ] = None
    draft_model: Annotated[
        str | None, _option("draft-model", "Directory or hub id of the drafter's weights.", "--speculative-model")
    ] = None
    draft_tokens: Annotated[
        int | None,
        _option("draft-tokens", "Maximum number of draft tokens per round.", "--num-speculative-tokens", min=0, max=256),
    ] = None
    speculative_config: Annotated[
        str | None,
        _option(
            "speculative-config",
            'JSON: {"method": ..., "model": ..., "num_speculative_tokens": ...}, instead of the three above.',
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _option("max-model-len", "Maximum length of prompt and output together. Default: the model's.")
    ] = None
    max_num_seqs: Annotated[int, _option("max-num-seqs", "Maximum number of sequences that run at once.", min=1)] = 32
    max_queue: Annotated[int, _option("max-queue", "Maximum number of waiting sequences; further requests get 429.", min=0)] = 256
    allow_priority: Annotated[bool, _option("allow-priority", "Let requests set a priority.")] = False
    memory: Annotated[
        str | None,
        _option(
            "memory",
            "Memory for KV, such as 4GiB, or the share of a GPU that weights, KV and graphs may take, such as 0.9. "
            "Default: a quarter of the machine's memory; 0.9 of a GPU's.",
        ),
    ] = None
    device: Annotated[str, _option("device", "auto (a GPU if there is one), cpu or cuda.")] = "auto"
    dtype: Annotated[str, _option("dtype", "auto, bfloat16, float32 or int8.")] = "auto"
    load_format: Annotated[str, _option("load-format", "safetensors, or dummy for random weights from config.json.")] = (
        "safetensors"
    )
    revision: Annotated[str | None, _option("revision", "Commit, tag or branch of a model on the hub.")] = None
    chat_template: Annotated[
        Path | None,
        _option("chat-template", "File with a Jinja chat template, instead of the model's own.", exists=True, dir_okay=False),
    ] = None
    threads: Annotated[int | None, _option("threads", "CPU threads. Default: torch's choice.", min=1)] = None
    stream_interval: Annotated[int, _option("stream-interval", "Minimum number of tokens in a chunk of a stream.", min=1)] = 1
    ping_interval: Annotated[
        float, _option("ping-interval", "Seconds without output after which a stream gets a keep-alive comment.", min=0.05)
    ] = 15.0
    drain_timeout: Annotated[
        float, _option("drain-timeout", "Seconds that running requests may take to finish when the server stops.", min=0)
    ] = 30.0
    max_body: Annotated[str, _option("max-body", "Largest request body.")] = "4MiB"
    otlp_traces_endpoint: Annotated[
        str | None, _option("otlp-traces-endpoint", "Address to send OpenTelemetry spans to (OTLP over HTTP).")
    ] = None
    watchdog_timeout: Annotated[
        float,
        _option(
            "watchdog-timeout",
            "Seconds without a finished round, while the engine has work, after which the server exits; 0 disables this.",
            "--watchdog-s",
            min=0,
        ),
    ] = 300.0
    log_format: Annotated[LogFormat, _option("log-format", "Format of the log.")] = LogFormat.text
    log_requests: Annotated[bool, _option("log-requests", "Log request bodies, including prompts.")] = False
    access_log: Annotated[bool, _option("access-log", "Log a line for each request: client, path, status and time.")] = False


def reread(context: typer.Context) -> dict[str, Any]:
    """The limits in the file of --config as it is now, except those that a flag or a variable overrides."""
    path = context.params.get("config")
    if path is None:
        return {}
    values = _values(context, path)
    try:
        return {
            parameter.name: parameter.process_value(context, values.get(parameter.name, parameter.default))
            for parameter in context.command.params
            if parameter.name in _RELOADED and _from_file(context, parameter.name)
        }
    except typer.BadParameter as error:
        raise InvalidParameter("--config", f"{path}: {error.format_message()}") from None


def _from_file(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("DEFAULT", "DEFAULT_MAP")
