"""Which replica serves a request, and how many replicas there should be. Nothing here knows HTTP, Ray or a clock.

The front door of one machine, Ray Serve's router and the fleet's simulator use these very objects, the last in virtual time.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider import checks

__all__ = [
    "ReplicaLoad",
    "RequestKeys",
    "Router",
    "RouterOptions",
    "Scaling",
    "ScalingRule",
    "desired_replicas",
    "text_prefix",
    "token_prefix",
    "wanted_replicas",
]

TEXT_BLOCK = 256  # bytes, about a page of 64 tokens
TOKEN_BLOCK = 64  # tokens, a page of the engine
_BLOCKS = 128  # leading blocks that are looked at
_HOLDERS = 64  # replicas remembered for a key; one that this many hold says nothing about where to go


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """What a request has in common with earlier ones."""

    conversation: str | None = None
    tenant: str | None = None
    prefix: tuple[int, ...] = ()  # hashes of the prompt's first block, first two blocks, and so on


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Sequences of one replica, and how many it runs at once."""

    running: int
    waiting: int
    capacity: int

    @property
    def share(self) -> float:
        return (self.running + self.waiting) / max(self.capacity, 1)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Bounds of a router."""

    spill: float = 0.25  # a replica whose load is above the least loaded one's by more than this is passed over
    keys: int = 2**16  # remembered keys
    memory_s: float = 1800.0  # after which a key is forgotten that no request has had

    def __post_init__(self) -> None:
        checks.real("spill", self.spill, 0.0)
        checks.integer("keys", self.keys, 1)
        checks.real("memory_s", self.memory_s, 0.0)


def token_prefix(ids: Sequence[int], tenant: str = "", block: int = TOKEN_BLOCK) -> tuple[int, ...]:
    """Hashes of the whole leading blocks of a prompt. Those of two tenants differ, as their KV is not shared."""
    ends = range(block, min(len(ids), block * _BLOCKS) + 1, block)
    return tuple(_chain(tenant, (b"".join(i.to_bytes(4, "little") for i in ids[end - block : end]) for end in ends)))


def text_prefix(text: str, tenant: str = "", block: int = TEXT_BLOCK) -> tuple[int, ...]:
    """The same for a prompt that is not yet tokenised. A text shorter than a block is one block."""
    encoded = text[: block * _BLOCKS].encode("utf-8", "surrogatepass")
    whole = max(len(encoded) // block, 1 if encoded else 0)
    return tuple(_chain(tenant, (encoded[i * block : (i + 1) * block] for i in range(min(whole, _BLOCKS)))))


def _chain(seed: str, blocks: Iterable[bytes]) -> Iterator[int]:
    state = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    for block in blocks:
        state = hashlib.blake2b(state + block, digest_size=8).digest()
        yield int.from_bytes(state, "little")


class Router:
    """Sends a request where its conversation is, else its longest known prefix, else its tenant, else to the least loaded.

    Replicas that have much more to do than the least loaded one are passed over. Among equals a hash of the request decides
    (rendezvous hashing), so that routers with the same memory agree.
    """

    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options = options or RouterOptions()
        self._holders: OrderedDict[str | int, dict[str, float]] = OrderedDict()  # replicas by key, latest last, with times
        self._now = 0.0

    def choose(self, keys: RequestKeys, loads: Mapping[str, ReplicaLoad], now: float) -> str:
        """The replica for a request. `loads` names all that may serve it; `now` is in seconds and never goes back."""
        if not loads:
            raise ValueError("there is no replica to choose from")
        self._now = max(self._now, now)
        least = min(load.share for load in loads.values())
        free = {name: load.share for name, load in loads.items() if load.share - least <= self.options.spill}
        return self._known(keys, free) or self._least(keys, free, free)

    def sent(self, replica: str, keys: RequestKeys) -> None:
        """Remember that a replica got a request, at the time of the last choice."""
        for key in _names(keys):
            holders = self._holders.setdefault(key, {})
            holders.pop(replica, None)
            holders[replica] = self._now
            if len(holders) > _HOLDERS:
                del holders[next(iter(holders))]
            self._holders.move_to_end(key)
        while len(self._holders) > self.options.keys:
            self._holders.popitem(last=False)

    def gone(self, replica: str) -> None:
        """Forget a replica that has ended: one of the same name would begin with nothing."""
        for key, holders in list(self._holders.items()):
            holders.pop(replica, None)
            if not holders:
                del self._holders[key]

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._holders)

    def _known(self, keys: RequestKeys, free: Mapping[str, float]) -> str | None:
        if keys.conversation is not None:
            latest = self._recent(_conversation(keys.conversation), free)
            if latest:
                return latest[-1]
        shared: list[str | int] = [*reversed(keys.prefix)]
        for key in shared if keys.tenant is None else [*shared, _tenant(keys.tenant)]:
            holders = self._recent(key, free)
            if holders and len(self._holders[key]) < _HOLDERS:
                return self._least(keys, free, holders)
        return None

    def _recent(self, key: str | int, free: Mapping[str, float]) -> list[str]:
        """The free replicas that hold a key, latest last."""
        oldest = self._now - self.options.memory_s
        return [name for name, time in self._holders.get(key, {}).items() if time >= oldest and name in free]

    @staticmethod
    def _least(keys: RequestKeys, free: Mapping[str, float], names: Iterable[str]) -> str:
        """The least loaded of some replicas; of equals the one with the highest hash."""
        candidates = list(names)
        share = min(free[name] for name in candidates)
        equals = [name for name in candidates if free[name] == share]
        return equals[0] if len(equals) == 1 else max(equals, key=lambda name: (_rank(name, _identity(keys)), name))


def _names(keys: RequestKeys) -> Iterator[str | int]:
    """Keys as they are remembered. Of a prefix the first block comes last, as most requests share it: it is forgotten last."""
    if keys.tenant is not None:
        yield _tenant(keys.tenant)
    yield from reversed(keys.prefix)
    if keys.conversation is not None:
        yield _conversation(keys.conversation)


def _conversation(name: str) -> str:
    return f"conversation {name}"


def _tenant(name: str) -> str:
    return f"tenant {name}"


def _identity(keys: RequestKeys) -> str:
    if keys.conversation is not None:
        return _conversation(keys.conversation)
    return str(keys.prefix[0]) if keys.prefix else _tenant(keys.tenant or "")


def _rank(name: str, identity: str) -> int:
    digest = hashlib.blake2b(f"{identity}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """How many replicas there may be, and how soon their number follows the load."""

    min_replicas: int = 1
    max_replicas: int = 1
    target: float = 0.7  # (running + waiting) ÷ capacity that is aimed at
    up_s: float = 10.0  # for which more replicas must be wanted before there are more
    down_s: float = 120.0  # and fewer before there are fewer

    def __post_init__(self) -> None:
        checks.integer("min_replicas", self.min_replicas, 1)
        checks.integer("max_replicas", self.max_replicas, self.min_replicas)
        checks.real("target", self.target, 0.0, low_open=True)
        checks.real("up_s", self.up_s, 0.0)
        checks.real("down_s", self.down_s, 0.0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The number of replicas, and since when another one is wanted."""

    replicas: int
    since: float | None = None  # since when more, or fewer, are wanted without a break
    wanted: int | None = None  # of the numbers wanted since then the one nearest to `replicas`


def wanted_replicas(running: int, waiting: int, capacity: int, rule: ScalingRule) -> int:
    """The number that brings (running + waiting) ÷ capacity to the target. `capacity` is that of one replica."""
    wanted = math.ceil((running + waiting) / (max(capacity, 1) * rule.target) - 1e-9)
    return min(max(wanted, rule.min_replicas), rule.max_replicas)


def desired_replicas(running: int, waiting: int, capacity: int, rule: ScalingRule, scaling: Scaling, now: float) -> Scaling:
    """One step of autoscaling: follow what is wanted once it has been wanted long enough."""
    wanted = wanted_replicas(running, waiting, capacity, rule)
    present = scaling.replicas
    if wanted == present:
        return Scaling(present)
    goes_on = scaling.since is not None and scaling.wanted is not None and (scaling.wanted > present) == (wanted > present)
    since = scaling.since if goes_on and scaling.since is not None else now
    nearest = wanted
    if goes_on and scaling.wanted is not None:
        nearest = min(wanted, scaling.wanted) if wanted > present else max(wanted, scaling.wanted)
    delay = rule.up_s if wanted > present else rule.down_s
    return Scaling(nearest) if now - since >= delay else Scaling(present, since, nearest)
