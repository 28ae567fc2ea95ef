"""What the server was told: addresses, keys, limits, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address

from outrider.errors import InvalidParameter

__all__ = ["Limits", "Settings", "is_loopback"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a request may ask. Everything beyond is refused before it costs anything."""

    body_bytes: int = 4 * 2**20
    header_bytes: int = 64 * 2**10
    headers: int = 100
    json_depth: int = 64
    n: int = 16
    prompts: int = 64
    sequences: int = 128  # prompts times n
    messages: int = 2048
    stop: int = 4
    stop_chars: int = 256
    logprobs: int = 20
    logit_bias: int = 300
    ids: int = 1024  # in stop_token_ids, allowed_token_ids and bad_words
    schema_bytes: int = 64 * 2**10
    tools: int = 128
    header_s: float = 10.0  # a request's headers must be in by then
    body_s: float = 30.0  # and its body by then
    write_s: float = 60.0  # a client that reads nothing for so long is left
    backlog: int = 64  # pieces of text that wait for a slow reader; the rest waits in the engine as one


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve."""

    model_name: str = "pyrite"
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()  # names by which the server may be addressed, beside its own
    max_queue: int = 256
    stream_interval: int = 1
    ping_s: float = 15.0
    drain_s: float = 30.0
    log_requests: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidParameter("--api-key", "must not be empty")
        if self.api_key is None and not self.insecure and not is_loopback(self.host):
            raise InvalidParameter(
                "--host",
                f"{self.host} can be reached by others, and no key protects the server; "
                "pass --api-key, or --insecure to serve anybody",
            )


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
