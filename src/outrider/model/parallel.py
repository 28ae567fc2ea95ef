"""A runner whose layers are shared by several processes: the ranks. Tensor parallel in the sense of Megatron.

The first rank is the engine's. It tells the others what it runs, and all of them run it at once, each with its share of the
weights and of the KV. Hidden rows and logits are whole, and have the same bits, on every rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache import KVPool
from outrider.errors import EngineDead, InvalidParameter, RankDied
from outrider.model.backends import cpu_ops
from outrider.model.decoder import Decoder, Hidden
from outrider.model.runner import Feed, Runner
from outrider.ops.forwards import network
from outrider.ops.group import Group

__all__ = ["OtherRanks", "ParallelRunner", "follow"]

Command = tuple[Any, ...]
PROBE = 5  # rows of the forward by which ranks are compared


class OtherRanks(Protocol):
    """The first rank's view of the others."""

    @property
    def fault(self) -> RankDied | None:
        """Why they have ended, where they have."""

    def tell(self, *command: Any) -> None:
        """Send a command to all of them: its name and its arguments, as plain data."""

    def blame(self, error: BaseException) -> RankDied:
        """End the others, because this rank's part of a command has failed; the error that says why."""

    def answers(self) -> list[Any]:
        """What each of them answers to the last command."""

    def close(self) -> None: ...


class FeedRows(NamedTuple):
    """Rows of a forward as this rank runs them, and the feeds that the others lay out for themselves."""

    feeds: list[Command]
    rows: Any
    tokens: list[int]


class ParallelPool(KVPool):
    """This rank's share of the KV. What is moved and cleared in it is moved and cleared in the others' too."""

    others: OtherRanks | None = None

    def __init__(self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int) -> None:
        super().__init__(layers, pages, kv_heads, page_size, head_dim)
        self.turn = threading.RLock()  # all ranks do one thing at a time, in one order

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        with self.turn:
            if source and self._tell("move", list(source), list(target)):
                super().move(source, target)

    def clear(self, pages: Sequence[int]) -> None:
        with self.turn:
            if self._tell("clear", list(pages)):
                super().clear(pages)

    def _tell(self, *command: Any) -> bool:
        """Whether there is still something to do: after a rank has died nothing is computed any more."""
        if self.others is None:
            return True
        if self.others.fault is None:
            self.others.tell(*command)
        return self.others.fault is None


class NoAdapters:
    """In place of the adapters of other runners."""

    @property
    def dtype(self) -> NoReturn:
        raise InvalidParameter("lora", "tensor parallel does not serve LoRA adapters yet; load the model with one rank")


class ParallelRunner(Runner):
    """One rank's end of a model. On the first rank, `others` are told of every forward."""

    group: Group
    pool: ParallelPool

    def __init__(self, whole: Decoder, shard: Decoder, pages: int, page_size: int, group: Group) -> None:
        c = shard.spec
        self.decoder = whole
        self.ops = cpu_ops(whole.spec)
        self.pool = ParallelPool(c.depth, pages, c.kv_heads, page_size, c.head_dim)
        self.ranks = group.size
        # first, while little else is held; as narrow as it is stored, which torch does not multiply by
        table = None if self.ops.core is None else shard.weight("embedding")
        self._share = Runner(shard, self.pool, self.ops, group)
        self.stack = self._share.stack
        self.group = group
        self.adapters = NoAdapters()  # type: ignore[assignment]
        self._others: OtherRanks | None = None
        self._table = shard.embedding.detach() if table is None else table
        self._first = group.rank * c.vocab  # of the tokens whose embeddings are here

    def lead(self, others: OtherRanks) -> None:
        """Be the first rank: tell the others from now on."""
        self._others = self.pool.others = others

    @property
    def fault(self) -> EngineDead | None:  # type: ignore[override]
        return None if self._others is None else self._others.fault

    @property
    def others(self) -> OtherRanks | None:
        """The other ranks, from the first one's side."""
        return self._others

    @property
    def drafts_chains(self) -> int:
        return 0

    def close(self) -> None:
        if self._others is not None:
            self._others.close()

    def prepare(self, feeds: Sequence[Feed]) -> Any:
        plain: list[Command] = [tuple(x if isinstance(x, int) else list(x) for x in feed[:-1]) for feed in feeds]
        tokens = [token for feed in feeds for part in (feed.tokens, feed.nodes) for token in part]
        return FeedRows(plain, self._share.prepare(feeds), tokens)

    @network
    def run(
        self,
        rows: Any,
        taps: tuple[int, ...] = (),
        layers: range | None = None,
        x: Tensor | None = None,
        wanted: Sequence[int] = (),
    ) -> Hidden:
        """As Runner.run, by all ranks."""
        span = None if layers is None else (layers.start, layers.stop)
        with self.pool.turn:
            self._tell("run", rows.feeds, taps, span, None if x is None else x.numpy().tobytes(), list(wanted))
            return self.run_here(rows, taps, layers, x, wanted)

    def run_here(
        self, rows: FeedRows, taps: tuple[int, ...], layers: range | None, x: Tensor | None, wanted: Sequence[int]
    ) -> Hidden:
        """This rank's part of `run`."""
        with self._in_step():
            x = self._embed(rows.tokens) if x is None else x
            hidden = self._share.run_rows(rows.rows, taps, layers, x, wanted)
            assert hidden.logits is not None
            hidden.logits = self._whole_rows(hidden.logits)
        return hidden

    @network
    def logits(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        chosen = last if len(rows) == len(last) else last[list(rows)]
        with self.pool.turn:
            self._tell("logits", chosen.float().numpy().tobytes())
            return self.logits_here(chosen)

    def logits_here(self, last: Tensor) -> Tensor:
        with self._in_step():
            return self._whole_rows(self._share.logits_of(last, range(len(last))))

    def rows_of(self, sent: bytes) -> Tensor:
        """Hidden rows as the first rank sent them."""
        return torch.frombuffer(bytearray(sent), dtype=torch.float32).view(-1, self.decoder.spec.hidden)

    @torch.inference_mode()
    def _embed(self, tokens: Sequence[int]) -> Tensor:
        """Rows that enter the first layer: each token's embedding is on one rank, and the others add zeros."""
        spec, place = self.decoder.spec, torch.tensor(tokens) - self._first
        here = (place >= 0) & (place < len(self._table))
        x = F.embedding(place.where(here, 0), self._table).float().where(here[:, None], 0.0)
        x = self.group.sum(x)
        return x * spec.embedding_scale if spec.embedding_scale != 1.0 else x

    @torch.inference_mode()
    def _whole_rows(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary from this rank's."""
        vocab = self.decoder.spec.vocab
        if not len(logits):
            return torch.empty(0, vocab)
        return self.group.gather(logits).transpose(0, 1).flatten(1)[:, :vocab].contiguous()

    def digests(self, feeds: Sequence[Feed]) -> list[str]:
        """Of each rank's logits and hidden rows after a forward of these feeds: all are the same, or something is wrong."""
        rows = self.prepare(feeds)
        with self.pool.turn:
            self._tell("digest", rows.feeds)
            first = self.digest_here(rows)
            return [first, *(self._others.answers() if self._others is not None else ())]

    def probe(self) -> None:
        """Raise where the ranks do not agree on a first forward, in the page that padding writes to."""
        page = self.pool.pages - 1
        tokens = [(7 + 31 * i) % self.decoder.spec.vocab for i in range(min(PROBE, self.pool.page_size))]
        digests = self.digests([Feed([page], 0, tokens)])
        self.pool.clear([page])
        if len(set(digests)) > 1:
            raise RankDied("the ranks' first logits differ, so they hold different weights; fetch the model again and restart")

    def digest_here(self, rows: FeedRows) -> str:
        hidden = self.run_here(rows, (), None, None, range(len(rows.tokens)))
        assert hidden.logits is not None
        return hashlib.sha256(hidden.logits.numpy().tobytes() + hidden.last.numpy().tobytes()).hexdigest()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Around what all ranks do together. Whatever interrupts one of them, the others are a step ahead of it for ever."""
        try:
            yield
        except BaseException as error:
            self.group.failure = self.group.failure or error
            if self._others is None:
                raise
            raise self._others.blame(self.group.failure) from error

    def _tell(self, *command: Any) -> None:
        if self._others is not None:
            if self._others.fault is not None:
                raise self._others.fault
            self._others.tell(*command)
        self.group.check()


def follow(runner: ParallelRunner, commands: Iterable[Command], answer: Callable[[str], None]) -> None:
    """Run what the first rank runs, to the end of its commands."""
    for name, *args in commands:
        if name == "run":
            feeds, taps, span, x, wanted = args
            rows = runner.prepare([Feed(*feed) for feed in feeds])
            runner.run_here(rows, taps, None if span is None else range(*span), None if x is None else runner.rows_of(x), wanted)
        elif name == "logits":
            runner.logits_here(runner.rows_of(args[0]))
        elif name == "digest":
            answer(runner.digest_here(runner.prepare([Feed(*feed) for feed in args[0]])))
        elif name == "move":
            runner.pool.move(*args)
        else:
            assert name == "clear"
            runner.pool.clear(*args)
