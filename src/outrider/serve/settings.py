"""Settings of the server: addresses, keys, limits, timeouts.

A setting is declared once. `flags` makes a flag, an environment variable and a key of the config file from it.
"""

# ruff: noqa: RUF009  (`flag` makes a field)
from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter

__all__ = ["Limits", "ServerSettings", "flag", "is_loopback"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests. A request above a limit is refused before it costs anything."""

    body_bytes: int = 4 * 2**20
    small_body_bytes: int = 64 * 2**10  # larger bodies are parsed and checked in another process
    large_bodies: int = 16  # large bodies that may wait for that process
    bodies_bytes: int = 256 * 2**20  # bodies of all requests in memory, from the first byte until the request is handled
    header_bytes: int = 64 * 2**10
    headers: int = 100
    json_depth: int = 64
    n: int = 16
    prompts: int = 64
    sequences: int = 128  # prompts times n
    prompt_ids: int = 2**20  # in one prompt; the model's context is checked later
    messages: int = 2048
    texts: int = 1024  # in a request to /remember
    parts: int = 1024  # in one message
    tool_calls: int = 4096  # in all messages
    call_values: int = 2**16  # in the inputs of all calls of a request to /v1/messages, which writes them as JSON
    stop: int = 4
    stop_chars: int = 256
    logprobs: int = 20
    logprob_entries: int = 2**18  # for prompts: n × prompts × tokens × (prompt_logprobs + 1)
    logit_bias: int = 300
    ids: int = 1024  # in stop_token_ids, allowed_token_ids and bad_words
    schema_bytes: int = 64 * 2**10
    tools: int = 128
    tools_bytes: int = 256 * 2**10  # of all tools of a request, as JSON; those of coding agents take up to 100 KiB
    grammars: int = 32  # requests that may wait for a grammar to be compiled
    header_s: float = 10.0  # timeout for a request's headers
    body_s: float = 30.0  # timeout for a request's body
    responses: int = 1024  # answers of /v1/responses that are kept for later requests, of all clients
    responses_bytes: int = 64 * 2**20  # their size, conversations included
    write_s: float = 60.0  # a client that reads nothing for this long is disconnected
    backlog: int = 64  # chunks that wait for a slow reader; further output waits in the engine as one chunk


def flag(default: Any, text: str, *spellings: str, is_secret: bool = False, **options: Any) -> Any:
    """A field that is also a flag of `outrider serve`. `options` are those of `typer.Option`."""
    return field(default=default, repr=not is_secret, metadata={"help": text, "spellings": spellings, "options": options})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server."""

    host: str = flag("127.0.0.1", "Address to listen on. An address other than loopback needs --api-key.")
    port: int = flag(8000, "Port to listen on; 0 takes any free one.", min=0, max=65535)
    uds: Path | None = flag(None, "Unix socket to listen on, instead of --host and --port.")
    api_key: tuple[str, ...] = flag(
        (), "Key that every request must carry, except health checks; may be repeated.", is_secret=True, show_default=False
    )
    api_key_file: Path | None = flag(
        None, "File with one key per line: KEY or NAME:KEY. Reloaded on SIGHUP.", exists=True, dir_okay=False
    )
    insecure: bool = flag(False, "Serve everybody who can reach --host, without a key.")
    allowed_host: tuple[str, ...] = flag((), "Additional host name that clients may use for the server; may be repeated.")
    allow_origin: tuple[str, ...] = flag(
        (), "Site whose pages may send requests (CORS), as in https://example.org; * for all; repeatable."
    )
    served_model_name: tuple[str, ...] = flag(
        (), "Model name in the API; may be repeated for aliases. Default: the directory's name."
    )
    max_queue: int = flag(256, "Maximum number of waiting sequences; further requests get 429.", min=0)
    speculation_rules: Path | None = flag(
        None,
        "YAML or JSON file of rules for speculation by tag, model name, temperature or response format. Reloaded on SIGHUP.",
        exists=True,
        dir_okay=False,
    )
    allow_priority: bool = flag(False, "Let requests set a priority.")
    allow_lora_updates: bool = flag(False, "Let clients load and unload LoRA adapters without --api-key.")
    stream_interval: int = flag(1, "Minimum number of tokens in a chunk of a stream.", min=1)
    ping_interval: float = flag(15.0, "Seconds without output after which a stream gets a keep-alive comment.", min=0.05)
    drain_timeout: float = flag(30.0, "Seconds that running requests may take to finish when the server stops.", min=0)
    watchdog_timeout: float = flag(
        300.0,
        "Seconds without a finished round, while the engine has work, after which the server exits; 0 disables this.",
        "--watchdog-s",
        min=0,
    )
    log_requests: bool = flag(False, "Log request bodies, including prompts.")
    no_vllm_metrics: bool = flag(False, "List speculation's metrics under our names alone, not as vllm:spec_decode_* too.")
    access_log: bool = flag(False, "Log a line for each request: client, path, status and time.")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_key):
            raise InvalidParameter("--api-key", "must not be empty")
        if not self.needs_key and not self.insecure and not is_loopback(self.host):
            raise InvalidParameter(
                "--host",
                f"{self.host} can be reached by others, and no key protects the server; "
                "pass --api-key, or --insecure to serve anybody",
            )
        for origin in self.allow_origin:
            if not re.fullmatch(r"\*|https?://[^/\s?#@]+", origin):
                raise InvalidParameter("--allow-origin", f"must be * or an origin such as https://example.org, got {origin!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model in the API: its name, and aliases."""
        return self.served_model_name or ("pyrite",)

    @property
    def model_name(self) -> str:
        return self.names[0]

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self.api_key) or self.api_key_file is not None


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
