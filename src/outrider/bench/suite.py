"""`outrider bench`: methods over workloads, temperatures and batch sizes, interleaved, one row for each as it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from outrider.bench.summary import Group, Tally, combined, cost_points, summary
from outrider.bench.watch import watching
from outrider.bench.workloads import load_prompts
from outrider.config import SpeculationConfig, parse_method
from outrider.draft import check_method
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = ["PLAIN", "Suite", "expand_methods", "run_suite"]

PLAIN = "none"
_ALONE_GROUPS = 2  # whose forwards are also timed alone
_UNSIZED = ("none", "auto")  # methods whose draft length is not given
Ids = tuple[int, ...]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured."""

    methods: Sequence[str]
    workloads: Sequence[str]
    model: str | None = None
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    max_tokens: int = 128
    limit: int = 5  # prompts of each category; a larger batch takes as many as it holds
    repeats: int = 3
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = False
    load: dict[str, Any] = field(default_factory=dict)  # dtype, load_format

    def __post_init__(self) -> None:
        if not all(batch > 0 for batch in self.batches):
            raise InvalidParameter("batches", f"must be above 0, got {', '.join(map(str, self.batches))}")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # says what is wrong with it, before anything is loaded


@dataclass(frozen=True, slots=True)
class _Case:
    workload: str
    category: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        category = "" if self.category == self.workload else f" ({self.category})"
        return f"{self.workload}{category}, T {self.temperature:g}, batch {self.batch}"


def expand_methods(methods: str, lengths: Sequence[int]) -> list[str]:
    """Methods from a list, plain decoding first, each without a length of its own at every given length; all checked."""
    found = [PLAIN]
    for method in methods.split(","):
        settings = parse_method(method)
        SpeculationConfig.parse(settings)
        check_method(settings["method"])
        sized = settings["method"] in _UNSIZED or "draft_tokens" in settings or not lengths
        found += [method] if sized else [_with_length(method, settings["method"], length) for length in lengths]
    return list(dict.fromkeys(found))


def run_suite(suite: Suite, say: Say) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: one per method and category where there are several, and one for the whole workload."""
    bench = _Bench(suite, say)
    vocab, tokenizer = bench.plain.config.vocab, bench.plain.tokenizer
    sets = [load_prompts(name, vocab).tokenized(tokenizer, suite.chat) for name in suite.workloads]
    for prompts, temperature, batch in product(sets, suite.temperatures, suite.batches):
        marks: dict[str, Any] = {"temperature": temperature, "batch": batch}
        tallies: list[dict[str, Tally]] = []
        for category, own in prompts.categories.items():
            tallies.append(bench.measure(_Case(prompts.name, category, temperature, batch), own))
            if len(prompts.categories) > 1:
                for method, tally in tallies[-1].items():
                    head = {"method": method, "workload": prompts.name, "category": category}
                    yield {**head, **marks, **summary(tally, tallies[-1][PLAIN])}
        for method in suite.methods:
            mine, plain = (combined([own[name] for own in tallies]) for name in (method, PLAIN))
            whole = {"method": method, "workload": prompts.name, "category": None}
            yield {**whole, **marks, **summary(mine, plain), "costs": cost_points(mine)}


class _Bench:
    """The loaded engines, one per method, and the plain outputs everything is compared with."""

    def __init__(self, suite: Suite, say: Say) -> None:
        self._suite = suite
        self._say = say
        self._engines: dict[str, LLM] = {}
        self._failures: dict[str, str] = {}  # of loading
        self._references: dict[tuple[Ids, float, int], list[int]] = {}
        say(f"loading {PLAIN}")
        self.plain = self._engines[PLAIN] = self._load(PLAIN)
        for method in suite.methods[1:]:
            say(f"loading {method}")
            try:
                self._engines[method] = self._load(method)
            except Exception as error:  # whatever it is, the other methods are still worth measuring
                self._failures[method] = _reason(error)

    def _load(self, method: str) -> LLM:
        suite = self._suite
        # prompts come again and again: what is measured is reading them, not finding them
        sizes: dict[str, Any] = {"max_num_seqs": max(suite.batches), "prefix_cache": False}
        return LLM(suite.model, speculation=parse_method(method), **suite.load, **sizes)

    def measure(self, case: _Case, prompts: Sequence[Any]) -> dict[str, Tally]:
        """All methods on one category: a pass to warm up and to time the forwards alone, then the repeats."""
        suite, room = self._suite, self.plain.max_model_len - self._suite.max_tokens
        fitting = [own for own in prompts if len(own) <= room]
        skipped = len(prompts) - len(fitting)
        tallies = {method: Tally(skipped=skipped, failed=self._failures.get(method)) for method in suite.methods}
        if not fitting:
            for own in tallies.values():
                own.failed = f"no prompt leaves room for {suite.max_tokens} tokens in a context of {self.plain.max_model_len}"
            return tallies
        groups = self._groups(case, fitting)
        for method, own in tallies.items():
            self._say(f"{case}: warm-up, {method}")
            own.groups = [Group() for _ in groups]
            with _noting_failure(own):
                self._warm_up(method, own, groups)
        for repeat, (place, group) in product(range(suite.repeats), enumerate(groups)):
            for method in _rotated(suite.methods, repeat + place):
                self._say(f"{case}: repeat {repeat + 1}/{suite.repeats}, requests {place + 1}/{len(groups)}, {method}")
                with _noting_failure(tallies[method]):
                    self._timed(method, tallies[method], place, group)
        return tallies

    def _groups(self, case: _Case, prompts: Sequence[Ids]) -> list[list[tuple[Ids, SamplingParams]]]:
        suite = self._suite
        count = -(-max(min(suite.limit, len(prompts)), case.batch) // case.batch) * case.batch
        params: dict[str, Any] = {"temperature": case.temperature, "max_tokens": suite.max_tokens, "ignore_eos": suite.ignore_eos}
        requests = [(prompts[i % len(prompts)], SamplingParams(seed=suite.seed + i, **params)) for i in range(count)]
        return [requests[i : i + case.batch] for i in range(0, count, case.batch)]

    def _warm_up(self, method: str, own: Tally, groups: Sequence[list[tuple[Ids, SamplingParams]]]) -> None:
        if own.failed is not None:
            return
        for place, group in enumerate(groups[:_ALONE_GROUPS]):
            with watching(self._engines[method], alone=True) as watch:
                outputs = self._generate(method, group)
            own.alone += watch.rounds
            self._compare(own, place, group, outputs)

    def _timed(self, method: str, own: Tally, place: int, group: list[tuple[Ids, SamplingParams]]) -> None:
        if own.failed is not None:
            return  # not asked again in this case; the others go on
        with watching(self._engines[method]) as watch:
            begun = time.perf_counter()
            outputs = self._generate(method, group)
            seconds = time.perf_counter() - begun
        own.groups[place].seconds.append(seconds)
        own.groups[place].outputs = outputs
        own.rounds += watch.rounds
        own.gaps += watch.gaps
        own.first += [output.timings.first_token_s for output in outputs]
        self._compare(own, place, group, outputs)

    def _generate(self, method: str, group: list[tuple[Ids, SamplingParams]]) -> list[CompletionOutput]:
        results = self._engines[method].generate([ids for ids, _ in group], [params for _, params in group])
        outputs = [result.outputs[0] for result in results]
        for output in outputs:
            if output.finish_reason == "error":
                raise InvalidParameter("generation", str(output.stop_reason))
        return outputs

    def _compare(self, own: Tally, place: int, group: list[tuple[Ids, SamplingParams]], outputs: list[CompletionOutput]) -> None:
        """Count the outputs that have the token ids of plain decoding, one request at a time."""
        for (ids, params), output in zip(group, outputs, strict=True):
            own.groups[place].compared += 1
            own.groups[place].equal += output.token_ids == self._reference(ids, params)
            if output.speculation["fallback_reason"] is not None:
                own.failed = own.failed or f"the drafter was set aside: {output.speculation['fallback_reason']}"

    def _reference(self, ids: Ids, params: SamplingParams) -> list[int]:
        key = (ids, params.temperature, params.seed or 0)
        if key not in self._references:
            self._references[key] = self.plain.generate([ids], params)[0].outputs[0].token_ids
        return self._references[key]


@contextmanager
def _noting_failure(own: Tally) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the other methods are still worth measuring
        own.failed = _reason(error)


def _rotated(methods: Sequence[str], turn: int) -> list[str]:
    """The same methods, another one first each time."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def _with_length(method: str, name: str, length: int) -> str:
    return f"{name}:{length}{method[len(name) :]}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
