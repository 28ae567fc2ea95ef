"""The processes that hold the other shares of a model: started by the first rank, watched, and ended with it."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from outrider import checks
from outrider.engine.device import Device
from outrider.engine.rank_identity import check_identities, identity_of
from outrider.errors import InvalidParameter, ModelError, OutriderError, RankDied
from outrider.model.decoder import Decoder
from outrider.model.load import LoadOptions
from outrider.model.parallel import ParallelRunner
from outrider.model.shard import PARAMETER, Cut, check_ranks, open_shard
from outrider.model.spec import ModelSpec
from outrider.ops.group import Group, listen, missing_backend

__all__ = ["PORT", "Ranks", "Sharing", "check_parallel", "shared_threads", "start_parallel"]

PORT = "OUTRIDER_PARALLEL_PORT"  # of this machine, on which ranks find each other; by default any that is free
_LOOK_S = 0.2
_PATIENCE_S = 2.0  # for a rank that has closed its pipe to end


@dataclass(frozen=True, slots=True)
class Sharing:
    """A model that ranks are to share, and the KV that each of them gives its heads."""

    directory: Path
    options: LoadOptions
    ranks: int
    pages: int
    page_size: int


def check_parallel(ranks: int, device: Device, spec: ModelSpec | None = None, loras: bool = False) -> None:
    """Refuse what several ranks cannot do, before any is started."""
    if ranks == 1:
        return
    if device.is_gpu:
        raise InvalidParameter(PARAMETER, "models are not shared by several GPUs yet; pass device=cpu, or leave it at 1")
    if reason := missing_backend(device.name):
        raise InvalidParameter(PARAMETER, f"cannot be {ranks}: {reason}; leave it at 1")
    if loras:
        raise InvalidParameter("lora", f"tensor parallel does not serve LoRA adapters yet; leave {PARAMETER} at 1")
    if spec is not None:
        check_ranks(spec, ranks)


@contextlib.contextmanager
def shared_threads(ranks: int) -> Iterator[None]:
    """Load with a share of the processor's threads: every rank gets as many."""
    if ranks == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_parallel(whole: Decoder, sharing: Sharing) -> ParallelRunner:
    """Start the other ranks, load this one's share beside them, and compare what all have. Called with the threads of a rank.

    `whole` is the model without its weights.
    """
    store = _listen(sharing.ranks)
    others = Ranks(sharing)
    try:
        check_identities([identity_of(sharing.directory, sharing.options), *others.hear_all("here")])
        others.tell(store.port)
        group = others.beside(lambda: Group(store, 0, sharing.ranks))
        others.hear_all("joined")
        shard = open_shard(whole, Cut(0, sharing.ranks))
        runner = ParallelRunner(whole, shard, sharing.pages, sharing.page_size, group)
        whole.close()
        shard.close()
        others.hear_all("loaded")
        runner.lead(others)
        runner.probe()
        return runner
    except BaseException:
        others.close()
        raise


class Ranks:
    """All ranks but the first, from its side: `tell` and `answers` are called by the thread that runs forwards."""

    def __init__(self, sharing: Sharing) -> None:
        self._family = _Family([_start() for _ in range(1, sharing.ranks)])
        weakref.finalize(self, self._family.end)  # also when this process ends; what ends it otherwise closes the pipes
        shared = {"directory": str(sharing.directory), "options": asdict(sharing.options), "ranks": sharing.ranks}
        shared |= {"pages": sharing.pages, "page_size": sharing.page_size, "threads": torch.get_num_threads()}
        for rank, member in enumerate(self._family.members, 1):
            _send(member.pipe, shared | {"rank": rank})

    @property
    def fault(self) -> RankDied | None:
        return self._family.fault

    @property
    def processes(self) -> list[int]:
        """Their process ids, in order of rank."""
        return [member.process.pid for member in self._family.members]

    def tell(self, *command: Any) -> None:
        for member in self._family.members:
            try:
                _send(member.pipe, command)
            except OSError as error:
                raise self.blame(error) from error

    def answers(self) -> list[Any]:
        return [message[0] for message in self._messages()]

    def hear_all(self, kind: str) -> list[Any]:
        """What each of them has to say of a step of the start, when all have taken it."""
        messages = list(self._messages())
        assert all(message[0] == kind for message in messages)
        return [message[1] if len(message) > 1 else None for message in messages]

    def beside(self, make: Callable[[], Group]) -> Group:
        """Make something that needs all ranks, unless one of them ends first."""
        made: Future[Group] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # without an end where a rank never comes
        while not made.done():
            futures.wait([made], timeout=_LOOK_S)
            if self.fault is not None:
                raise self.fault
        return made.result()

    def blame(self, error: BaseException) -> RankDied:
        return self._family.blame(error)

    def close(self) -> None:
        self._family.end()

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        for rank, member in enumerate(self._family.members, 1):
            message = self._hear(member.pipe)
            if message[0] == "failed":
                raise _as_error(rank, *message[1:])
            yield message

    def _hear(self, pipe: Connection[Any, Any]) -> tuple[Any, ...]:
        try:
            return tuple(marshal.loads(pipe.recv_bytes()))
        except (EOFError, OSError) as error:
            raise self.blame(error) from error


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank's process and this process's end of the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]


class _Family:
    """Processes that live and die together. Threads watch them, and hold no more than this."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.fault: RankDied | None = None
        self._owner = os.getpid()
        self._ending = False
        self._lock = threading.Lock()
        self._failed = threading.Event()
        for rank, member in enumerate(members, 1):
            threading.Thread(target=self._watch, args=(rank, member.process), daemon=True).start()

    def blame(self, error: BaseException) -> RankDied:
        """End all because of an error here, which is often the sign that one of them has just ended."""
        if not self._failed.wait(_PATIENCE_S):
            self._fail(f"a rank of the model does not answer: {error}")
        assert self.fault is not None
        return self.fault

    def end(self) -> None:
        """End them all, and wait for it. A forked child of this process leaves them alone."""
        if os.getpid() != self._owner:
            return
        self._ending = True
        for member in self.members:
            member.process.kill()  # they hold nothing that is worth keeping
        for member in self.members:
            member.process.wait()
            member.pipe.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._ending:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._fail(f"rank {rank} of the model (process {process.pid}) {how}")

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.fault is None:
                self.fault = RankDied(f"{why}; the others were ended, load the model again")
        self._failed.set()
        for member in self.members:
            member.process.kill()


def _start() -> _Member:
    """A process of its own session: Ctrl-C is for the first rank, which ends the others."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "outrider.engine.rank", str(theirs.fileno()), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with theirs:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment
        )
    return _Member(process, ours)


def _send(pipe: Connection[Any, Any], message: Any) -> None:
    pipe.send_bytes(marshal.dumps(message))


def _listen(ranks: int) -> Any:
    port = os.environ.get(PORT, "0")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidParameter(PORT, f"must be a port from 0 (any that is free) to 65535, got {checks.shown(port)}")
    try:
        return listen(ranks, int(port))
    except (RuntimeError, OSError) as error:
        raise InvalidParameter(PORT, f"port {port} is in use or not allowed; unset {PORT} to take one that is free") from error


def _as_error(rank: int, name: str, message: str) -> OutriderError:
    """What a rank failed of, as an error of the same name where it is one of ours."""
    if name == ModelError.__name__:
        return ModelError(message)
    return RankDied(f"rank {rank} of the model failed: {name}: {message}")
