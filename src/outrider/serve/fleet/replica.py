"""One replica's process: `outrider serve` on a Unix socket, ended when the front door's process ends.

Run as `python -m outrider.serve.fleet.replica DESCRIPTOR ARGUMENTS...`. The descriptor is a pipe that closes with the parent.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Serve as the arguments say."""
    descriptor = int(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(descriptor,), name="outrider-parent", daemon=True).start()
    sys.argv = ["outrider", *sys.argv[2:]]
    runpy.run_module("outrider", run_name="__main__")


def _end_with_parent(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        threading.Event().wait(5.0)


if __name__ == "__main__":
    main()
