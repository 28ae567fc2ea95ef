"""Settings of the server: addresses, keys, limits, timeouts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from outrider.errors import InvalidParameter

__all__ = ["Limits", "Settings", "is_loopback"]


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
    parts: int = 1024  # in one message
    tool_calls: int = 4096  # in all messages
    stop: int = 4
    stop_chars: int = 256
    logprobs: int = 20
    logprob_entries: int = 2**18  # for prompts: n × prompts × tokens × (prompt_logprobs + 1)
    logit_bias: int = 300
    ids: int = 1024  # in stop_token_ids, allowed_token_ids and bad_words
    schema_bytes: int = 64 * 2**10
    tools: int = 128
    grammars: int = 32  # requests that may wait for a grammar to be compiled
    header_s: float = 10.0  # timeout for a request's headers
    body_s: float = 30.0  # timeout for a request's body
    write_s: float = 60.0  # a client that reads nothing for this long is disconnected
    backlog: int = 64  # chunks that wait for a slow reader; further output waits in the engine as one chunk


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one server."""

    model_name: str = "pyrite"
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    other_api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()  # additional host names for the server
    allowed_origins: tuple[str, ...] = ()  # other sites whose pages may send requests; * allows all
    max_queue: int = 256
    allow_priority: bool = False  # whether requests may set a priority
    stream_interval: int = 1
    ping_s: float = 15.0
    drain_s: float = 30.0
    watchdog_s: float = 300.0  # an engine with work that ends no round for this long is stuck; 0 disables the check
    log_requests: bool = False
    access_log: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidParameter("--api-key", "must not be empty")
        if not self.needs_key and not self.insecure and not is_loopback(self.host):
            raise InvalidParameter(
                "--host",
                f"{self.host} can be reached by others, and no key protects the server; "
                "pass --api-key, or --insecure to serve anybody",
            )
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|https?://[^/\s?#@]+", origin):
                raise InvalidParameter("--allow-origin", f"must be * or an origin such as https://example.org, got {origin!r}")

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry a key."""
        return self.api_key is not None or self.api_key_file is not None


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
