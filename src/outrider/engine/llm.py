"""LLM: load a model, generate, chat, stream."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from outrider import checks
from outrider.config import SpeculationConfig, resolve_speculation
from outrider.control import Controller, Policy
from outrider.draft import Kept, check_speculation
from outrider.draft.corpus import Corpus
from outrider.draft.corpus_files import corpus_files, corpus_paths
from outrider.engine.adapters import check_adapters
from outrider.engine.benchmark import BenchmarkResult, benchmark
from outrider.engine.build import Built, Settings, Target, build_engine, load_target
from outrider.engine.calibrate import calibrate
from outrider.engine.commit import OutputProcessor
from outrider.engine.device import GPU_SEQUENCES, Device
from outrider.engine.fingerprint import Fingerprint, fingerprint_of
from outrider.engine.intake import (
    Intake,
    Messages,
    Prompt,
    WantedLora,
    WantedSpeculation,
    conversations,
    loras_for,
    model_name,
    params_for,
    prompts_of,
    split_keywords,
    vllm_keywords,
)
from outrider.engine.outputs import RequestOutput, StreamPiece
from outrider.engine.ranks import check_parallel, shared_threads
from outrider.engine.worker import EngineHost, EngineThread, Job
from outrider.errors import EngineDead, InvalidParameter
from outrider.ops import one_torch_thread
from outrider.sampling import SamplingParams

__all__ = ["LLM"]

UseTqdm = bool | Callable[..., Any] | None
_CALIBRATED = (1, 8, 64)  # batch sizes that are timed, the last on a GPU alone: elsewhere it would take long
_SHARED = "\0"  # the owner of texts of calls without a tenant
_progress = logging.getLogger("outrider.progress")  # shown by the command line


class LLM:
    """A model ready to generate.

    `speculation` is a method's name ("ngram", "draft_model", ...) or its settings, such as
    {"method": "draft_model", "model": path, "draft_tokens": 5, "rule": "match"}. By default it is "auto", where a
    controller chooses round by round among what the model has to draft with; "none" or False turns it off.
    `device` is "auto" (a GPU where there is one), "cpu" or "cuda". `memory` is what weights, KV and buffers may take of the GPU,
    or of the machine without one: a share (0.9) or a size ("8GiB", or bytes). Weights that do not fit a GPU are streamed
    from host memory (docs/offloading.md). `kv_memory` is the size of the KV alone. `numerics="fast"` gives up the same-tokens
    promise for other GPU kernels. With `fp8_activations="off"` a GPU decodes weights in FP8 in its products, and
    activations stay in bf16.
    `lora` are adapters by name: {"sql": folder}; `generate(..., lora="sql")` chooses one.
    `corpus` names text files, folders and .jsonl files that lookup drafters search: what outputs are likely to quote.
    Outputs are kept in memory and looked up by later calls, where the drafter does so (`auto` does); `share=False` turns it off.
    Further keywords are sizes of the engine (`max_num_seqs`, `max_model_len`, ...: config.EngineConfig) and other engines'
    names for speculation (`speculative_config`, `num_speculative_tokens`, `assistant_model`, ...: config.SPELLINGS). Of vLLM's
    other keywords, `gpu_memory_utilization` is `memory`, and `tensor_parallel_size=N` shares the model among N processes, which
    are started and ended with this object (docs/tensor-parallel.md); other sizes of parallelism must be 1.
    """

    _memory: str | None = _SHARED  # whose the texts of calls without a tenant are

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculation: str | bool | Mapping[str, Any] | SpeculationConfig | None = None,
        dtype: str = "auto",
        load_format: str = "safetensors",
        revision: str | None = None,
        device: str = "auto",
        numerics: str = "exact",
        fp8_activations: str = "on",
        memory: float | int | str | None = None,
        kv_memory: int | str | None = None,
        lora: Mapping[str, str | Path] | None = None,
        corpus: str | Path | Sequence[str | Path] | None = None,
        share: bool = True,
        **keywords: Any,
    ) -> None:
        owner = _SHARED if checks.boolean("share", share) else None
        keywords = vllm_keywords(keywords)
        memory = keywords.pop("gpu_memory_utilization", memory)
        if kv_memory is not None:
            keywords["kv_bytes"] = checks.byte_size("kv_memory", kv_memory)
        sizes, spellings = split_keywords(keywords)
        wanted = resolve_speculation(speculation, spellings)
        check_speculation(wanted)
        place = Device.resolve(device, numerics, memory, fp8_activations)
        if place.is_gpu and "max_num_seqs" not in keywords:
            sizes = replace(sizes, max_num_seqs=GPU_SEQUENCES)
        if lora is not None:
            check_adapters(lora, place.name)
        check_parallel(sizes.tensor_parallel_size, place, loras=bool(lora))
        paths = corpus_paths(() if corpus is None else corpus)
        corpus_files(paths)  # they exist
        with shared_threads(sizes.tensor_parallel_size):
            target = load_target(Settings(model_name(model), wanted, sizes, place, dtype, load_format, revision, paths))
            try:
                for name, path in (lora or {}).items():
                    target.adapters.load(name, path)
                self._open(target, wanted)
            except BaseException:
                target.runner.close()
                raise
        self._memory = owner

    def _open(self, target: Target, wanted: SpeculationConfig) -> None:
        """Build the engine of a loaded model."""
        built = build_engine(target, wanted)
        self._target, self._owns_host = target, True
        self.directory, self.device, self.config = target.directory, target.device, target.config
        self.max_model_len, self.tokenizer = target.max_model_len, target.tokenizer
        self._host = EngineHost(built.engine)
        self._attach(built, Intake(target, built.engine, built.speculation))
        self._calibrate_first_start(target.sizes.calibration_s)

    def _attach(self, built: Built, intake: Intake) -> None:
        self.speculation, self.engine, self._intake, self._built = built.speculation, built.engine, intake, built
        if built.costs_path is not None:
            # Runs when this object is collected or the process ends, and must not need the object itself.
            weakref.finalize(self, _save_costs, built.engine.policy, built.costs_path)

    def beside(self, speculation: str | SpeculationConfig, target: Target | None = None) -> Self:
        """The same weights and KV memory, drafted for by another method: to compare the two and nothing else.

        Closing this LLM closes those beside it. `target` is its own, with another draft model that is loaded.
        """
        self._check_open()
        built = build_engine(target or self._target, resolve_speculation(speculation), self.engine.pages)
        other = copy(self)
        other._owns_host = False
        other._attach(built, replace(self._intake, engine=built.engine, speculation=built.speculation))
        return other

    def _calibrate_first_start(self, seconds: float) -> None:
        """Time rounds before the first request where nothing is known of them; on a GPU always, since it takes a moment."""
        policy = self.engine.policy
        if not isinstance(policy, Controller) or not seconds:
            return
        if self.device.is_gpu:
            self.measure_costs(seconds if self._target.runner.streams_weights else math.inf)
        elif not policy.costs.knows_forward or not all(map(policy.costs.knows_proposal, (arm.name for arm in policy.arms))):
            _progress.info(
                "first start of %s on this machine: timing rounds and drafts, %g s at most", self.directory.name, seconds
            )
            self.measure_costs(seconds)

    def measure_costs(self, seconds: float = math.inf) -> None:
        """Time forwards and proposals of all sizes now, within `seconds`, instead of learning their cost in service."""
        self._check_open()
        checks.real("seconds", seconds, 0.0)
        if isinstance(self.engine.policy, Controller):
            candidates, sizes = _CALIBRATED[: 3 if self.device.is_gpu else 2], self._target.sizes
            limit = min(sizes.max_num_seqs, candidates[-1] if sizes.max_queue is None else sizes.max_queue)
            batches = sorted({min(batch, limit) for batch in candidates if limit})
            with one_torch_thread(self._target.runner.ops):
                self._host.call(lambda: calibrate(self.engine, batches, seconds))
            self.save_costs()

    @property
    def corpus(self) -> Corpus | None:
        """The user's texts that drafters search."""
        self._check_open()
        return self._target.corpus

    def kept(self, tenant: str | None = None) -> Kept:
        """How much text is kept to draft from, of a tenant or of the requests without one: texts and tokens."""
        self._check_open()
        owner = _owner(tenant)
        return self._host.call(lambda: self.engine.kept(owner))

    def remember(self, texts: Sequence[Prompt], tenant: str | None = None) -> Kept:
        """Keep texts to draft from, as if they were earlier outputs, and say how much is kept now."""
        self._check_open()
        owner, tokens = _owner(tenant), self._intake.texts_to_keep(texts)
        return self._host.call(lambda: self.engine.remember(owner, tokens))

    def forget(self, tenant: str | None = None) -> Kept:
        """Drop the texts that are kept to draft from, of a tenant or of the requests without one, and say how much that was."""
        self._check_open()
        owner = _owner(tenant)
        return self._host.call(lambda: self.engine.forget(owner))

    def save_costs(self) -> None:
        """Keep what was measured for the next start on this machine."""
        if self._built.costs_path is not None:
            _save_costs(self.engine.policy, self._built.costs_path)

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling parameters from the model's generation_config.json, with changes on top."""
        return SamplingParams(**{**self._target.defaults, **changes})

    @property
    def thread(self) -> EngineThread:
        """The thread that runs the rounds of this LLM and of those beside it; started when it is first needed."""
        self._check_open()
        return self._host.thread

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What its tokens depend on, besides the request. LLMs with equal fingerprints give equal tokens."""
        return fingerprint_of(self._target)

    @property
    def loras(self) -> dict[str, Path]:
        """The folders of the LoRA adapters that requests may name."""
        self._check_open()
        return self._target.adapters.folders()

    def load_lora(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Load a LoRA adapter from a PEFT folder, beside what runs. With `replace` it takes the place of one of its name."""
        self._check_open()
        self._target.adapters.load(name, path, replace)

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter. What runs with it goes on to its end; its memory is free after that."""
        self._check_open()
        self._target.adapters.unload(name)

    def close(self) -> None:
        """End what runs, save what was measured and free the memory. Closing again does nothing."""
        if self.closed:
            return
        if self._owns_host:
            self._host.close()
            self._target.runner.close()
        self.save_costs()
        self.engine.grammars.close()
        del self.engine, self._target, self._intake, self._built
        if self.device.is_gpu:
            self.device.free_memory()

    @property
    def closed(self) -> bool:
        return not hasattr(self, "engine")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"LLM({str(self.directory)!r}, closed)"
        method, dtype, device = self.speculation.method, self.config.dtype, self.device.name
        settings = f"speculation={method!r}, dtype={dtype!r}, device={device!r}, max_model_len={self.max_model_len}"
        return f"LLM({str(self.directory)!r}, {settings})"

    def _check_open(self) -> None:
        if self.closed:
            raise EngineDead("this LLM was closed; load a new one")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: WantedSpeculation = None,
        tenant: str | None = None,
        use_tqdm: UseTqdm = None,
        lora: WantedLora = None,
        prediction: Prompt | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text or token ids). `params` is one for all, or one each.

        Sampling parameters may be passed by keyword, as in `generate(prompt, max_tokens=50)`; they change those of `params`, or
        the model's defaults.
        `speculation=False` decodes plainly, and {"method": "suffix", "max_tokens": 8} limits how these requests
        are drafted for, as do `num_speculative_tokens` and `prompt_lookup_num_tokens`; the tokens are the same.
        `tenant` says whose texts these are: a drafter that keeps earlier texts looks them up within one tenant. Requests without
        one are a tenant together (see `forget`), unless the LLM was made with `share=False`. `prediction` is a text that the
        outputs are likely to be like, such as a file that is to be changed: they are drafted from it.
        `lora` names the adapter that the model runs with: one for all prompts, or one each (None: without).
        `use_tqdm` shows a progress bar, or takes tqdm's place; by default several prompts on a terminal have one.
        All prompts are queued, or none is. Any number of threads may call this and `stream` at the same time.
        """
        self._check_open()
        batch = prompts_of(prompts)
        each = params_for(len(batch), params, self.default_params(), sampling)
        rows = zip(batch, each, loras_for(len(batch), lora), strict=True)
        prepared = [
            self._intake.prepare(prompt, one, speculation, tenant, lora=name, prediction=prediction, memory=self._memory)
            for prompt, one, name in rows
        ]
        requests = [request for one in prepared for request in one.requests]
        job = Job(self.engine, requests, prepared[-1].method if prepared else "none", wants=lambda _: False)
        with _progress_bar(use_tqdm, len(requests)) as bar, self.thread.running(job):
            for _ in job.chunks():
                if bar is not None:
                    bar.update(1)
        processors = iter(job.processors)
        return [_output(prompt, list(islice(processors, one.n))) for prompt, one in zip(batch, each, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tenant: str | None = None,
        use_tqdm: UseTqdm = None,
        lora: WantedLora = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template. Keywords are those of `generate`."""
        self._check_open()
        encoded = [self._intake.tokenizer.chat(conversation) for conversation in conversations(messages)]
        return self.generate(encoded, params, tenant=tenant, use_tqdm=use_tqdm, lora=lora, **sampling)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tenant: str | None = None,
        speculation: WantedSpeculation = None,
        lora: str | None = None,
        prediction: Prompt | None = None,
        **sampling: Any,
    ) -> Iterator[StreamPiece]:
        """Complete one prompt piece by piece; leaving the loop early aborts the request. Keywords are those of `generate`.

        Text is written whether or not it is read, so a stream that is left half-read holds up nobody else.
        """
        self._check_open()
        each = params_for(1, params, self.default_params(), sampling)
        prepared = self._intake.prepare(
            prompt, each[0], speculation, tenant, lora=lora, prediction=prediction, memory=self._memory
        )
        job = Job(self.engine, *prepared)
        with self.thread.running(job):
            yield from job.chunks()

    def benchmark(
        self,
        prompts: Prompt | Sequence[Prompt],
        baseline_time: float | None = None,
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        repeats: int = 3,
        **sampling: Any,
    ) -> BenchmarkResult:
        """The speed-up, tokens per second, acceptance rate and token equality of these prompts, run as one batch.

        The prompts are run with and without speculation, interleaved. With `baseline_time`, the seconds that the same
        prompts took without speculation, they are run with speculation only, and no tokens are compared.
        """
        self._check_open()
        checks.integer("repeats", repeats, 1)
        if baseline_time is not None:
            checks.real("baseline_time", baseline_time, 0.0, low_open=True)
        batch = prompts_of(prompts)
        return benchmark(self, batch, params_for(len(batch), params, self.default_params(), sampling), baseline_time, repeats)

    @property
    def intake(self) -> Intake:
        """Checks prompts and makes requests of them, for those who give jobs to `thread` themselves."""
        self._check_open()
        return self._intake


def _owner(tenant: str | None) -> str:
    return _SHARED if tenant is None else checks.text("tenant", tenant)


def _output(prompt: Prompt, processors: Sequence[OutputProcessor]) -> RequestOutput:
    request = processors[0].seq.request
    return RequestOutput(
        request_id=request.id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(request.prompt_ids),
        outputs=[processor.output() for processor in processors],
        prompt_logprobs=processors[0].prompt_logprobs if request.params.prompt_logprobs is not None else None,
    )


def _progress_bar(use_tqdm: UseTqdm, outputs: int) -> AbstractContextManager[Any]:
    """A bar to `update(1)` for each output that is complete, or None where none is shown.

    True is tqdm's; a callable is called as tqdm is and returns something with `update` and `close`. By default several
    outputs on a terminal have a bar.
    """
    if use_tqdm is None:
        use_tqdm = outputs > 1 and sys.stderr is not None and sys.stderr.isatty()
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise InvalidParameter("use_tqdm", f"must be True, False or a callable like tqdm, got {checks.shown(use_tqdm)}")
    if not use_tqdm:
        return nullcontext()
    make = tqdm if use_tqdm is True else use_tqdm
    return closing(make(total=outputs, desc="Processed prompts", dynamic_ncols=True))


def _save_costs(policy: Policy, path: Path) -> None:
    if isinstance(policy, Controller):
        policy.keep(path)
