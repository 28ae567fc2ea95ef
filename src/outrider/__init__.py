"""Outrider: speculative decoding whose text is the same text.

Importing the package first makes bf16 products safe on processors that hide their AMX tiles.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.platform import guard

guard()  # before anything here loads torch

__all__ = [
    "LLM",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "SamplingParams",
    "__version__",
    "custom_generate",
    "register_drafter",
    "speed_up",
]

_HOMES = {
    "LLM": "outrider.engine.llm",
    "SamplingParams": "outrider.sampling.params",
    "AutoModelForCausalLM": "outrider.engine.auto_model",
    "AutoTokenizer": "transformers",
    "register_drafter": "outrider.draft",
    "custom_generate": "outrider.engine.speed_up",
    "speed_up": "outrider.engine.speed_up",
}

if TYPE_CHECKING:
    from transformers import AutoTokenizer

    from outrider.draft import register_drafter
    from outrider.engine.auto_model import AutoModelForCausalLM
    from outrider.engine.llm import LLM
    from outrider.engine.speed_up import custom_generate, speed_up
    from outrider.sampling.params import SamplingParams


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the heavy parts when first used, so that `outrider --help` is quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
