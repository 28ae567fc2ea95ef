"""The flags of `outrider serve`: the settings of the server and those of the model. `cli` applies them."""

# ruff: noqa: RUF009  (`flag` makes a field)
from __future__ import annotations

import enum
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from outrider.checks import nearest
from outrider.engine.device import GPU_SEQUENCES, Device
from outrider.errors import InvalidParameter
from outrider.options import with_parameters
from outrider.serve.settings import ServerSettings, flag

__all__ = ["LogFormat", "ParallelBackend", "ServeFlags", "as_command", "flags_of", "parse_loras", "reread"]

CPU_SEQUENCES = 32  # that run at once on a processor, unless the user says otherwise
_RELOADED = ("max_queue", "max_body", "stream_interval", "ping_interval", "drain_timeout", "watchdog_timeout")


class LogFormat(enum.StrEnum):
    """The format of a log record."""

    text = "text"
    json = "json"


class ParallelBackend(enum.StrEnum):
    """Where replicas run."""

    mp = "mp"
    ray = "ray"


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
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:  # PyYAML lets all of these through
        raise InvalidParameter("--config", f"{path} cannot be read: {error}") from None
    if not isinstance(values, Mapping):
        raise InvalidParameter("--config", f"{path} must hold flags and their values, such as 'port: 8000'")
    return values


@dataclass(frozen=True, slots=True)
class ServeFlags(ServerSettings):
    """The flags of one start of `outrider serve`."""

    model: str | None = flag(None, "Model directory or hub id. Default: the bundled model.")
    config: Path | None = flag(
        None, "YAML file of flags and their values. Flags and the environment take precedence.", is_eager=True
    )
    method: str | None = flag(
        None, 'How to draft: auto, none, ngram, suffix, eagle, ..., with settings as in "eagle:24". Default: auto.'
    )
    draft_model: str | None = flag(
        None, "Directory or hub id of the drafter's weights, or auto: a published one in the local cache.", "--speculative-model"
    )
    draft_tokens: int | None = flag(None, "Maximum number of draft tokens per round.", "--num-speculative-tokens", min=0, max=256)
    speculative_config: str | None = flag(
        None, 'JSON: {"method": ..., "model": ..., "num_speculative_tokens": ...}, instead of the three above.'
    )
    lora: tuple[str, ...] = flag((), "LoRA adapter as NAME=PATH, chosen by model name in requests; repeatable.", "--lora-modules")
    corpus: tuple[str, ...] = flag(
        (),
        "Text files, folders or .jsonl files that outputs are likely to quote, for lookup drafters; comma-separated or repeated.",
    )
    max_loras: int = flag(32, "Maximum number of LoRA adapters in memory.", min=1)
    max_lora_rank: int = flag(256, "Largest rank of a LoRA adapter.", min=1)
    max_model_len: int | None = flag(None, "Maximum length of prompt and output together. Default: the model's.")
    max_num_seqs: int | None = flag(
        None, f"Maximum number of sequences that run at once. Default: {CPU_SEQUENCES}, on a GPU {GPU_SEQUENCES}.", min=1
    )
    memory: str | None = flag(
        None,
        "What weights, KV and buffers may take of the GPU, or of the machine without one: a share such as 0.9, or a size such as "
        "8GiB. Weights that do not fit a GPU are streamed from host memory. Default: 0.9 of a GPU.",
        "--gpu-memory-utilization",
    )
    kv_memory: str | None = flag(
        None, "Memory for KV alone, such as 4GiB. Default: what --memory leaves; a quarter of a machine."
    )
    kv_dtype: str = flag("auto", "Keys and values: auto (as the model computes), or int8 on CPUs.", "--kv-cache-dtype")
    data_parallel_size: int = flag(
        1,
        "Number of replicas behind one front door: processes that share out --threads and --memory, or have a GPU each.",
        "-dp",
        min=1,
        max=64,
    )
    data_parallel_backend: ParallelBackend = flag(
        ParallelBackend.mp, "Where replicas run: mp (processes of this machine) or ray (needs outrider[ray])."
    )
    data_parallel_config: str | None = flag(
        None, 'JSON, for ray: {"scaling": {"max_replicas": 8}, "routing": ..., "num_cpus": ..., "num_gpus": ..., "doors": ...}.'
    )
    tensor_parallel_size: int = flag(
        1, "Processes that share the model, each with its part of weights, KV and threads; must divide the heads.", "-tp", min=1
    )
    device: str = flag("auto", "auto (a GPU if there is one), cpu or cuda.")
    dtype: str = flag("auto", "auto, bfloat16, float32 or int8.")
    load_format: str = flag("safetensors", "safetensors, or dummy for random weights from config.json.")
    revision: str | None = flag(None, "Commit, tag or branch of a model on the hub.")
    chat_template: Path | None = flag(
        None, "File with a Jinja chat template, that replaces the model's.", exists=True, dir_okay=False
    )
    reasoning_parser: str = flag(
        "auto",
        "How the model marks its reasoning: auto (by its template), none, think, deepseek_r1, mistral, granite, seed or harmony.",
    )
    threads: int | None = flag(None, "CPU threads. Default: torch's choice.", min=1)
    max_body: str = flag("4MiB", "Largest request body.")
    otlp_traces_endpoint: str | None = flag(None, "Address to send OpenTelemetry spans to (OTLP over HTTP).")
    log_format: LogFormat = flag(LogFormat.text, "Format of the log.")

    @property
    def slots(self) -> int:
        """The sequences that run at once."""
        return self.max_num_seqs or (GPU_SEQUENCES if Device.resolve(self.device).is_gpu else CPU_SEQUENCES)


def as_command(work: Callable[[typer.Context, ServeFlags], None]) -> Callable[..., None]:
    """A Typer command with a parameter for each flag, which calls `work` with all of them."""

    flags = [field for field in fields(ServeFlags) if field.metadata]
    hints = get_type_hints(ServeFlags)
    repeatable = {field.name for field in flags if field.default == ()}

    def command(context: typer.Context, **values: Any) -> None:
        work(context, ServeFlags(**values | {name: tuple(values[name] or ()) for name in repeatable}))

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    for field in flags:
        kind, default = (list[str] | None, None) if field.name in repeatable else (hints[field.name], field.default)
        parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=Annotated[kind, _option(field)]))
    return with_parameters(command, work, parameters)


def _option(field: Field[Any]) -> Any:
    """The flag of a setting, with its environment variable. The model is an argument."""
    text, variable = field.metadata["help"], f"OUTRIDER_{field.name.upper()}"
    if field.name == "model":
        return typer.Argument(envvar=variable, help=text)
    names = (f"--{field.name.replace('_', '-')}", *field.metadata["spellings"])
    callbacks: dict[str, Callable[..., Any]] = {"config": _read_config, "api_key": _read_keys}
    return typer.Option(*names, envvar=variable, help=text, callback=callbacks.get(field.name), **field.metadata["options"])


def flags_of(values: Mapping[str, Any]) -> ServeFlags:
    """Flags by field name, as a program or a config of Ray gives them."""
    from pydantic import TypeAdapter, ValidationError

    known = {field.name for field in fields(ServeFlags) if field.metadata}
    for name in values.keys() - known:
        raise InvalidParameter(name, f"is no flag of outrider serve{nearest(name, known)}; see outrider serve --help")
    try:
        return TypeAdapter(ServeFlags).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidParameter(".".join(map(str, first["loc"])), first["msg"]) from None


def parse_loras(flags: Sequence[str], served: Sequence[str]) -> dict[str, str]:
    """Adapters by name, from NAME=PATH. Names of the model itself are taken."""
    loras: dict[str, str] = {}
    for text in flags:
        name, is_pair, path = text.partition("=")
        if not is_pair or not name or not path:
            raise InvalidParameter("--lora", f"must be NAME=PATH, got {text!r}")
        if name in served or name in loras:
            raise InvalidParameter("--lora", f"the name {name!r} is taken; choose another")
        loras[name] = path
    return loras


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
