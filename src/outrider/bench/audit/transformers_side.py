"""A model run by Transformers' `generate`, plainly or with an assistant or prompt lookup."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outrider.bench.audit.records import Answer, AuditRequest, Choice, Drafting, TokenLogprob
from outrider.errors import ModelError

__all__ = ["TransformersSide", "load_sides"]


class TransformersSide:
    """`model.generate` with these arguments. Requests run one after another: assisted generation takes no batches."""

    parallel = False

    def __init__(self, name: str, model: Any, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._turn = asyncio.Lock()

    async def answer(self, request: AuditRequest) -> Answer:
        if request.frequency_penalty or request.presence_penalty:
            return Answer(refused="generate has neither frequency_penalty nor presence_penalty")
        if request.schema is not None:
            return Answer(refused="generate takes no JSON schema")
        async with self._turn:
            return await asyncio.to_thread(self._generate, request)

    async def counters(self) -> Drafting | None:
        return None

    async def close(self) -> None:
        pass

    def _generate(self, request: AuditRequest) -> Answer:
        inputs = self._tokenizer(request.prompt, return_tensors="pt").to(self._model.device)
        begun = perf_counter()
        try:
            with torch.random.fork_rng(), torch.inference_mode():
                torch.manual_seed(request.seed or 0)
                result = self._model.generate(**inputs, **self._settings(request))
        except (ValueError, NotImplementedError) as error:  # how generate refuses combinations
            return Answer(refused=str(error).partition("\n")[0])
        except Exception as error:  # a fault of the engine under audit is a result
            return Answer(failed=f"{type(error).__name__}: {error}".partition("\n")[0])
        seconds = perf_counter() - begun
        length = inputs["input_ids"].shape[1]
        choices = tuple(self._choice(i, ids[length:], result.logits, request) for i, ids in enumerate(result.sequences))
        return Answer(choices, sum(len(choice.ids or ()) for choice in choices), seconds)

    def _settings(self, request: AuditRequest) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "do_sample": request.temperature > 0,
            "return_dict_in_generate": True,
            "output_logits": request.logprobs is not None,
        }
        if request.temperature > 0:
            settings |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0, "num_return_sequences": request.n}
        if request.repetition_penalty != 1.0:
            settings["repetition_penalty"] = request.repetition_penalty
        if request.stop:
            settings |= {"stop_strings": list(request.stop), "tokenizer": self._tokenizer}
        return settings | self._arguments

    def _choice(self, row: int, ids: Tensor, logits: tuple[Tensor, ...] | None, request: AuditRequest) -> Choice:
        kept = self._until_end(ids.tolist())
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        cuts = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        tokens = None
        if request.logprobs is not None and logits is not None:
            rows = (step[row].float().log_softmax(-1) for step in logits)
            tokens = tuple(self._token(token, at, request.logprobs) for token, at in zip(kept, rows, strict=False))
        finish = "stop" if cuts or len(kept) < request.max_tokens else "length"
        return Choice(text[: min(cuts)] if cuts else text, finish, None if cuts else tuple(kept), tokens)

    def _until_end(self, ids: list[int]) -> list[int]:
        """The tokens before the end of the sequence; what follows fills up a batch."""
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]

    def _token(self, token: int, logprobs: Tensor, count: int) -> TokenLogprob:
        best = logprobs.topk(count)
        top: dict[str, float] = {}
        for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            top.setdefault(self._tokenizer.decode([i]), value)
        return TokenLogprob(self._tokenizer.decode([token]), float(logprobs[token]), top)


def load_sides(folder: Path, assistant: Path | None, lookup: int | None, dtype: str) -> tuple[TransformersSide, TransformersSide]:
    """A model folder without and with speculation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    try:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, **options), AutoTokenizer.from_pretrained(folder)
        arguments: dict[str, Any] = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        if assistant is not None:
            arguments["assistant_model"] = AutoModelForCausalLM.from_pretrained(assistant, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"Transformers cannot load {folder}: {error}") from None
    return TransformersSide("plain", model, tokenizer), TransformersSide("speculative", model, tokenizer, arguments)
