"""`AutoModelForCausalLM` as Transformers has it: a program changes its import, and its models generate by Outrider."""

from __future__ import annotations

from typing import Any, Self

from outrider.engine.speed_up import Speculation, SpedUpModel

__all__ = ["AutoModelForCausalLM", "GeneratingModel"]


class GeneratingModel:
    """A model that Transformers has loaded, whose `generate` is that of `speed_up`. Everything else is the model's own.

    What Outrider needs beside the model is made at the first `generate`; `close`, or the end of a `with` block, frees it.
    """

    def __init__(self, model: Any, speculation: Speculation = None) -> None:
        self.transformers_model = model
        self._speculation = speculation
        self._fast: SpedUpModel | None = None

    def generate(self, *inputs: Any, **settings: Any) -> Any:
        """Continue token ids, with the keywords and results of Transformers' `generate`."""
        if self._fast is None:
            self._fast = SpedUpModel(self.transformers_model, settings.get("tokenizer"), self._speculation)
        assistant = settings.get("assistant_model")
        if isinstance(assistant, GeneratingModel):
            settings["assistant_model"] = assistant.transformers_model
        return self._fast.generate(*inputs, **settings)

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        return self.transformers_model(*inputs, **settings)

    def eval(self) -> Self:
        self.transformers_model.eval()
        return self

    def to(self, *where: Any, **settings: Any) -> Self:
        """Move or convert the weights; the next `generate` begins anew."""
        self.close()
        self.transformers_model.to(*where, **settings)
        return self

    def close(self) -> None:
        """Free what `generate` has made. The model stays."""
        fast, self._fast = self._fast, None
        if fast is not None:
            fast.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "transformers_model":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.transformers_model, name)


class AutoModelForCausalLM:
    """Loads as Transformers' class of this name does. `speculation` is that of `speed_up`."""

    @classmethod
    def from_pretrained(cls, name: Any, *inputs: Any, speculation: Speculation = None, **settings: Any) -> GeneratingModel:
        from transformers import AutoModelForCausalLM as Loader

        return GeneratingModel(Loader.from_pretrained(name, *inputs, **settings), speculation)

    @classmethod
    def from_config(cls, config: Any, *, speculation: Speculation = None, **settings: Any) -> GeneratingModel:
        from transformers import AutoModelForCausalLM as Loader

        return GeneratingModel(Loader.from_config(config, **settings), speculation)
