"""Weights between Hugging Face safetensors and the decoder. Strict: every key used, every parameter filled."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import checks
from outrider.errors import InvalidParameter, ModelError
from outrider.gguf import Gguf, find_gguf
from outrider.model.decoder import Decoder
from outrider.model.device_bytes import with_layer_bytes
from outrider.model.families import places_of, read_spec
from outrider.model.families.llama import hf_config
from outrider.model.fields import Fields, read_json
from outrider.model.files import INDEX, SCALE, is_int8, quantised, refuse_foreign, weight_files
from outrider.model.formats import format_in
from outrider.model.formats.gguf_config import sampling_of
from outrider.model.random_weights import RandomWeights
from outrider.model.source import open_source
from outrider.model.spec import ModelSpec
from outrider.model.weights import Checkpoint, StoredWeights
from outrider.ops import serving_ops
from outrider.platform import memory_bytes
from outrider.sampling.params import SamplingParams

__all__ = [
    "LoadOptions",
    "check_model",
    "describe_decoder",
    "generation_defaults",
    "is_hub_id",
    "is_int8",
    "load_decoder",
    "locate",
    "open_decoder",
    "open_source",
    "save_decoder",
    "served_dtype",
    "served_spec",
    "usable_ids",
    "weight_bytes",
    "write_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INT8 = "int8"  # int8 weights with a scale per output channel and int8 rows, in the native core; torch holds float32
INT4 = "int4"  # four bits in groups with a scale each and int8 rows, likewise; the output matrix in int8
FP8 = "fp8"  # FP8 weights with a scale per output channel and FP8 rows, on a GPU
_SERVED = (*DTYPES, INT8, INT4, FP8)
_BYTES = {INT8: 1.0, INT4: 0.6, FP8: 1.0}  # of a weight
_SHARD_BYTES = 15 * 2**20
_ROPE_BYTES = 12  # for each position and value of a head while the tables are made: two in float64, two in float32
_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model")  # of a repository on the hub
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
        checks.choice("dtype", self.dtype, ("auto", *_SERVED))
        checks.choice("load_format", self.load_format, ("dummy", "safetensors"))


def locate(model: str, revision: str | None = None, files: Sequence[str] = _FILES) -> Path:
    """The local directory of a path or hub id, or the GGUF file. Of what is on the hub, these files are fetched."""
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
    if is_directory or (exists and path.suffix.lower() == ".gguf"):
        return path
    if exists or model.startswith((".", "/", "~")) or model.count("/") != 1 or path.suffix.lower() == ".gguf":
        raise ModelError(
            f"{checks.shown(model)} is not a model directory; pass a directory with config.json, a GGUF file, or a hub id "
            "like 'owner/name'"
        )
    return _fetch(model, None if revision is None else checks.text("revision", revision), files)


def is_hub_id(model: str) -> bool:
    """Whether this is `owner/name` on the hub and nothing on this machine."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _fetch(model: str, revision: str | None, files: Sequence[str]) -> Path:
    """A snapshot from the hub."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise ModelError(f"cannot fetch {model!r} from the hub: {error}") from error
    refuse_foreign(path)
    return path


def load_decoder(directory: Path, options: LoadOptions = LoadOptions()) -> Decoder:
    """A decoder with its weights in memory. Names, shapes and sizes are checked before it takes any."""
    return open_decoder(directory, options).materialise()


def open_decoder(directory: Path, options: LoadOptions = LoadOptions()) -> Decoder:
    """A decoder whose weights stay in their files until they are asked for; see `Decoder.read_layers`."""
    decoder = describe_decoder(directory, options)
    if options.load_format == "dummy":
        return decoder.materialise()
    outside = (name for name, _ in decoder.named_parameters() if not name.startswith(("layers.", "embedding", "output")))
    return decoder.materialise(*outside, "output_bias")


def describe_decoder(directory: Path, options: LoadOptions = LoadOptions()) -> Decoder:
    """A decoder that holds no weights; its source has them."""
    decoder, checkpoint = _skeleton(directory, options)
    dtype = DTYPES.get(decoder.spec.dtype, torch.float32)
    decoder.make_tables()
    decoder.requires_grad_(False)
    parameters = dict(decoder.named_parameters())
    if checkpoint is None:
        decoder.source = RandomWeights(parameters, options.seed, dtype)
        return decoder.eval()
    _say_how_served(checkpoint, options.dtype, decoder.spec.dtype)
    decoder.source = StoredWeights(checkpoint, parameters, dtype, served=decoder.spec.dtype, keeps_groups=options.dtype == "auto")
    return decoder.eval()


def check_model(directory: Path, options: LoadOptions = LoadOptions()) -> None:
    """Fail where `load_decoder` would: the config, its size, and the names and shapes of the tensors. No weights are read."""
    _skeleton(directory, options)


def _skeleton(directory: Path, options: LoadOptions) -> tuple[Decoder, Checkpoint | None]:
    """A decoder that takes no memory yet, and the files that its weights are stored in."""
    refuse_foreign(directory)
    config = served_spec(directory, options)
    held = torch.float32 if options.widen else DTYPES.get(config.dtype, torch.float32)
    _check_memory(config, _weight_bytes(directory, config, held, options.dtype == "auto"))
    checkpoint = None if options.load_format == "dummy" else Checkpoint.of(directory, config)
    with torch.device("meta"):
        decoder = Decoder(config if checkpoint is None else checkpoint.spec, held)
    if checkpoint is not None:
        checkpoint.check(dict(decoder.named_parameters()))
    return decoder, checkpoint


def served_spec(directory: Path, options: LoadOptions = LoadOptions()) -> ModelSpec:
    """The spec of a model in the dtype that it is served in, with what its layers take on a GPU."""
    spec = read_spec(directory)
    spec = replace(spec, dtype=served_dtype(options.dtype, spec.dtype))
    is_stored = options.dtype == "auto" and options.load_format != "dummy" and spec.dtype == "bfloat16"
    return with_layer_bytes(spec, directory) if is_stored else spec


def _say_how_served(checkpoint: Checkpoint, requested: str, served: str) -> None:
    """One line where weights are served in another precision than they are stored in."""
    narrowed = {"float16", "float64"} if served == "float32" else {"float16", "float32", "float64"}
    for name in sorted(checkpoint.matrix_dtypes & narrowed if requested == "auto" else ()):
        cure = "" if served == "float32" else "; dtype=float32 keeps more of it"
        _logger.warning("%s is stored as %s, served as %s%s", checkpoint.directory, name, served, cure)


def save_decoder(decoder: Decoder, directory: Path, int8: bool = False, dtype: torch.dtype | None = None) -> None:
    """Write weights under Hugging Face names, in shards; `int8` stores matrices per output channel, `dtype` in this one."""
    tensors: dict[str, Tensor] = {}
    parameters = dict(decoder.named_parameters())
    for name, place in places_of(decoder.spec).items():
        tensor = place.stored(parameters[place.parameter].detach().cpu())
        if int8 and tensor.dim() == 2 and not place.parameter.endswith(".router"):
            tensors[name], tensors[name + SCALE] = quantised(tensor)
        else:
            tensors[name] = (tensor if dtype is None or tensor.dim() < 2 else tensor.to(dtype)).clone()
    _write_shards(tensors, directory)


def write_config(spec: ModelSpec, directory: Path, extra: dict[str, Any] | None = None) -> None:
    """config.json as Transformers reads it, of a spec that `LlamaShape` can describe."""
    (directory / "config.json").write_text(json.dumps(hf_config(spec) | (extra or {}), indent=2) + "\n")


def generation_defaults(directory: Path, config: ModelSpec) -> tuple[dict[str, Any], frozenset[int]]:
    """Sampling defaults and end-of-sequence ids from generation_config.json, or a GGUF file's metadata, where there are any."""
    path, data = directory / "generation_config.json", dict[str, Any]()
    if (gguf := find_gguf(directory)) is not None:
        path, data = gguf, sampling_of(Gguf(gguf))
    elif path.exists():
        data = read_json(path)
    eos = usable_ids(config.eos_ids, config, directory if gguf else directory / "config.json")
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


def usable_ids(ids: Iterable[int], config: ModelSpec, where: Path) -> frozenset[int]:
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
    return checks.choice("dtype", requested, ("auto", *_SERVED))


def weight_bytes(directory: Path, options: LoadOptions) -> int:
    """Bytes that the weights of a model take at least."""
    stored = read_spec(directory)
    config = replace(stored, dtype=served_dtype(options.dtype, stored.dtype))
    held = torch.float32 if options.widen else DTYPES.get(config.dtype, torch.float32)
    return _weight_bytes(directory, config, held, options.dtype == "auto")


def _weight_bytes(directory: Path, config: ModelSpec, held: torch.dtype, as_stored: bool) -> int:
    """Bytes that weights take at least. Embedding and output matrix of a model in int4 are in int8."""
    if config.dtype in _BYTES:
        matrices = config.vocab * config.hidden * (1 if config.tied else 2)
        return int(config.parameters * _BYTES[config.dtype] + matrices * (_BYTES[INT8] - _BYTES[config.dtype]))
    if as_stored and serving_ops().core is not None:
        if (gguf := find_gguf(directory)) is not None:
            return sum(tensor.nbytes for tensor in Gguf(gguf).tensors.values())
        if format_in(directory) is not None:
            return sum(path.stat().st_size for path in weight_files(directory))
    return config.parameters * held.itemsize


def _check_memory(config: ModelSpec, weights: int) -> None:
    """Refuse a model that this machine cannot hold, before anything is allocated."""
    table = _ROPE_BYTES * config.context * config.head_dim
    memory = memory_bytes()
    if weights + table > memory:
        gib = 2**30
        raise ModelError(
            f"the model needs {weights / gib:,.1f} GiB for its weights and {table / gib:,.1f} GiB for rotary tables of "
            f"{config.context:,} positions; this machine has {memory / gib:,.1f} GiB"
        )


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
