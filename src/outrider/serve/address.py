"""The listening socket, and the terminal. Imports little, so that a port in use is reported before anything slow starts."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from outrider.errors import InvalidParameter

__all__ = ["has_terminal", "listen", "listen_on_path"]


def listen(host: str, port: int) -> socket.socket:
    """Bind and return the listening socket, or raise InvalidParameter that names the flag at fault."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise InvalidParameter("--host", f"{host!r} is no address of this machine ({error.strerror})") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidParameter("--port", f"{port} is in use on {host}; choose another, or 0 for any free one") from None
        raise InvalidParameter("--host", f"{host}:{port} cannot be bound: {error.strerror}") from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def listen_on_path(path: Path) -> socket.socket:
    """Bind and return a listening Unix socket that this user alone can reach. A socket that nobody listens on is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        reason = "is in use; choose another" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror or error}"
        raise InvalidParameter("--uds", f"{path} {reason}") from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def has_terminal() -> bool:
    """Whether the process has a controlling terminal that is still open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
