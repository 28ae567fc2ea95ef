"""A second rank in a process of its own, for runners that share small models of a spec: no files, no engine.

Run as a module it is that process.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outrider  # noqa: F401  (first: it makes bf16 safe before torch is used)
from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.errors import RankDied
from outrider.model import Decoder
from outrider.model.load import DTYPES
from outrider.model.parallel import ParallelRunner, follow
from outrider.model.shard import Cut, ShardWeights, shard_spec
from outrider.ops.group import Group, listen

PAGES, PAGE = 9, 16
_END = "end"


class Held:
    """Parameters of a decoder in memory, as ShardWeights reads them."""

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = dict(decoder.named_parameters())

    def parts(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self._parameters[name].detach()

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def shard_of(decoder: Decoder, cut: Cut) -> Decoder:
    """A rank's share of a decoder in memory."""
    with torch.device("meta"):
        shard = Decoder(shard_spec(decoder.spec, cut.ranks), decoder.layers[0].qkv.dtype)  # type: ignore[arg-type]
    shard.share_tables(decoder)
    shard.requires_grad_(False)
    shard.source = ShardWeights(Held(decoder), shard, decoder, cut, DTYPES.get(decoder.spec.dtype, torch.float32))
    names = (name for name, _ in shard.named_parameters() if not name.startswith(("layers.", "embedding", "output")))
    shard.materialise(*names, "output_bias")
    return shard


def runner_of(name: str, dtype: str, group: Group) -> ParallelRunner:
    """A rank's runner of one of FEATURE_SPECS."""
    whole = random_decoder(FEATURE_SPECS[name], dtype)
    return ParallelRunner(whole, shard_of(whole, Cut(group.rank, group.size)), PAGES, PAGE, group)


class Pair:
    """The first rank's side of two."""

    fault: RankDied | None = None

    def __init__(self, ops: str) -> None:
        self._pipe, theirs = Pipe()
        store = listen(2)
        command = [sys.executable, "-m", "tests.support.ranks", str(theirs.fileno()), str(store.port)]
        root = Path(__file__).parents[2]
        env = os.environ | {"OUTRIDER_OPS": ops, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, cwd=root)
        self._group = Group(store, 0, 2)

    def runner(self, name: str, dtype: str) -> ParallelRunner:
        """The two ranks' runner of one of FEATURE_SPECS, in place of the one before."""
        self.tell(_END)
        self.tell(name, dtype)
        runner = runner_of(name, dtype, self._group)
        runner.lead(self)
        return runner

    def tell(self, *command: Any) -> None:
        self._pipe.send_bytes(marshal.dumps(command))

    def answers(self) -> list[Any]:
        return [marshal.loads(self._pipe.recv_bytes())]

    def blame(self, error: BaseException) -> RankDied:
        return RankDied(str(error))

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _main() -> None:
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    torch.set_num_threads(1)
    group = Group.join(int(sys.argv[2]), 1, 2)

    def commands() -> Iterator[tuple[Any, ...]]:
        while (command := marshal.loads(pipe.recv_bytes())) != (_END,):
            yield command

    list(commands())
    with torch.inference_mode():
        while True:
            runner = runner_of(*marshal.loads(pipe.recv_bytes()), group)
            follow(runner, commands(), lambda answer: pipe.send_bytes(marshal.dumps(answer)))


if __name__ == "__main__":
    try:
        _main()
    except (EOFError, OSError):
        os._exit(0)
