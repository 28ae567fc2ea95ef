"""`python -m outrider.engine.rank`: a process that holds one share of a model and follows the first rank.

It lives as long as the process that started it: it leaves when their pipe closes, and when that process is gone.
"""

from __future__ import annotations

import marshal
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["main"]

_LOOK_S = 0.5


def main() -> None:
    """Join the ranks of the parent process, load a share, and follow."""
    handle, parent = map(int, sys.argv[1:])
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # whatever a library prints belongs to the log of the parent, not to its output
    sys.stderr = None  # the first rank says what both would: warnings, a progress bar
    pipe: Connection[Any, Any] = Connection(handle)
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the first rank has ended
    except BaseException as error:
        with suppress(OSError):
            _send(pipe, "failed", type(error).__name__, str(error))
        os._exit(1)
    os._exit(0)  # threads of torch.distributed must not see their group go


def _serve(pipe: Connection[Any, Any]) -> None:
    import torch

    from outrider.engine.rank_identity import identity_of
    from outrider.model.load import LoadOptions, describe_decoder
    from outrider.model.parallel import ParallelRunner, follow
    from outrider.model.shard import Cut, open_shard
    from outrider.ops import keep_one_torch_thread
    from outrider.ops.group import Group

    settings = marshal.loads(pipe.recv_bytes())
    torch.set_num_threads(settings["threads"])
    directory, options = Path(settings["directory"]), LoadOptions(**settings["options"])
    _send(pipe, "here", identity_of(directory, options))
    port = marshal.loads(pipe.recv_bytes())[0]
    cut = Cut(settings["rank"], settings["ranks"])
    group = Group.join(port, cut.rank, cut.ranks)
    _send(pipe, "joined")
    whole = describe_decoder(directory, options)
    shard = open_shard(whole, cut)
    runner = ParallelRunner(whole, shard, settings["pages"], settings["page_size"], group)
    whole.close()
    shard.close()
    _send(pipe, "loaded")
    keep_one_torch_thread(runner.ops)
    with torch.inference_mode():
        follow(runner, _commands(pipe), lambda answer: _send(pipe, answer))


def _commands(pipe: Connection[Any, Any]) -> Iterator[tuple[Any, ...]]:
    while True:
        yield marshal.loads(pipe.recv_bytes())


def _send(pipe: Connection[Any, Any], *message: Any) -> None:
    pipe.send_bytes(marshal.dumps(message))


def _leave_with(parent: int) -> None:
    """End with the parent, in the middle of whatever runs."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
