"""`outrider bench soak`: a crowd of random requests in too little memory, each compared with its solo plain run."""

from __future__ import annotations

import gc
import random
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.core import Sequence as Generation
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.engine.worker import EngineThread, Job
from outrider.errors import QueueFull
from outrider.sampling import SamplingParams

__all__ = ["Asked", "SoakReport", "random_requests", "soak"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the crowd."""

    prompt: Sequence[int]
    params: SamplingParams
    speculation: dict[str, Any]
    tenant: str | None
    priority: int
    wait: float  # rounds' worth of a pause before it comes, 0 mostly
    give_up: int | None  # tokens after which its client leaves


@dataclass(slots=True)
class SoakReport:
    """What came of it. Good where `different`, `failed` and `leaks` are empty."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0
    different: list[int] = field(default_factory=list)  # requests whose tokens are not those of the solo run
    failed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    grown_mb: float = 0.0  # resident memory over the second half

    @property
    def good(self) -> bool:
        return not (self.different or self.failed or self.leaks)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def random_requests(llm: LLM, count: int, seed: int, longest: int = 48) -> list[Asked]:
    """Prompts with common beginnings, all kinds of parameters, methods, tenants and priorities."""
    rng, vocab = random.Random(seed), llm.config.vocab
    stems = [[rng.randrange(vocab) for _ in range(rng.randint(20, 150))] for _ in range(6)]
    methods = sorted({arm.name for arm in llm.engine.policy.arms} & set(llm.speculation.methods()))
    out = []
    for _ in range(count):
        most = rng.randint(2, longest)
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.4]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([0, 0, 40]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            min_tokens=rng.choice([0, 0, min(5, most)]),
            stop=rng.choice([(), (), ("\n\n",), ("self", "return")]),
            logit_bias=rng.choice([None, None, {rng.randrange(vocab): 4.0}]),
            seed=rng.randrange(1000),
            max_tokens=most,
        )
        kinds: list[dict[str, Any]] = [{}, {}, {}, {"enabled": False}, {"max_tokens": rng.randint(1, 6)}]
        speculation = rng.choice([*kinds, {"method": rng.choice(methods or ["none"])}])
        tail = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
        give_up = rng.randrange(most) if rng.random() < 0.15 else None
        out.append(Asked(rng.choice(stems) + tail, params, speculation, rng.choice([None, "a", "b"]), rng.choice([0, 0, 1]),
                         rng.choice([0.0, 0.0, 0.002, 0.01]), give_up))  # fmt: skip
    return out


def soak(crowd: LLM, alone: LLM, asked: Sequence[Asked], told: Callable[[int], None] = lambda _: None) -> SoakReport:
    """Run the requests through `crowd`'s engine thread as they come and go, then each through `alone`, plainly."""
    report, before, others = SoakReport(requests=len(asked)), threading.active_count(), _sequences()
    free, middle = crowd.engine.pages.free, 0
    thread = EngineThread(crowd.engine)
    began = time.perf_counter()
    clients: list[_Client] = []
    try:
        for i, one in enumerate(asked):
            time.sleep(one.wait)
            while sum(not client.done.is_set() for client in clients[-64:]) >= 24:
                time.sleep(0.001)
            clients.append(_Client(crowd, thread, one))
            told(i + 1)
            middle = middle or (_resident_kb() if i >= len(asked) // 2 else 0)
        _ = [client.done.wait(600) for client in clients]
        report.seconds = time.perf_counter() - began
        scheduler = crowd.engine.scheduler
        report.preemptions, report.prefix_hits = scheduler.preemptions, scheduler.prefix_hits
        report.grown_mb = round((_resident_kb() - middle) / 1024, 1)
    finally:
        thread.close()
    for i, one in enumerate(asked):
        _judge(i, clients[i], one, alone, report)
    clients.clear()
    _note_leaks(crowd, free, before, report)
    held = _sequences() - others
    if held:
        report.leaks.append(f"{len(held)} sequences are still held")
    return report


class _Client:
    """Reads one request's stream in the engine's thread, and leaves early where it is meant to."""

    def __init__(self, llm: LLM, thread: EngineThread, asked: Asked) -> None:
        self.done = threading.Event()
        self.outputs: dict[int, CompletionOutput] = {}
        self.seen: dict[int, list[int]] = {}
        self.error: str | None = None
        self.left = False
        self._asked, self._thread = asked, thread
        requests, method = llm.requests(asked.prompt, asked.params, asked.speculation or None, asked.tenant, asked.priority)
        self._job: Job | None = None
        self._job = thread.submit(requests, method, self._hear)

    def _hear(self, news: Any) -> None:
        if isinstance(news, Exception):
            self.error = f"{type(news).__name__}: {news}"
            self.left = self.left or isinstance(news, QueueFull)
            self.done.set()
            return
        self.seen.setdefault(news.index, []).extend(news.token_ids)
        if news.output is not None:
            self.outputs[news.index] = news.output
        limit = self._asked.give_up
        if limit is not None and not self.left and self._job is not None and sum(map(len, self.seen.values())) > limit:
            self.left = True
            self._thread.abort(self._job)
        if len(self.outputs) == self._asked.params.n:
            self.done.set()


def _judge(i: int, client: _Client, one: Asked, alone: LLM, report: SoakReport) -> None:
    if client.error or not client.done.is_set():
        report.failed.append(f"request {i}: {client.error or 'never ended'}")
        return
    solo = alone.generate(one.prompt, one.params)[0].outputs
    report.cancelled += client.left
    report.finished += not client.left
    for own in solo:
        got = client.outputs[own.index]
        report.tokens += len(got.token_ids)
        report.drafted += got.speculation["drafted"]
        report.accepted += got.speculation["accepted"]
        whole = got.finish_reason == own.finish_reason and got.token_ids == own.token_ids
        if not whole and not (got.finish_reason == "abort" and got.token_ids == own.token_ids[: len(got.token_ids)]):
            report.different.append(i)
        if got.speculation["fallback_reason"]:
            report.failed.append(f"request {i}: {got.speculation['fallback_reason']}")


def _note_leaks(llm: LLM, free: int, threads: int, report: SoakReport) -> None:
    """Pages and threads."""
    if llm.engine.pages.free != free:
        report.leaks.append(f"{free - llm.engine.pages.free} pages")
    if threading.active_count() > threads:
        report.leaks.append(f"{threading.active_count() - threads} threads")


def _sequences() -> set[int]:
    """Those alive anywhere in the process: nothing may hold on to one that is over."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) is Generation}


def _resident_kb() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
