"""A target, or a draft model, made of a model that Transformers has loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.config import EngineConfig
from outrider.draft.context import LoadedDraft
from outrider.engine.adapters import Adapters
from outrider.engine.build import KV_SHARE_OF_MEMORY, Target
from outrider.engine.device import Device
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Feed, LoadOptions, Runner
from outrider.model.hf import CachedRunner, build_runner, check_causal, context_of, native_decoder, view_of
from outrider.model.memory import MemoryPlan, kv_pool, plan_memory
from outrider.platform import guard, memory_bytes
from outrider.text import Tokenizer

__all__ = ["draft_of", "target_of", "tokenizer_of"]

_log = logging.getLogger("outrider")
_PROBE = 24  # tokens in which a handed-over model is compared with the class it comes from
_MOST_ROWS = 2**16


def target_of(model: Any, tokenizer: Any, sizes: EngineConfig, native: bool, pack: bool) -> Target:
    """A loaded model as a target: on the native backend where its family is known and `native` allows it, else by its class."""
    check_causal(model)
    if sizes.tensor_parallel_size > 1:
        raise InvalidParameter("tensor_parallel_size", "a loaded model stays in its process; pass the folder of its files to LLM")
    if sizes.kv_dtype != "auto":
        raise InvalidParameter("kv_dtype", "is chosen for models that are read from files; pass the folder to LLM")
    context = context_of(model)
    sizes = sizes.within(context)
    runner = _native_runner(model, sizes, None) if native else None
    runner = runner or build_runner(
        model, lambda token_bytes: _pages(sizes, token_bytes), sizes.page_size, sizes.max_num_seqs, pack
    )
    if isinstance(runner, CachedRunner):  # a prompt is read at once: some classes cannot go on in its middle
        rows = min(max(sizes.max_batch_rows, sizes.max_num_seqs * (sizes.max_model_len or context)), _MOST_ROWS)
        sizes = replace(sizes, max_batch_rows=rows)
    vocab = runner.decoder.spec.vocab
    eos = frozenset(token for token in _eos_ids(model, tokenizer) if 0 <= token < vocab)
    device = Device("cpu", exact=runner.guarantee is None or runner.guarantee.tokens_guaranteed)
    options = LoadOptions(widen=not guard().bf16_products)
    text = tokenizer_of(tokenizer)
    folder, pages = _folder(model), runner.pool.pages - 1
    adapters = Adapters(runner, sizes, str(folder))
    return Target(folder, device, options, sizes, pages, runner, text, _defaults(model), eos, adapters)


def draft_of(model: Any, tokenizer: Any, target: Target) -> LoadedDraft:
    """A loaded model that drafts for a target, its KV in as many pages."""
    check_causal(model, "assistant_model")
    name = type(model).__name__
    runner = _native_runner(model, target.sizes, target.pages) or build_runner(
        model, lambda _: target.pages, target.sizes.page_size, target.sizes.max_num_seqs
    )
    if runner.chains_only:
        reason = runner.guarantee.reason if runner.guarantee is not None else ""
        raise InvalidParameter("assistant_model", f"{name} cannot draft: {reason}; choose a model with plain attention")
    return LoadedDraft(name, runner, tokenizer_of(tokenizer))


def tokenizer_of(tokenizer: Any) -> Tokenizer | None:
    """A Transformers tokenizer as the engine reads it."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InvalidParameter(
            "tokenizer", f"must be a fast tokenizer, got {type(tokenizer).__name__}; load it with AutoTokenizer.from_pretrained"
        )
    return Tokenizer(tokenizer)


def _native_runner(model: Any, sizes: EngineConfig, pages: int | None) -> Runner | None:
    """The native backend over a model's weights; None where it does not run the model, or not as its class does."""
    if model.device.type != "cpu":
        return None
    decoder = native_decoder(model, widen=not guard().bf16_products)
    if decoder is None:
        return None
    memory = plan_memory(decoder.spec, sizes, _budget(sizes)) if pages is None else MemoryPlan(pages)
    runner = Runner(decoder, kv_pool(decoder.spec, memory.pages + 1, sizes.page_size), states=memory.states)
    decoder.close()
    if not _agrees(runner, model):
        _log.warning("%s is run by its class: the native backend's logits differ from its own", type(model).__name__)
        return None
    return runner


@torch.inference_mode()
def _agrees(runner: Runner, model: Any) -> bool:
    """Whether a runner's logits are those of a model, up to rounding."""
    vocab = runner.decoder.spec.vocab
    ids = [(7 + 31 * i) % vocab for i in range(min(_PROBE, runner.pool.page_size))]
    expected = view_of(model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    logits = runner.forward([Feed([0], 0, ids)], wanted=range(len(ids))).logits
    runner.pool.clear([0])
    assert logits is not None
    distance = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return bool(distance.median() < (2e-3 if model.dtype == torch.float32 else 6e-2))


def _budget(sizes: EngineConfig) -> int:
    """Bytes that KV and recurrent states may take."""
    return sizes.kv_bytes or int(KV_SHARE_OF_MEMORY * memory_bytes())


def _pages(sizes: EngineConfig, token_bytes: int) -> int:
    """Pages for every sequence at full length, or as many as the memory allows."""
    assert sizes.max_model_len is not None
    budget = _budget(sizes)
    count = sizes.max_num_seqs * -(-sizes.max_model_len // sizes.page_size)
    count = min(count, budget // (sizes.page_size * token_bytes)) if token_bytes else count
    if count < 1:
        raise InvalidParameter("kv_bytes", f"{budget} bytes hold no page of {sizes.page_size} tokens; raise it")
    return count


def _folder(model: Any) -> Path:
    """Where a model was loaded from, or a name that no folder has."""
    name = str(getattr(model, "name_or_path", "") or "")
    return Path(name) if name and Path(name).is_dir() else Path(f"<{type(model).__name__}>")


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for source in (model.config, model.generation_config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        found |= set(eos if isinstance(eos, list | tuple) else () if eos is None else (eos,))
    return found


def _defaults(model: Any) -> Mapping[str, Any]:
    """Sampling parameters of a model's generation configuration, as far as it sets any."""
    settings = model.generation_config
    if settings.do_sample is False:
        return {"temperature": 0.0}
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: value for name in known if (value := getattr(settings, name, None)) is not None}
    if found.get("temperature") == 0:
        raise ModelError("the model's generation_config has temperature 0; set do_sample=False instead")
    return found
