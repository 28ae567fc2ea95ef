"""`outrider bench`: methods over workloads, temperatures and batch sizes, interleaved, one row for each as it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from outrider.bench.profiler import profiling
from outrider.bench.summary import Group, MethodResult, combined, cost_points, summary
from outrider.bench.workloads import PromptSet, TurnReader, load_prompts
from outrider.config import SpeculationConfig, parse_method, pinned
from outrider.draft import check_speculation
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams, Structured

__all__ = ["PLAIN", "Suite", "expand_methods", "run_suite"]

PLAIN = "none"
_ALONE_GROUPS = 2  # whose forwards are also timed alone
_UNSIZED = ("none", "auto")  # methods that choose their draft length
Ids = tuple[int, ...]
Say = Callable[[str], None]
Requests = list[tuple[Ids, SamplingParams]]  # that run together


@dataclass(frozen=True, slots=True)
class Suite:
    """What a benchmark measures."""

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
    schema: dict[str, Any] | None = None  # that every output must meet; None: the workload's, if it has one
    load: dict[str, Any] = field(default_factory=dict)  # dtype, load_format

    def __post_init__(self) -> None:
        if not all(batch > 0 for batch in self.batches):
            raise InvalidParameter("batches", f"must be above 0, got {', '.join(map(str, self.batches))}")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # refuses a wrong value before anything is loaded


@dataclass(frozen=True, slots=True)
class _SuiteCase:
    workload: str
    category: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        category = "" if self.category == self.workload else f" ({self.category})"
        return f"{self.workload}{category}, T {self.temperature:g}, batch {self.batch}"


def expand_methods(methods: str, lengths: Sequence[int]) -> list[str]:
    """Methods from a list, plain decoding first, each at every length unless it names one; all checked."""
    expanded = [PLAIN]
    for method in methods.split(","):
        settings = parse_method(method)
        check_speculation(SpeculationConfig.parse(settings))
        name = settings["method"]
        sized = name in _UNSIZED or "draft_tokens" in settings or not lengths
        expanded += [method] if sized else [f"{name}:{length}{method.removeprefix(name)}" for length in lengths]
    return list(dict.fromkeys(expanded))


def run_suite(suite: Suite, say: Say) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: one per method and category where there are several, and one for the whole workload."""
    bench = _Bench(suite, say)
    sets = [bench.read(load_prompts(name, bench.plain.config.vocab)) for name in suite.workloads]
    for (name, categories), temperature, batch in product(sets, suite.temperatures, suite.batches):
        case: dict[str, Any] = {"temperature": temperature, "batch": batch}
        results: dict[str, dict[str, MethodResult]] = {}
        for category, texts in categories.items():
            results[category] = measured = bench.measure(_SuiteCase(name, category, temperature, batch), texts)
            if len(categories) > 1:
                for method, result in measured.items():
                    head = {"method": method, "workload": name, "category": category}
                    yield {**head, **case, **summary(result, measured[PLAIN])}
        fitting = {category: by_method for category, by_method in results.items() if categories[category].items} or results
        left_out = {"left_out": [category for category in results if category not in fitting]}
        for method in suite.methods:
            chosen, plain = (combined([by_method[name] for by_method in fitting.values()]) for name in (method, PLAIN))
            whole = {"method": method, "workload": name, "category": None}
            yield {**whole, **case, **left_out, **summary(chosen, plain), "costs": cost_points(chosen)}


@dataclass(frozen=True, slots=True)
class _Texts:
    """A category's prompts as requests: a list for each prompt, with one entry for each of its turns."""

    items: list[list[Ids]]  # those that fit
    skipped: int  # turns that do not fit
    schema: dict[str, Any] | None = None

    def requests(self, prompts: int) -> list[Ids]:
        """All turns of the first `prompts` prompts."""
        return [ids for item in self.items[:prompts] for ids in item]


class _Bench:
    """The loaded engines, one per method, and the plain outputs everything is compared with."""

    def __init__(self, suite: Suite, say: Say) -> None:
        self._suite = suite
        self._say = say
        self._engines: dict[str, LLM] = {}
        self._failures: dict[str, str] = {}  # of loading
        self._references: dict[tuple[Ids, SamplingParams], list[int]] = {}
        say(f"loading {PLAIN}")
        self.plain = self._engines[PLAIN] = self._load(PLAIN)
        for method in suite.methods[1:]:
            say(f"loading {method}")
            try:
                self._engines[method] = self._load(method)
            except Exception as error:  # the other methods are measured all the same
                self._failures[method] = _reason(error)

    def _load(self, method: str) -> LLM:
        suite = self._suite
        # prompts repeat, and reading them is part of the measurement, so neither they nor their outputs may be kept
        sizes: dict[str, Any] = {"max_num_seqs": max(suite.batches), "prefix_cache": False}
        llm = LLM(suite.model, speculation=pinned(method), share=False, **suite.load, **sizes)
        llm.measure_costs()  # a controller would otherwise learn them in its first minutes
        return llm

    def read(self, prompts: PromptSet) -> tuple[str, dict[str, _Texts]]:
        """The workload's name and its requests; later turns of a conversation follow plain greedy answers."""
        suite = self._suite
        params = SamplingParams(temperature=0.0, max_tokens=suite.max_tokens)
        reader = TurnReader(
            self.plain.tokenizer,
            suite.chat,
            answer=lambda ids: self.plain.generate([ids], params)[0].outputs[0].text,
            room=self.plain.max_model_len - suite.max_tokens,
        )
        texts: dict[str, _Texts] = {}
        for category, items in prompts.categories.items():
            self._say(f"reading {prompts.name} ({category})")
            fitting: list[list[Ids]] = []
            skipped = 0
            for item in items:
                if len(fitting) == max(suite.limit, *suite.batches):
                    break
                requests, too_long = reader.requests(item)
                skipped += too_long
                if requests:
                    fitting.append(requests)
            texts[category] = _Texts(fitting, skipped, suite.schema or prompts.schema)
        return prompts.name, texts

    def measure(self, case: _SuiteCase, texts: _Texts) -> dict[str, MethodResult]:
        """All methods on one category: a pass to warm up and to time the forwards alone, then the repeats."""
        suite = self._suite
        results = {
            method: MethodResult(skipped=texts.skipped, schema=texts.schema, failed=self._failures.get(method))
            for method in suite.methods
        }
        if not texts.items:
            for result in results.values():
                result.failed = f"no prompt leaves room for {suite.max_tokens} tokens in a context of {self.plain.max_model_len}"
            return results
        groups = self._groups(case, texts)
        for method, result in results.items():
            self._say(f"{case}: warm-up, {method}")
            result.groups = [Group() for _ in groups]
            with _noting_failure(result):
                self._warm_up(method, result, groups)
        for repeat, (place, group) in product(range(suite.repeats), enumerate(groups)):
            first = (repeat + place) % len(suite.methods)  # another method comes first each time
            for method in (*suite.methods[first:], *suite.methods[:first]):
                self._say(f"{case}: repeat {repeat + 1}/{suite.repeats}, requests {place + 1}/{len(groups)}, {method}")
                with _noting_failure(results[method]):
                    self._timed(method, results[method], place, group)
        return results

    def _groups(self, case: _SuiteCase, texts: _Texts) -> list[Requests]:
        suite, prompts = self._suite, texts.requests(max(self._suite.limit, case.batch))
        count = -(-len(prompts) // case.batch) * case.batch
        params: dict[str, Any] = {"temperature": case.temperature, "max_tokens": suite.max_tokens, "ignore_eos": suite.ignore_eos}
        if texts.schema is not None:
            params["structured"] = Structured("json_schema", texts.schema)
        requests = [(prompts[i % len(prompts)], SamplingParams(seed=suite.seed + i, **params)) for i in range(count)]
        return [requests[i : i + case.batch] for i in range(0, count, case.batch)]

    def _warm_up(self, method: str, result: MethodResult, groups: Sequence[Requests]) -> None:
        if result.failed is not None:
            return
        for place, group in enumerate(groups[:_ALONE_GROUPS]):
            with profiling(self._engines[method], alone=True) as profiler:
                outputs = self._generate(method, group)
            result.alone += profiler.rounds
            self._compare(result, place, group, outputs)

    def _timed(self, method: str, result: MethodResult, place: int, group: Requests) -> None:
        if result.failed is not None:
            return  # it does not run again in this case; the others go on
        with profiling(self._engines[method]) as profiler:
            begun = time.perf_counter()
            outputs = self._generate(method, group)
            seconds = time.perf_counter() - begun
        result.groups[place].seconds.append(seconds)
        result.groups[place].outputs = outputs
        result.rounds += profiler.rounds
        result.gaps += profiler.gaps
        result.first += [output.timings.first_token_s for output in outputs]
        self._compare(result, place, group, outputs)

    def _generate(self, method: str, group: Requests) -> list[CompletionOutput]:
        results = self._engines[method].generate([ids for ids, _ in group], [params for _, params in group])
        outputs = [result.outputs[0] for result in results]
        for output in outputs:
            if output.finish_reason == "error":
                raise InvalidParameter("generation", str(output.stop_reason))
        return outputs

    def _compare(self, result: MethodResult, place: int, group: Requests, outputs: list[CompletionOutput]) -> None:
        """Count the outputs that have the token ids of plain decoding, one request at a time."""
        for (ids, params), output in zip(group, outputs, strict=True):
            result.groups[place].compared += 1
            result.groups[place].equal += output.token_ids == self._reference(ids, params)
            if output.speculation["fallback_reason"] is not None:
                result.failed = result.failed or f"the drafter was set aside: {output.speculation['fallback_reason']}"

    def _reference(self, ids: Ids, params: SamplingParams) -> list[int]:
        key = (ids, params)
        if key not in self._references:
            self._references[key] = self.plain.generate([ids], params)[0].outputs[0].token_ids
        return self._references[key]


@contextmanager
def _noting_failure(result: MethodResult) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the other methods are measured all the same
        result.failed = _reason(error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
