"""Families of models, one file each: a Hugging Face config becomes a `ModelSpec`, stored names become places in the decoder.

Nothing else in the package knows a family by name. To add one, write a file that defines `FAMILY` and list it here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.gguf import Gguf, find_gguf
from outrider.model.families import (
    arcee,
    cohere,
    ernie,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_moe,
    lfm2,
    llama,
    minimax_m2,
    ministral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen_moe,
    qwen_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from outrider.model.families.family import Family
from outrider.model.families.llama import LlamaShape
from outrider.model.families.names import Names, places
from outrider.model.families.place import Place
from outrider.model.families.reading import STORED_DTYPES, Sizes
from outrider.model.families.text_part import text_part
from outrider.model.fields import Fields, read_json
from outrider.model.formats import format_of
from outrider.model.formats.gguf_config import config_of
from outrider.model.spec import ModelSpec

__all__ = [
    "FAMILIES", "STORED_DTYPES", "Family", "LlamaShape", "Names", "Place", "compile_spec", "family_of", "names_of",
    "places_of", "read_spec",
]  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY, gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3, phi.FAMILY, phi3.FAMILY, glm.GLM, glm.GLM4, granite.GRANITE,
    granite.MINICPM, olmo.OLMO, olmo.OLMO2, olmo.OLMO3, smollm3.FAMILY, exaone4.FAMILY, ministral.MINISTRAL,
    ministral.MINISTRAL3, seed_oss.FAMILY, ernie.FAMILY, arcee.FAMILY, gpt2.BIGCODE, starcoder2.FAMILY,
    cohere.COHERE, cohere.COHERE2, stablelm.FAMILY, gpt_neox.FAMILY, gptj.FAMILY, nemotron.FAMILY, gpt2.GPT2, opt.FAMILY,
    falcon.FAMILY, mixtral.FAMILY, qwen_moe.QWEN2_MOE, qwen_moe.QWEN3_MOE, olmoe.FAMILY, granite_moe.FAMILY,
    phimoe.FAMILY, glm4_moe.FAMILY, minimax_m2.FAMILY, gpt_oss.FAMILY,
    lfm2.LFM2, lfm2.LFM2_MOE, qwen_next.QWEN3_NEXT, qwen_next.QWEN3_5, qwen_next.QWEN3_5_MOE,
    granite_hybrid.FAMILY, nemotron_h.FAMILY, falcon_h1.FAMILY,
)  # fmt: skip
_BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}
_REFUSED_KEYS = ("auto_map", "_attn_implementation_internal", "trust_remote_code")


def read_spec(directory: Path) -> ModelSpec:
    """The spec of the model in a directory, from its config.json, or in a GGUF file."""
    if (gguf := find_gguf(directory)) is not None:
        return compile_spec(config_of(Gguf(gguf)), str(gguf))
    path = directory / "config.json"
    return compile_spec(read_json(path, "a model directory holds config.json and *.safetensors"), str(path))


def compile_spec(data: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec of a Hugging Face configuration. Everything is checked here, before anything is allocated."""
    for key in _REFUSED_KEYS:
        if data.get(key):
            raise ModelError(f"{where} has {key!r}, which would run code from the model; Outrider never does")
    format_of(data, where)
    fields = Fields(data, where)
    architecture = next(iter(fields.items("architectures")), "?")
    family = family_of(architecture) if isinstance(architecture, str) else None
    if family is None and (text := text_part(data, str(architecture))) is not None:
        return compile_spec(text, f"{where}: text_config")
    if family is None:
        raise fields.error(_unknown(architecture))
    return family.compile(Sizes(fields, architecture, dict(family.fields), family.default_ffn))


def family_of(architecture: str) -> Family | None:
    """The family that has an architecture."""
    return _BY_ARCHITECTURE.get(architecture)


def places_of(spec: ModelSpec, stored: Collection[str] = ()) -> dict[str, Place]:
    """Stored tensor name -> its place in the decoder of a spec. What is `stored` decides between layouts of experts."""
    return places(spec, names_of(spec), stored)


def names_of(spec: ModelSpec) -> Names:
    """How checkpoints of a spec name their tensors."""
    return _BY_ARCHITECTURE[spec.architecture].names_of(spec)


def _unknown(architecture: Any) -> str:
    near = get_close_matches(str(architecture), _BY_ARCHITECTURE, 1, 0.0)[0]
    return (
        f"architecture {shown(architecture)} is not supported; the nearest known one is {near} (`outrider models` lists all); "
        "Transformers can run it: AutoModelForCausalLM.from_pretrained(...)"
    )
