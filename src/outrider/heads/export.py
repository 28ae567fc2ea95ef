"""Model folders as Transformers and other engines read them: weights in floating point, each drafter beside its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider import checks
from outrider.errors import OutriderError
from outrider.heads.block_files import load_block, save_block
from outrider.heads.eagle_files import load_eagle, save_eagle
from outrider.heads.medusa_files import load_medusa, save_medusa
from outrider.heads.mtp_files import load_mtp, save_mtp
from outrider.heads.stored import SaveOptions
from outrider.model import Decoder, LoadOptions, load_decoder, save_decoder
from outrider.model.folders import copy_beside, plain_config, require_new
from outrider.model.load import DTYPES

__all__ = ["ExportOptions", "export_decoder", "export_folder"]

_HEADS: tuple[tuple[str, Callable[..., Any], Callable[..., None]], ...] = (  # beside a target, with how to read and write them
    ("eagle", load_eagle, save_eagle),
    ("mtp", load_mtp, save_mtp),
    ("medusa", load_medusa, save_medusa),
    ("dflash", load_block, save_block),
)
_LAYOUTS = {
    "published": ("eagle", "speculators", "medusa", "dflash"),
    "vllm": ("speculators", "speculators", "vllm-medusa", "speculators"),
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The dtype of matrices, and the layout of heads: that of the published ones, or vLLM's."""

    dtype: str = "bfloat16"
    layout: str = "published"

    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, tuple(DTYPES))
        checks.choice("layout", self.layout, tuple(_LAYOUTS))


def export_folder(source: Path, out: Path, options: ExportOptions = ExportOptions()) -> list[Path]:
    """Write a model and the drafters in its folder; the folders written, the target's first. `out` must be new or empty."""
    require_new(out)
    try:
        target = export_decoder(source, out, options.dtype)
        written = [out]
        if (source / "draft" / "config.json").exists():
            export_decoder(source / "draft", out / "draft", options.dtype)
            written.append(out / "draft")
        return written + _export_heads(source, out, target, options)
    except (OSError, SafetensorError) as error:
        raise OutriderError(f"cannot write to {out}: {error}; free some space or choose another folder") from error


def export_decoder(source: Path, out: Path, dtype: str = "bfloat16") -> Decoder:
    """Write one model: weights as they are after dequantisation, config.json, generation_config.json, tokenizer."""
    config = plain_config(source)
    decoder = load_decoder(source, LoadOptions(dtype))
    save_decoder(decoder, out, dtype=DTYPES[dtype])
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    copy_beside(source, out)
    return decoder


def _export_heads(source: Path, out: Path, target: Decoder, options: ExportOptions) -> list[Path]:
    """The heads beside a target. Each holds every tensor it uses, as other engines expect."""
    load, written = LoadOptions(options.dtype), list[Path]()
    for (folder, load_head, save_head), layout in zip(_HEADS, _LAYOUTS[options.layout], strict=True):
        if (source / folder / "config.json").exists():
            save_head(
                load_head(source / folder, target, load), out / folder, SaveOptions(layout, standalone=True, target=source.name)
            )
            written.append(out / folder)
    return written
