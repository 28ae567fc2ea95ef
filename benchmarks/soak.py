"""`python -m benchmarks.soak`: a stress test. Random requests in too little memory, each compared with its solo plain run."""

from __future__ import annotations

import gc
import json
import random
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from benchmarks.command import errors, run
from outrider.bench.environment import environment
from outrider.core import Sequence as Generation
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.engine.worker import EngineThread, Job
from outrider.errors import QueueFull
from outrider.options import Model, Threads, set_threads
from outrider.sampling import SamplingParams

__all__ = ["SoakReport", "SoakRequest", "random_requests", "soak"]


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One random request."""

    prompt: Sequence[int]
    params: SamplingParams
    speculation: dict[str, Any]
    tenant: str | None
    priority: int
    wait: float  # pause in seconds before it is sent, mostly 0
    give_up: int | None  # tokens after which its client leaves


@dataclass(slots=True)
class SoakReport:
    """The outcome of a stress test. It is good if `different`, `failed` and `leaks` are empty."""

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


def random_requests(llm: LLM, count: int, seed: int, longest: int = 48) -> list[SoakRequest]:
    """Prompts with common beginnings, all kinds of parameters, methods, tenants and priorities."""
    rng, vocab = random.Random(seed), llm.config.vocab
    stems = [[rng.randrange(vocab) for _ in range(rng.randint(20, 150))] for _ in range(6)]
    methods = sorted({arm.name for arm in llm.engine.policy.arms} & set(llm.speculation.methods()))
    out = []
    for _ in range(count):
        max_tokens = rng.randint(2, longest)
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.4]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([0, 0, 40]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            min_tokens=rng.choice([0, 0, min(5, max_tokens)]),
            stop=rng.choice([(), (), ("\n\n",), ("self", "return")]),
            logit_bias=rng.choice([None, None, {rng.randrange(vocab): 4.0}]),
            seed=rng.randrange(1000),
            max_tokens=max_tokens,
        )
        kinds: list[dict[str, Any]] = [{}, {}, {}, {"enabled": False}, {"max_tokens": rng.randint(1, 6)}]
        speculation = rng.choice([*kinds, {"method": rng.choice(methods or ["none"])}])
        tail = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
        give_up = rng.randrange(max_tokens) if rng.random() < 0.15 else None
        out.append(SoakRequest(rng.choice(stems) + tail, params, speculation, rng.choice([None, "a", "b"]), rng.choice([0, 0, 1]),
                         rng.choice([0.0, 0.0, 0.002, 0.01]), give_up))  # fmt: skip
    return out


def soak(busy: LLM, alone: LLM, requests: Sequence[SoakRequest], progress: Callable[[int], None] = lambda _: None) -> SoakReport:
    """Run the requests through `busy`'s engine thread as they come and go, then each through `alone`, plainly."""
    _ = alone.thread  # it stays, so it is no leak
    report, before, others = SoakReport(requests=len(requests)), threading.active_count(), _sequences()
    free, middle = busy.engine.pages.free, 0
    thread = busy.thread
    began = time.perf_counter()
    clients: list[_Client] = []
    try:
        for i, request in enumerate(requests):
            time.sleep(request.wait)
            while sum(not client.done.is_set() for client in clients[-64:]) >= 24:
                time.sleep(0.001)
            clients.append(_Client(busy, thread, request))
            progress(i + 1)
            middle = middle or (_resident_kb() if i >= len(requests) // 2 else 0)
        _ = [client.done.wait(600) for client in clients]
        report.seconds = time.perf_counter() - began
        scheduler = busy.engine.scheduler
        report.preemptions, report.prefix_hits = scheduler.preemptions, scheduler.prefix_hits
        report.grown_mb = round((_resident_kb() - middle) / 1024, 1)
    finally:
        thread.close()
    for i, request in enumerate(requests):
        _compare(i, clients[i], request, alone, report)
    clients.clear()
    _note_leaks(busy, free, before, report)
    held = _sequences() - others
    if held:
        report.leaks.append(f"{len(held)} sequences are still held")
    return report


class _Client:
    """Reads one request's stream in the engine's thread, and leaves early if its request says so."""

    def __init__(self, llm: LLM, thread: EngineThread, request: SoakRequest) -> None:
        self.done = threading.Event()
        self.outputs: dict[int, CompletionOutput] = {}
        self.seen: dict[int, list[int]] = {}
        self.error: str | None = None
        self.left = False
        self._request, self._thread = request, thread
        requests, method = llm.intake.prepare(
            request.prompt, request.params, request.speculation or None, request.tenant, request.priority
        )
        self._job: Job | None = None
        self._job = thread.submit(requests, method, self._on_event)

    def _on_event(self, event: Any) -> None:
        if isinstance(event, Exception):
            self.error = f"{type(event).__name__}: {event}"
            self.left = self.left or isinstance(event, QueueFull)
            self.done.set()
            return
        self.seen.setdefault(event.index, []).extend(event.token_ids)
        if event.output is not None:
            self.outputs[event.index] = event.output
        limit = self._request.give_up
        if limit is not None and not self.left and self._job is not None and sum(map(len, self.seen.values())) > limit:
            self.left = True
            self._thread.abort(self._job)
        if len(self.outputs) == self._request.params.n:
            self.done.set()


def _compare(i: int, client: _Client, one: SoakRequest, alone: LLM, report: SoakReport) -> None:
    if client.error or not client.done.is_set():
        report.failed.append(f"request {i}: {client.error or 'never ended'}")
        return
    solo = alone.generate(one.prompt, one.params)[0].outputs
    report.cancelled += client.left
    report.finished += not client.left
    for expected in solo:
        got = client.outputs[expected.index]
        report.tokens += len(got.token_ids)
        report.drafted += got.speculation["drafted"]
        report.accepted += got.speculation["accepted"]
        whole = got.finish_reason == expected.finish_reason and got.token_ids == expected.token_ids
        if not whole and not (got.finish_reason == "abort" and got.token_ids == expected.token_ids[: len(got.token_ids)]):
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
    """The sequences that are alive anywhere in the process. Nothing may keep one that has ended."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) is Generation}


def _resident_kb() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(
    model: Model = None,
    method: Annotated[str, typer.Option(help="How the busy engine drafts.")] = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Random requests in all.")] = 1000,
    longest: Annotated[int, typer.Option(min=2, help="Maximum number of tokens of a request.")] = 48,
    pages: Annotated[int, typer.Option(min=8, help="KV pages of 16 tokens: few enough that they run out.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the requests, their arrivals and cancellations.")] = 0,
    threads: Threads = None,
) -> None:
    """Random requests that come, go and are cancelled in too little memory; each is compared with its solo plain run."""
    set_threads(threads)
    alone = LLM(model, speculation="none", max_model_len=512)
    room = pages * 16 * alone.engine.runner.pool.token_bytes
    busy = LLM(model, speculation=method, max_model_len=512, max_num_seqs=16, page_size=16, kv_bytes=room)
    with errors.status("") as status:
        progress = lambda done: status.update(f"{done} of {requests} requests sent")  # noqa: E731
        report = soak(busy, alone, random_requests(busy, requests, seed, longest), progress)
    print(json.dumps(report.as_dict() | environment()))
    if not report.good:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
