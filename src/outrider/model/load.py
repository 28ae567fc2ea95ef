"""Weights between Hugging Face safetensors and the decoder. Strict: every key used, every parameter filled."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import InvalidParameter, ModelError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder

__all__ = [
    "LoadOptions",
    "generation_defaults",
    "is_int8",
    "load_decoder",
    "locate",
    "names",
    "read_tensors",
    "save_decoder",
    "served_dtype",
    "write_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INT8 = "int8"  # weights per output channel and rows in int8, by the native core; torch holds them in float32
SCALE = ".scale"  # int8 weights carry a float32 scale per output row beside them
_IGNORED = ("rotary_emb.inv_freq",)
_SHARD_BYTES = 15 * 2**20


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to read a model. dtype "auto" is the stored one; load_format "dummy" needs config.json alone."""

    dtype: str = "auto"
    load_format: str = "safetensors"
    seed: int = 0
    widen: bool = False  # hold bf16 weights in float32, where this process must not multiply bf16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stored tensor goes: a parameter, and which of its rows."""

    parameter: str
    rows: slice


def locate(model: str, revision: str | None = None) -> Path:
    """The local directory of a path or hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(f"{model!r} is not a model directory; pass a directory with config.json or a hub id like 'owner/name'")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise ModelError(f"cannot fetch {model!r} from the hub: {error}") from error


def load_decoder(directory: Path, options: LoadOptions = LoadOptions()) -> Decoder:  # noqa: B008 (frozen)
    """A decoder with its weights, ready for inference."""
    config = ModelConfig.read(directory)
    name = served_dtype(options.dtype, config.dtype)
    config, dtype = replace(config, dtype=name), DTYPES.get(name, torch.float32)
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32 if options.widen else dtype)
    decoder.to_empty(device="cpu")
    decoder.rope = type(decoder.rope)(config.rope, config.head_dim, config.context)
    decoder.requires_grad_(False)
    if options.load_format == "dummy":
        _fill_random(decoder, options.seed, dtype)
    elif options.load_format == "safetensors":
        _fill(decoder, directory, dtype)
    else:
        raise InvalidParameter("load_format", f"unknown {options.load_format!r}; known: dummy, safetensors")
    return decoder.eval()


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor, str]]:
    """Every stored (name, tensor, file name) of a directory; int8 weights are dequantised on the way."""
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                stored = set(file.keys())
                for name in sorted(stored):
                    if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
                        continue
                    tensor = file.get_tensor(name)
                    if tensor.dtype == torch.int8:
                        tensor = tensor.float() * file.get_tensor(name + SCALE)[:, None]
                    yield name, tensor, path.name
        except (SafetensorError, OSError, KeyError) as error:
            raise ModelError(f"{path} cannot be read (truncated or corrupt?): {error}") from None


def is_int8(directory: Path) -> bool:
    """Whether a directory's matrices are stored in int8."""
    with contextlib.suppress(SafetensorError, OSError, ModelError), safe_open(_files(directory)[0], framework="pt") as file:
        return any(name.endswith(SCALE) for name in file.keys())  # noqa: SIM118 (not a dict)
    return False


def save_decoder(decoder: Decoder, directory: Path, int8: bool = False) -> None:
    """Write weights under Hugging Face names, in shards; `int8` stores matrices per output channel."""
    tensors: dict[str, Tensor] = {}
    parameters = dict(decoder.named_parameters())
    for name, place in names(decoder.config).items():
        tensor = parameters[place.parameter].detach()[place.rows].cpu().contiguous()
        if int8 and tensor.dim() == 2:
            scale = (tensor.float().abs().amax(1) / 127.0).clamp_min(1e-12)
            tensors[name] = (tensor.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            tensors[name + SCALE] = scale
        else:
            tensors[name] = tensor.clone()
    _write_shards(tensors, directory)


def names(config: ModelConfig) -> dict[str, _Place]:
    """Hugging Face tensor name -> its place in the decoder."""
    c, whole = config, slice(None)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    fused = {
        "qkv": {
            "self_attn.q_proj": slice(0, q),
            "self_attn.k_proj": slice(q, q + kv),
            "self_attn.v_proj": slice(q + kv, q + 2 * kv),
        },
        "out": {"self_attn.o_proj": whole},
        "gate_up": {"mlp.gate_proj": slice(0, c.ffn), "mlp.up_proj": slice(c.ffn, 2 * c.ffn)},
        "down": {"mlp.down_proj": whole},
    }
    biased = {"qkv": c.attention_bias, "out": c.output_bias, "gate_up": c.mlp_bias, "down": c.mlp_bias}
    norms = {"norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    if c.qk_norm:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    places = {"model.embed_tokens.weight": _Place("embedding", whole), "model.norm.weight": _Place("norm", whole)}
    if not c.tied:
        places["lm_head.weight"] = _Place("output", whole)
    for i in range(c.layers):
        for ours, parts in fused.items():
            for theirs, rows in parts.items():
                places[f"model.layers.{i}.{theirs}.weight"] = _Place(f"layers.{i}.{ours}", rows)
                if biased[ours]:
                    places[f"model.layers.{i}.{theirs}.bias"] = _Place(f"layers.{i}.{ours}_bias", rows)
        for ours, theirs in norms.items():
            places[f"model.layers.{i}.{theirs}.weight"] = _Place(f"layers.{i}.{ours}", whole)
    return places


def write_config(config: ModelConfig, directory: Path, extra: dict[str, Any] | None = None) -> None:
    """config.json as Transformers reads it."""
    c = config
    data: dict[str, Any] = {
        "architectures": [c.architecture],
        "model_type": c.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.attention_bias,
        "hidden_act": "silu",
        "dtype": c.dtype,
        "eos_token_id": list(c.eos_ids),
    }
    (directory / "config.json").write_text(json.dumps(data | (extra or {}), indent=2) + "\n")


def generation_defaults(directory: Path, config: ModelConfig) -> tuple[dict[str, Any], frozenset[int]]:
    """Sampling defaults and end-of-sequence ids from generation_config.json, where there is one."""
    eos = set(config.eos_ids)
    path = directory / "generation_config.json"
    if not path.exists():
        return {}, frozenset(eos)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    own = data.get("eos_token_id")
    eos |= set(own) if isinstance(own, list) else set() if own is None else {own}
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {key: data[key] for key in known if data.get(key) is not None}
    if data.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    return defaults, frozenset(eos)


def served_dtype(asked: str, stored: str) -> str:
    """What the products of a model run in; "auto" is what config.json calls its weights."""
    if asked == "auto":
        return stored if stored in DTYPES else "bfloat16"  # float16 checkpoints are served as bfloat16
    if asked not in (*DTYPES, INT8):
        raise InvalidParameter("dtype", f"unknown {asked!r}; known: auto, {', '.join(DTYPES)}, {INT8}")
    return asked


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
        why = f" ({pickled[0].name} is a pickle, which can run code; convert it to safetensors)" if pickled else ""
        raise ModelError(f"{directory} holds no *.safetensors{why}")
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} is missing, but {index.name} names it")
    return files


def _fill(decoder: Decoder, directory: Path, dtype: torch.dtype) -> None:
    places = names(decoder.config)
    parameters = dict(decoder.named_parameters())
    missing = set(places)
    for name, tensor, file in read_tensors(directory):
        if name.endswith(_IGNORED) or (name == "lm_head.weight" and decoder.config.tied):
            continue
        if name not in places:
            raise ModelError(f"{file} holds {name!r}, which {decoder.config.architecture} does not have")
        place = places[name]
        target = parameters[place.parameter][place.rows]
        if target.shape != tensor.shape:
            raise ModelError(f"{file}: {name!r} has shape {tuple(tensor.shape)}, config.json asks for {tuple(target.shape)}")
        target.copy_(tensor.to(dtype) if tensor.dim() == 2 else tensor)
        missing.discard(name)
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} tensors, first {min(missing)!r}")


def _fill_random(decoder: Decoder, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            std = 0.02 if name in ("embedding", "output") else 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * std).to(dtype))


def _write_shards(tensors: dict[str, Tensor], directory: Path) -> None:
    """Shards of at most 15 MiB each, with an index when there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if not name.endswith(SCALE) and size + own > _SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += own
    directory.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
