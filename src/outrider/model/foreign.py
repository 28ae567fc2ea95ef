"""Model formats that other tools serve and Outrider does not: each is refused by its name, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.checks import shown
from outrider.errors import ModelError

__all__ = ["refuse_foreign", "refuse_quantised"]

_METHODS = ("quant_method", "quant_algo", "quant_type", "format")
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # of GPTQ, AWQ and ModelOpt
_INSTEAD = "Outrider serves float32, bfloat16 and float16 weights and its own int8; pass the unquantised model"


def refuse_quantised(data: Mapping[str, Any], where: str) -> None:
    """Refuse weights that config.json says are quantised: read as they stand they would write garbage."""
    for key in ("quantization_config", "compression_config"):
        settings = data.get(key)
        if settings is not None:
            raise ModelError(f"{where}: the weights are quantised with {_method(settings)} ({key}); {_INSTEAD}")


def refuse_foreign(path: Path) -> None:
    """Refuse GGUF files, LoRA adapters and quantised folders, where the files show what they are."""
    if path.suffix.lower() == ".gguf":
        raise _gguf(path)
    if not path.is_dir():
        return
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} is a LoRA adapter (adapter_config.json), not a whole model; merge it into its base model with peft "
            "(merge_and_unload, then save_pretrained) and pass that folder"
        )
    for name in _QUANTISED_FILES:
        if (path / name).exists():
            raise ModelError(f"{path}: the weights are quantised ({name}); {_INSTEAD}")
    gguf_files = sorted(path.glob("*.gguf"))
    if gguf_files and not any(path.glob("*.safetensors")):
        raise _gguf(gguf_files[0])


def _gguf(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a GGUF file, which Outrider does not read; pass the folder of the original model "
        "(config.json and *.safetensors), or convert it with transformers (from_pretrained(..., gguf_file=...), save_pretrained)"
    )


def _method(settings: Any) -> str:
    """What a quantisation is called in its settings."""
    names = [settings[key] for key in _METHODS if settings.get(key)] if isinstance(settings, Mapping) else []
    if names and isinstance(names[0], str):
        return names[0][:40]
    if isinstance(settings, Mapping) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return shown(settings)
