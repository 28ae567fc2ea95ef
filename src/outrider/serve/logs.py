"""The server's log and the id of the current request: one record per line with time, level and request id, as text or JSON.

Messages may contain text from clients, so control characters are escaped: no message can forge a line or affect a
terminal.
"""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

__all__ = ["JsonFormatter", "TextFormatter", "adopt", "configure", "escaped", "request_id"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
_NAME = re.compile(r"[\w.\-]{1,128}", re.ASCII)  # safe in a header and in a log without escaping

# control characters, line and paragraph separators, bidirectional marks, unpaired surrogates
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def adopt(name: str | None) -> None:
    """Use the client's request id, if it is a plain name."""
    if name and _NAME.fullmatch(name):
        request_id.set(name)


def configure(form: str) -> None:
    """Set the format of the process's log handlers, and log at level INFO."""
    formatter = JsonFormatter() if form == "json" else TextFormatter()
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:  # leave the capturing handlers of tests alone
            handler.setFormatter(formatter)
    logging.getLogger("outrider").setLevel(logging.INFO)
    if form == "json":
        logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO [request] message`. Further lines are indented, so that they cannot look like records."""

    def format(self, record: logging.LogRecord) -> str:
        name = _request_of(record)
        lines = [f"{_time(record)} {record.levelname}{f' [{name}]' if name else ''} {record.getMessage()}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return "\n    ".join(map(escaped, lines))


class JsonFormatter(logging.Formatter):
    """One JSON object per line. The `fields` of a record, if any, are added to the object."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Any] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        out["message"] = record.getMessage()
        if name := _request_of(record):
            out["request_id"] = name
        out |= getattr(record, "fields", {})
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, default=str)


def escaped(text: str) -> str:
    """The text with control characters escaped."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _request_of(record: logging.LogRecord) -> str:
    """The request id of a record, or else of the current request."""
    return getattr(record, "request_id", "") or request_id.get()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
