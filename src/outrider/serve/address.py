"""The listening socket. Light to import, so that a port in use is told before anything slow begins."""

from __future__ import annotations

import errno
import socket

from outrider.errors import InvalidParameter

__all__ = ["listen"]


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything slow begins."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise InvalidParameter("--host", f"{host!r} is no address of this machine ({error.strerror})") from None
    own = socket.socket(family, kind, proto)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind(address)
    except OSError as error:
        own.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidParameter("--port", f"{port} is in use on {host}; choose another, or 0 for any free one") from None
        raise InvalidParameter("--host", f"{host}:{port} cannot be bound: {error.strerror}") from None
    own.listen(2048)
    own.setblocking(False)
    return own
