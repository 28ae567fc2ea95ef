"""Building an engine from settings: the target and where it runs, then a drafter, a policy and the engine itself.

Each step takes the finished result of the one before, so nothing half-built can be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.cache import PageTable
from outrider.config import METHODS, EngineConfig, SpeculationConfig
from outrider.control import Controller, Costs, FixedLength, Policy
from outrider.draft import DraftContext, build_drafter
from outrider.draft.auto import AutoDrafter, arms_of, with_large_trees
from outrider.draft.chains_only import ChainsOnly
from outrider.draft.context import LoadedDraft
from outrider.draft.corpus import SEARCH_CORPUS, Corpus, open_corpus
from outrider.draft.resolve import resolve_drafters
from outrider.engine.adapters import Adapters
from outrider.engine.costs_file import costs_path, known_acceptance
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.engine.ranks import Sharing, check_parallel, start_parallel
from outrider.errors import InvalidParameter
from outrider.model import Decoder, LoadOptions, ModelSpec, Runner, locate, open_decoder
from outrider.model.backends import cpu_ops
from outrider.model.listing import loaded_line
from outrider.model.load import INT8, describe_decoder, generation_defaults, is_int8, served_spec, usable_ids, weight_bytes
from outrider.model.memory import MemoryPlan, kv_pool, plan_memory
from outrider.model.placement import embedding_on_host, sizes_of
from outrider.model.runner import kv_value_bytes
from outrider.ops import find_core, missing_core
from outrider.platform import guard, memory_bytes
from outrider.text import Tokenizer

__all__ = ["KV_SHARE_OF_MEMORY", "Built", "Settings", "Target", "build_engine", "load_target"]

_log = logging.getLogger("outrider")
KV_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, slots=True)
class Settings:
    """What an LLM is loaded with; checked, and nothing is loaded yet."""

    model: str
    speculation: SpeculationConfig
    sizes: EngineConfig
    device: Device
    dtype: str = "auto"
    load_format: str = "safetensors"
    revision: str | None = None
    corpus: tuple[Path, ...] = ()  # texts that lookups search


@dataclass(frozen=True, slots=True)
class Target:
    """A model that was loaded, where it runs, and what requests to it are checked against."""

    directory: Path
    device: Device
    load_options: LoadOptions
    sizes: EngineConfig  # with the context length resolved
    pages: int
    runner: Runner
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]  # sampling parameters of its generation_config.json
    eos: frozenset[int]
    adapters: Adapters
    draft: LoadedDraft | None = None  # a draft model that the caller has loaded
    corpus: Corpus | None = None

    @property
    def config(self) -> ModelSpec:
        return self.runner.decoder.spec

    @property
    def max_model_len(self) -> int:
        assert self.sizes.max_model_len is not None
        return self.sizes.max_model_len


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what the LLM around it keeps beside it."""

    engine: Engine
    speculation: SpeculationConfig  # with every drafter named
    draft_runners: list[Runner]
    costs_path: Path | None  # where what the controller has learned is kept


def load_target(settings: Settings) -> Target:
    """The model, its tokenizer and its KV memory."""
    device, sizes = settings.device, settings.sizes
    directory = locate(settings.model, settings.revision)
    options = LoadOptions(settings.dtype, settings.load_format, widen=not guard().bf16_products)
    decoder = open_decoder(directory, options) if sizes.tensor_parallel_size == 1 else describe_decoder(directory, options)
    config = decoder.spec
    check_parallel(sizes.tensor_parallel_size, device, config)
    sizes = sizes.within(config.context)
    tokenizer = Tokenizer.load(directory)
    defaults, eos = generation_defaults(directory, config)
    if tokenizer is not None and tokenizer.eos_id is not None:
        eos |= usable_ids({tokenizer.eos_id}, config, directory / "tokenizer_config.json")
    speculation = resolve_drafters(settings.speculation, directory, device.is_gpu)
    _check_kv(sizes, device, config)
    memory = _memory(device, sizes, config, speculation, directory, options)
    pages = memory.pages
    if memory.placement is not None:
        _log.info("%s: %s", directory, memory.placement.describe(device.bus_bandwidth()))
    if sizes.tensor_parallel_size == 1:
        runner = _runner(decoder, device, memory, sizes.page_size)
    else:
        runner = start_parallel(decoder, Sharing(directory, options, sizes.tensor_parallel_size, pages + 1, sizes.page_size))
    if not device.is_gpu and (missing := missing_core()) is not None:
        _log.warning("the native core is not in use, so torch decodes, slower and with the same promises: %s", missing)
    _log.info("%s: %s", directory, loaded_line(runner))
    adapters = Adapters(runner, sizes, str(directory))
    return Target(
        directory, device, options, sizes, pages, runner, tokenizer, defaults, eos, adapters,
        corpus=_corpus(settings.corpus, speculation, tokenizer, config.vocab),
    )  # fmt: skip


def build_engine(target: Target, speculation: SpeculationConfig, pages: PageTable | None = None) -> Built:
    """An engine for the target. With `pages` it shares the KV memory of another, whose graphs are captured already."""
    speculation = resolve_drafters(speculation, target.directory, target.device.is_gpu)
    if target.runner.streams_weights and speculation.method == "auto":
        speculation = with_large_trees(speculation)
    draft_runners: list[Runner] = []
    read_as = partial(_weight_options, target, speculation.options)

    def load_model(directory: Path) -> Runner:
        draft_runners.append(_draft_runner(target, directory, read_as(directory, {})))
        return draft_runners[-1]

    runner, device = target.runner, target.device
    corpus = None if target.corpus is None else target.corpus.text
    loaded, length = target.draft, target.max_model_len
    context = DraftContext(speculation, runner, target.directory, read_as, load_model, target.tokenizer, loaded, length, corpus)
    drafter = build_drafter(context)
    if runner.chains_only or speculation.rule != "match":
        drafter = ChainsOnly(drafter)
    if speculation.method in METHODS and speculation.method not in ("none", "auto") and not speculation.is_pinned:
        drafter = AutoDrafter([drafter])  # which takes no time while nothing is drafted
    measured = Costs()
    if device.is_gpu and pages is None:
        length = max(config.draft_tokens if config.method != "none" else 0 for config in speculation.flat())
        measured = device.warm_up(runner, draft_runners, drafter.needs.taps, target.sizes, length)
    policy, path = _policy(target, speculation, measured)
    engine = Engine(runner, target.tokenizer, drafter, policy, target.sizes, pages, target.adapters)
    return Built(engine, speculation, draft_runners, path)


def _corpus(paths: tuple[Path, ...], speculation: SpeculationConfig, tokenizer: Tokenizer | None, vocab: int) -> Corpus | None:
    """The user's texts, where a drafter looks them up."""
    if not paths or speculation.method == "none":
        return None
    if speculation.rule != "match" or SEARCH_CORPUS.isdisjoint(speculation.methods()):
        methods = ", ".join(sorted(SEARCH_CORPUS))
        _log.warning("corpus: not read, because only %s search it (alone or among others), under the rule 'match'", methods)
        return None
    if tokenizer is None:
        raise InvalidParameter("corpus", "the model's folder holds no tokenizer to read texts with; leave the corpus out")
    return open_corpus(paths, tokenizer, vocab)


def _policy(target: Target, speculation: SpeculationConfig, measured: Costs) -> tuple[Policy, Path | None]:
    """Fixed lengths where they are pinned; else the controller, and the file of its costs."""
    if speculation.method == "none" or speculation.is_pinned:
        length = speculation.draft_tokens if speculation.method != "none" else 0
        return FixedLength(length, speculation.rule), None
    path = costs_path(target.directory, target.runner, speculation)
    costs = Costs.load(path)
    if measured.knows_forward:  # a GPU's graphs, just now
        measured.accepted = costs.accepted
        costs = measured
    named = speculation.method != "auto"
    if speculation.model is None:
        costs.accepted = costs.accepted or known_acceptance(target.directory)
    arms = arms_of((speculation,) if named else speculation.nested(), target.device.is_gpu)
    least, disable_at = speculation.min_draft_tokens, speculation.disable_by_batch_size
    return Controller(arms, costs, named=named, min_length=least, disable_at=disable_at), path


def _weight_options(target: Target, of_all: Mapping[str, Any], directory: Path, of_drafter: Mapping[str, Any]) -> LoadOptions:
    """How to read a drafter's weights: by its own settings, those of the whole method, and the target's.

    Weights stored in int8 are served so where they can be: a drafter only guesses, and the target decides.
    """
    settings = {key: value for key, value in {**of_all, **of_drafter}.items() if key in ("dtype", "load_format")}
    options = target.load_options
    if options.dtype == "auto" and not target.device.is_gpu and find_core()[0] is not None and is_int8(directory):
        settings = {"dtype": INT8} | settings
    return replace(options, **settings)


def _draft_runner(target: Target, directory: Path, options: LoadOptions) -> Runner:
    """Load a draft model, its KV in as many pages as the target's."""
    decoder = open_decoder(directory, options)
    longer = target.max_model_len > decoder.spec.context
    if longer and not target.device.is_gpu and not decoder.spec.recurrent:  # a state cannot leave out what lies before a window
        decoder.make_tables(target.max_model_len)
    is_short = target.device.is_gpu and target.runner.weights_on_host  # then every byte counts
    placement = embedding_on_host(sizes_of(decoder.spec)) if is_short else None
    memory = MemoryPlan(target.pages, placement=placement)
    return _runner(decoder, target.device, memory, target.sizes.page_size, target.runner)


def _runner(decoder: Decoder, device: Device, memory: MemoryPlan, page_size: int, target: Runner | None = None) -> Runner:
    """A model and its KV where it runs; a draft model knows its target."""
    if device.is_gpu:
        runner: Runner = device.runner(decoder, memory, page_size, target)
    else:  # one page more than the page table knows: rows that fill up a block write there
        pool = kv_pool(decoder.spec, memory.pages + 1, page_size, memory.int8)
        runner = Runner(decoder, pool, states=memory.states)
    decoder.close()
    return runner


def _check_kv(sizes: EngineConfig, device: Device, config: ModelSpec) -> None:
    """Refuse KV that nothing here keeps."""
    if sizes.kv_dtype == "auto":
        return
    if device.is_gpu or sizes.tensor_parallel_size > 1 or cpu_ops(config).core is None:
        kept = "is kept by the native core alone, on a processor and in one process"
        raise InvalidParameter("kv_dtype", f"{sizes.kv_dtype} {kept}; leave it at auto")


def _memory(
    device: Device,
    sizes: EngineConfig,
    config: ModelSpec,
    speculation: SpeculationConfig,
    directory: Path,
    options: LoadOptions,
) -> MemoryPlan:
    """Pages for every sequence at full length, or as many as the memory allows beside weights and recurrent states."""
    assert sizes.max_model_len is not None
    if device.is_gpu:
        drafters = list(speculation.flat())
        drafts = [drafter.model or str(directory / "draft") for drafter in drafters if drafter.method == "draft_model"]
        heads = [drafter for drafter in drafters if drafter.method in ("eagle", "mtp", "medusa")]  # a layer each, or less
        models = [
            config,
            *(served_spec(locate(name)) for name in drafts),
            *(replace(config, layers=config.layers[-1:]) for _ in heads),
        ]
        return device.plan(sizes, models)
    budget = sizes.kv_bytes or _kv_budget(device, directory, options)
    return plan_memory(config, sizes, budget, kv_value_bytes(config, sizes.page_size, sizes.kv_dtype == "int8"))


def _kv_budget(device: Device, directory: Path, options: LoadOptions) -> int:
    """Bytes for the KV of a model on the processor: what its weights leave of the user's limit, or a share of the machine."""
    machine = memory_bytes()
    limit = device.limit(machine)
    if limit is None:
        return int(KV_SHARE_OF_MEMORY * machine)
    weights = weight_bytes(directory, options)
    if limit <= weights:
        raise InvalidParameter("memory", f"{limit} bytes do not hold the weights, {weights} bytes; raise it")
    return limit - weights
