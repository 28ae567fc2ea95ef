"""`speed_up`: a model that Transformers has loaded, as an LLM; `custom_generate`: behind the `generate` it has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

from torch import Tensor

from outrider.config import SPELLINGS, SpeculationConfig, parse_method, resolve_speculation
from outrider.core import Guarantee
from outrider.draft import check_speculation
from outrider.draft.auto import method_of_weights
from outrider.engine.hf_target import draft_of, target_of
from outrider.engine.intake import Prompt, split_keywords
from outrider.engine.llm import LLM
from outrider.engine.outputs import RequestOutput
from outrider.engine.tensors import TensorRequest, prepared_config, run_request
from outrider.errors import InvalidParameter, ModelError
from outrider.sampling import SamplingParams

__all__ = ["SpedUpModel", "custom_generate", "speed_up"]

Speculation = str | bool | Mapping[str, Any] | SpeculationConfig | None
_PER_CALL = ("assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "num_assistant_tokens", "assistant_early_exit")
_WITH_DRAFT: Mapping[
    str, Mapping[str, Any]
] = {  # what methods that choose their drafters themselves do with a loaded draft model
    "auto": {"members": ["suffix", {"method": "draft_model", "draft_tokens": 12}]},
    "mixture": {"members": ["suffix", "draft_model"]},
    "cascade": {"levels": ["ngram", "draft_model"]},
}


def speed_up(model: Any, tokenizer: Any = None, speculation: Speculation = None, **settings: Any) -> SpedUpModel:
    """An LLM over a model that `AutoModelForCausalLM` has loaded; see `SpedUpModel`."""
    return SpedUpModel(model, tokenizer, speculation, **settings)


class SpedUpModel(LLM):
    """An LLM whose target is a loaded Transformers model, and `generate` with tensors as that model has it.

    The model is not changed: its weights are shared, its modules are copied. Where Outrider runs its family itself, the
    native backend does, unless `native=False`. Otherwise its class does, with Outrider's attention, products and experts; a
    check says whether tokens are then the same with speculation off and on (`guarantee`).
    `assistant_model` is another loaded model, or the folder of a draft model or head. `pack=False` multiplies by the
    model's matrices where they lie, which takes no memory and more time. Further keywords are those of `LLM`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        speculation: Speculation = None,
        *,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        native: bool = True,
        pack: bool = True,
        **keywords: Any,
    ) -> None:
        sizes, spellings = split_keywords(keywords)
        wanted = _wanted(speculation, assistant_model, spellings)
        check_speculation(wanted)
        target = target_of(model, tokenizer, sizes, native, pack)
        if not _is_path(assistant_model) and assistant_model is not None:
            target = replace(target, draft=draft_of(assistant_model, assistant_tokenizer or tokenizer, target))
        self._tokenizer, self.generation_config = tokenizer, model.generation_config
        self._beside: dict[tuple[Any, ...], tuple[Any, Self]] = {}  # an assistant is kept: its id is in the key
        self._open(target, wanted)

    @property
    def guarantee(self) -> Guarantee:
        """Whether tokens are the same with speculation off and on, bit for bit, and why not."""
        return self.engine.runner.guarantee or Guarantee(True)

    def generate(self, *prompts: Any, **settings: Any) -> Any:
        """Complete prompts as `LLM.generate` does; or, where `input_ids` is a tensor, as the model's own `generate` does.

        With tensors the keywords are Transformers': `max_new_tokens`, `do_sample`, `generation_config`, ...;
        `assistant_model`, `prompt_lookup_num_tokens` and their like choose the drafter of this call.
        """
        ids = prompts[0] if prompts and isinstance(prompts[0], Tensor) else settings.get("input_ids", settings.get("inputs"))
        if not isinstance(ids, Tensor):
            self._check_tokenizer(prompts[0] if prompts else settings.get("prompts"))
            return super().generate(*prompts, **settings)
        self._check_open()
        if len(prompts) > 1:
            raise InvalidParameter("inputs", "only input_ids is positional where tensors are passed; pass the others by name")
        settings = {name: value for name, value in settings.items() if name not in ("input_ids", "inputs")}
        chosen = {name: settings.pop(name) for name in _PER_CALL if settings.get(name) is not None}
        mask, streamer = settings.pop("attention_mask", None), settings.pop("streamer", None)
        settings.pop("tokenizer", None)
        config = prepared_config(self.generation_config, settings, ids.shape[1], self.max_model_len)
        return run_request(self._drafted_by(chosen), TensorRequest(ids, mask, config, streamer))

    def stream(self, prompt: Any, *rest: Any, **settings: Any) -> Any:
        self._check_tokenizer(prompt)
        return super().stream(prompt, *rest, **settings)

    def complete(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """`LLM.generate`, of prompts that are token ids."""
        return super().generate(prompts, params, use_tqdm=False)

    def run(self, request: TensorRequest) -> Any:
        """Answer a request whose configuration Transformers has prepared."""
        self._check_open()
        return run_request(self, request)

    def _drafted_by(self, chosen: dict[str, Any]) -> Self:
        """This LLM, or one beside it with the drafter of a call; drafters are kept for the next call."""
        if not chosen:
            return self
        assistant = chosen.pop("assistant_model", None)
        draft_tokenizer = chosen.pop("assistant_tokenizer", None) or self._tokenizer
        key = (assistant if _is_path(assistant) else id(assistant), *sorted(chosen.items()))
        if key not in self._beside:
            wanted = _wanted(None, assistant, chosen)
            target = self._target
            if assistant is not None and not _is_path(assistant):
                target = replace(target, draft=draft_of(assistant, draft_tokenizer, target))
            self._beside[key] = assistant, self.beside(wanted, target)
        return self._beside[key][1]

    def _check_tokenizer(self, prompt: Any) -> None:
        texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list | tuple) else []
        if self.tokenizer is None and any(isinstance(text, str) for text in texts):
            raise ModelError("speed_up was given no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or token ids")

    def close(self) -> None:
        self._beside.clear()
        super().close()


def custom_generate(speculation: Speculation = None, *, streamer: Any = None, **settings: Any) -> Callable[..., Any]:
    """A function for `model.generate(..., custom_generate=...)`. Keywords are those of `speed_up`.

    What Transformers does not hand to such functions is passed here alone: `streamer`, `tokenizer`, `assistant_model`. What a
    model is served with is kept for as long as the function and the model live; `close` on the function frees it.
    """
    held: weakref.WeakKeyDictionary[Any, SpedUpModel] = weakref.WeakKeyDictionary()

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if model not in held:
            held[model] = SpedUpModel(model, settings.get("tokenizer"), speculation, **_without(settings, "tokenizer"))
        request = TensorRequest(input_ids, model_kwargs.get("attention_mask"), generation_config, streamer, expanded=True)
        request.check_extras(logits_processor, stopping_criteria)
        return held[model].run(request)

    def close() -> None:
        for one in list(held.values()):
            one.close()
        held.clear()

    generate.close = close  # type: ignore[attr-defined]
    return generate


def _wanted(speculation: Speculation, assistant: Any, spellings: Mapping[str, Any]) -> SpeculationConfig:
    """The settings of speculation, with what a draft model or a head's folder implies."""
    if assistant is None:
        return resolve_speculation(speculation, spellings)
    changes = {SPELLINGS[name]: value for name, value in spellings.items() if name in SPELLINGS and value is not None}
    if _is_path(assistant):
        folder = str(assistant)
        settings = {"method": method_of_weights(folder)} if speculation is None else _settings(speculation)
        return SpeculationConfig.parse({**settings, **changes, "model": folder})
    settings = {"method": "draft_model"} if speculation is None else _settings(speculation)
    return SpeculationConfig.parse({**_WITH_DRAFT.get(settings.get("method", "auto"), {}), **settings, **changes})


def _settings(speculation: Speculation) -> dict[str, Any]:
    if isinstance(speculation, SpeculationConfig | bool):
        raise InvalidParameter("speculation", "pass a method's name or a mapping beside assistant_model")
    if isinstance(speculation, str):
        return parse_method(speculation)
    return dict(speculation or {})


def _is_path(value: Any) -> bool:
    return isinstance(value, str | PathLike)


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
