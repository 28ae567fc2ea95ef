"""Weights between Hugging Face safetensors and the decoder. Strict: every key used, every parameter filled."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import checks
from outrider.errors import InvalidParameter, ModelError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.fields import Fields, read_json
from outrider.model.files import INDEX, SCALE, is_int8, quantised, read_headers, read_tensors, refuse_foreign
from outrider.platform import memory_bytes
from outrider.sampling.params import SamplingParams

__all__ = [
    "LoadOptions",
    "check_model",
    "generation_defaults",
    "is_hub_id",
    "is_int8",
    "load_decoder",
    "locate",
    "names",
    "read_tensors",
    "save_decoder",
    "served_dtype",
    "usable_ids",
    "write_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INT8 = "int8"  # int8 weights with a scale per output channel and int8 rows, in the native core; torch holds float32
_IGNORED = ("rotary_emb.inv_freq",)
_SHARD_BYTES = 15 * 2**20
_ROPE_BYTES = 12  # for each position and value of a head while the tables are made: two in float64, two in float32
_HUB_ID = re.compile(r"[\w\-][\w.\-]{0,95}/[\w.\-]{1,96}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to read a model. dtype "auto" is the stored one; load_format "dummy" needs config.json alone."""

    dtype: str = "auto"
    load_format: str = "safetensors"
    seed: int = 0
    widen: bool = False  # hold bf16 weights in float32, where this process must not multiply bf16

    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, ("auto", *DTYPES, INT8))
        checks.choice("load_format", self.load_format, ("dummy", "safetensors"))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stored tensor goes: a parameter, and which of its rows."""

    parameter: str
    rows: slice


def locate(model: str, revision: str | None = None) -> Path:
    """The local directory of a path or hub id."""
    model = checks.text("model", model)
    if not model or "\0" in model:
        raise InvalidParameter("model", f"must be a directory or a hub id like 'owner/name', got {checks.shown(model)}")
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
        refuse_foreign(path)
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission, the home of nobody
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{checks.shown(model)} is not a model directory: {reason}") from None
    if is_directory:
        return path
    if exists or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(
            f"{checks.shown(model)} is not a model directory; pass a directory with config.json or a hub id like 'owner/name'"
        )
    return _fetch(model, None if revision is None else checks.text("revision", revision))


def is_hub_id(model: str) -> bool:
    """Whether this is `owner/name` on the hub and nothing on this machine."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _fetch(model: str, revision: str | None) -> Path:
    """A snapshot from the hub."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise ModelError(f"cannot fetch {model!r} from the hub: {error}") from error
    refuse_foreign(path)
    return path


def load_decoder(directory: Path, options: LoadOptions = LoadOptions()) -> Decoder:
    """A decoder with its weights, ready for inference. Names, shapes and sizes are checked before it takes memory."""
    decoder, stored = _skeleton(directory, options)
    config, dtype = decoder.config, DTYPES.get(decoder.config.dtype, torch.float32)
    if options.dtype == "auto":
        _say_narrowed(directory, stored, config.dtype)
    decoder.to_empty(device="cpu")
    decoder.rope = type(decoder.rope)(config.rope, config.head_dim, config.context)
    decoder.requires_grad_(False)
    if options.load_format == "dummy":
        _fill_random(decoder, options.seed, dtype)
    else:
        _fill(decoder, directory, dtype)
    return decoder.eval()


def check_model(directory: Path, options: LoadOptions = LoadOptions()) -> None:
    """Fail where `load_decoder` would: the config, its size, and the names and shapes of the tensors. No weights are read."""
    _skeleton(directory, options)


def _skeleton(directory: Path, options: LoadOptions) -> tuple[Decoder, set[str]]:
    """A decoder that takes no memory yet, and the dtypes that its weights are stored in."""
    refuse_foreign(directory)
    config = ModelConfig.read(directory)
    name = served_dtype(options.dtype, config.dtype)
    held = torch.float32 if options.widen else DTYPES.get(name, torch.float32)
    stored, config = config.dtype, replace(config, dtype=name)
    _check_memory(config, held)
    with torch.device("meta"):
        decoder = Decoder(config, held)
    return decoder, {stored} if options.load_format == "dummy" else _check_headers(decoder, directory)


def _say_narrowed(directory: Path, stored: set[str], served: str) -> None:
    """One line where weights are served in another precision than they are stored in."""
    narrowed = {"float16", "float64"} if served == "float32" else {"float16", "float32", "float64"}
    for name in sorted(stored & narrowed):
        cure = "" if served == "float32" else "; dtype=float32 keeps more of it"
        _logger.warning("%s is stored as %s, served as %s%s", directory, name, served, cure)


def save_decoder(decoder: Decoder, directory: Path, int8: bool = False) -> None:
    """Write weights under Hugging Face names, in shards; `int8` stores matrices per output channel."""
    tensors: dict[str, Tensor] = {}
    parameters = dict(decoder.named_parameters())
    for name, place in names(decoder.config).items():
        tensor = parameters[place.parameter].detach()[place.rows].cpu().contiguous()
        if int8 and tensor.dim() == 2:
            tensors[name], tensors[name + SCALE] = quantised(tensor)
        else:
            tensors[name] = tensor.clone()
    _write_shards(tensors, directory)


def names(config: ModelConfig) -> dict[str, _Place]:
    """Hugging Face tensor name -> its place in the decoder."""
    c, all_rows = config, slice(None)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    fused = {
        "qkv": {
            "self_attn.q_proj": slice(0, q),
            "self_attn.k_proj": slice(q, q + kv),
            "self_attn.v_proj": slice(q + kv, q + 2 * kv),
        },
        "out": {"self_attn.o_proj": all_rows},
        "gate_up": {"mlp.gate_proj": slice(0, c.ffn), "mlp.up_proj": slice(c.ffn, 2 * c.ffn)},
        "down": {"mlp.down_proj": all_rows},
    }
    biased = {"qkv": c.attention_bias, "out": c.output_bias, "gate_up": c.mlp_bias, "down": c.mlp_bias}
    norms = {"norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    if c.qk_norm:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    places = {"model.embed_tokens.weight": _Place("embedding", all_rows), "model.norm.weight": _Place("norm", all_rows)}
    if not c.tied:
        places["lm_head.weight"] = _Place("output", all_rows)
    for i in range(c.layers):
        for ours, parts in fused.items():
            for theirs, rows in parts.items():
                places[f"model.layers.{i}.{theirs}.weight"] = _Place(f"layers.{i}.{ours}", rows)
                if biased[ours]:
                    places[f"model.layers.{i}.{theirs}.bias"] = _Place(f"layers.{i}.{ours}_bias", rows)
        for ours, theirs in norms.items():
            places[f"model.layers.{i}.{theirs}.weight"] = _Place(f"layers.{i}.{ours}", all_rows)
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
    eos = usable_ids(config.eos_ids, config, directory / "config.json")
    path = directory / "generation_config.json"
    if not path.exists():
        return {}, eos
    data = read_json(path)
    eos |= usable_ids(Fields(data, str(path)).ids("eos_token_id"), config, path)
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {key: data[key] for key in known if data.get(key) is not None}
    if data.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise ModelError(f"{path}: {error}") from None
    return defaults, eos


def usable_ids(ids: Iterable[int], config: ModelConfig, where: Path) -> frozenset[int]:
    """Those end-of-sequence ids that the model can choose. Others have no logit, and are ignored with a warning."""
    ids = frozenset(ids)
    beyond = sorted(token for token in ids if not 0 <= token < config.vocab)
    if beyond:
        listed = ", ".join(map(checks.shown, beyond[:8]))
        _logger.warning(
            "%s names end-of-sequence ids beyond the model's %d output rows: %s; they are ignored", where, config.vocab, listed
        )
    return ids - frozenset(beyond)


def served_dtype(requested: str, stored: str) -> str:
    """The dtype of a model's products; "auto" is the dtype that config.json names."""
    if requested == "auto":
        return "float32" if stored == "float64" else stored if stored in DTYPES else "bfloat16"  # float16 runs as bfloat16
    return checks.choice("dtype", requested, ("auto", *DTYPES, INT8))


def _check_memory(config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse a model that this machine cannot hold, before anything is allocated."""
    weights = config.parameters * dtype.itemsize
    table = _ROPE_BYTES * config.context * config.head_dim
    memory = memory_bytes()
    if weights + table > memory:
        gib = 2**30
        raise ModelError(
            f"the model needs {weights / gib:,.1f} GiB for its weights and {table / gib:,.1f} GiB for rotary tables of "
            f"{config.context:,} positions; this machine has {memory / gib:,.1f} GiB"
        )


def _check_headers(skeleton: Decoder, directory: Path) -> set[str]:
    """Compare every stored tensor's name and shape with the config, before anything is allocated; the matrices' dtypes."""
    places = names(skeleton.config)
    missing = set(places)
    parameters = dict(skeleton.named_parameters())
    dtypes = set()
    for name, header in read_headers(directory).items():
        if _unused(name, skeleton.config):
            continue
        if name not in places:
            raise ModelError(f"{header.file} holds {name!r}, which {skeleton.config.architecture} does not have")
        expected = tuple(parameters[places[name].parameter][places[name].rows].shape)
        if header.shape != expected:
            raise ModelError(f"{header.file}: {name!r} has shape {header.shape}, config.json asks for {expected}")
        missing.discard(name)
        if len(header.shape) == 2:
            dtypes.add(header.dtype)
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} tensors, first {min(missing)!r}")
    return dtypes


def _fill(decoder: Decoder, directory: Path, dtype: torch.dtype) -> None:
    """Read the weights, whose names and shapes were checked."""
    places = names(decoder.config)
    parameters = dict(decoder.named_parameters())
    for name, tensor, _ in read_tensors(directory):
        if not _unused(name, decoder.config):
            target = parameters[places[name].parameter][places[name].rows]
            target.copy_(tensor.to(dtype) if tensor.dim() == 2 else tensor)


def _unused(name: str, config: ModelConfig) -> bool:
    return name.endswith(_IGNORED) or (name == "lm_head.weight" and config.tied)


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
        tensor_bytes = tensor.numel() * tensor.element_size()
        if not name.endswith(SCALE) and size + tensor_bytes > _SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor_bytes
    directory.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
