"""Context variables of the current HTTP request."""

from __future__ import annotations

import re
from contextvars import ContextVar

__all__ = ["adopt", "client", "request_id"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
client: ContextVar[str] = ContextVar("client", default="")  # name of the API key; empty where no key is needed
_NAME = re.compile(r"[\w.\-]{1,128}", re.ASCII)  # safe in a header and in a log without escaping


def adopt(name: str | None) -> None:
    """Use the client's request id, if it is a plain name."""
    if name and _NAME.fullmatch(name):
        request_id.set(name)
