"""`train lm`: a Llama-architecture model from scratch, and its export as a model directory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import InvalidParameter, OutriderError
from outrider.model import Decoder, ModelConfig, Rope, save_decoder, write_config
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.data import TokenStore
from outrider.train.tokenizer import TOKENIZER_FILES

__all__ = ["Heldout", "LmTask", "Shape", "export_model", "greedy", "heldout_loss", "new_decoder"]

_OPS = Plain()
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model to train."""

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 8192
    context: int = 2048
    tied: bool = True

    def config(self, eos: int) -> ModelConfig:
        """The decoder's configuration; weights are stored for bfloat16."""
        if self.hidden % self.heads or self.heads % self.kv_heads:
            rule = f"{self.heads} must divide hidden {self.hidden} and be a multiple of kv_heads {self.kv_heads}"
            raise InvalidParameter("heads", rule)
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab=self.vocab,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            ffn=self.ffn,
            context=self.context,
            rope=Rope(theta=10000.0),
            tied=self.tied,
            windows=(None,) * self.layers,
            dtype="bfloat16",
            eos_ids=(eos,),
        )


@dataclass(frozen=True, slots=True)
class Heldout:
    """Loss on text that was not trained on, in nats per token."""

    loss: float
    tokens: int
    by_group: dict[str, float]


class LmTask:
    """Next-token prediction. Satisfies `loop.Task`."""

    def __init__(self, decoder: Decoder, heldout: dict[str, TokenStore], eval_rows: int = 96) -> None:
        self.module = decoder
        self._heldout = {name: store for name, store in heldout.items() if store.tokens > 1}
        self._eval_rows = eval_rows

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of (B, T + 1) ids."""
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            logits = _logits(self.module, tokens[:, :-1])
            return F.cross_entropy(logits, tokens[:, 1:].reshape(-1))

    def evaluate(self) -> dict[str, float]:
        """Loss on a sample of each held-out set."""
        return {name: heldout_loss(self.module, store, self._eval_rows).loss for name, store in self._heldout.items()}


def new_decoder(config: ModelConfig, seed: int, device: torch.device) -> Decoder:
    """Fresh float32 weights: small normals, zero where a sublayer joins the residual stream."""
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in decoder.named_parameters():
            if name.endswith((".out", ".down")):
                param.zero_()
            elif param.dim() == 2:
                std = 0.02 if name in ("embedding", "output") else 0.5 / math.sqrt(param.shape[1])
                param.normal_(0.0, std, generator=generator)
    return decoder.to(device)


@torch.no_grad()
def heldout_loss(decoder: Decoder, store: TokenStore, most_rows: int | None = None, batch: int = 16) -> Heldout:
    """Loss over consecutive rows of a store; `most_rows` takes evenly spread ones."""
    context = min(decoder.config.context, store.tokens - 1)
    starts = np.arange(0, store.tokens - context, context)
    if most_rows is not None and len(starts) > most_rows:
        starts = starts[np.linspace(0, len(starts) - 1, most_rows).astype(int)]
    sums, counts = np.zeros(store.documents), np.zeros(store.documents)
    for chunk in np.array_split(starts, math.ceil(len(starts) / batch)):
        rows = np.stack([np.asarray(store.ids[s : s + context + 1], dtype=np.int64) for s in chunk])
        losses = _token_losses(decoder, torch.from_numpy(rows)).double().cpu().numpy()
        owner = np.searchsorted(store.starts, chunk[:, None] + np.arange(1, context + 1), side="right") - 1
        np.add.at(sums, owner, losses)
        np.add.at(counts, owner, 1)
    return Heldout(float(sums.sum() / counts.sum()), int(counts.sum()), _by_group(store.groups, sums, counts))


@torch.no_grad()
def greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The most probable continuation, by recomputing the whole text for every token."""
    ids = list(prompt)
    device = decoder.norm.device
    for _ in range(min(count, decoder.config.context - len(ids))):
        logits = _logits(decoder, torch.tensor([ids], device=device), last_only=True)
        ids.append(int(logits[-1].argmax()))
        if ids[-1] in decoder.config.eos_ids:
            break
    return ids[len(prompt) :]


def export_model(decoder: Decoder, tokenizer: Path, directory: Path) -> None:
    """A model directory with int8 weights; what is loaded from it is the model. Replaced as a whole."""
    temporary = directory.with_name(directory.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    config = replace(decoder.config, dtype="bfloat16")
    eos = config.eos_ids[0]
    generation = {"eos_token_id": list(config.eos_ids), "pad_token_id": eos, "do_sample": False}
    try:
        save_decoder(decoder, temporary, int8=True)
        write_config(config, temporary, {"bos_token_id": None, "pad_token_id": eos})
        (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, temporary / name)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutriderError(f"cannot write the model to {directory}: {error}; free some space or choose another --out") from error


def _logits(decoder: Decoder, tokens: Tensor, last_only: bool = False) -> Tensor:
    """(B * T, V) logits of (B, T) ids, or of the last position alone."""
    rows, context = tokens.shape
    positions = torch.arange(context, device=tokens.device).repeat(rows)
    last = decoder(tokens.reshape(-1), positions, causal_attend(rows, context), _OPS).last
    return decoder.logits(last[-1:] if last_only else last, _OPS)


def _token_losses(decoder: Decoder, rows: Tensor) -> Tensor:
    """(B, T) losses of (B, T + 1) ids."""
    rows = rows.to(decoder.norm.device)
    master = decoder.embedding.dtype == decoder.layers[0].qkv.dtype  # bf16 layers are the model as served
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda and master):
        logits = _logits(decoder, rows[:, :-1])
        return F.cross_entropy(logits, rows[:, 1:].reshape(-1), reduction="none").view(rows.shape[0], -1)


def _by_group(groups: Sequence[str], sums: Floats, counts: Floats) -> dict[str, float]:
    names = sorted(set(groups))
    order = {name: i for i, name in enumerate(names)}
    place = np.array([order[group] for group in groups])
    total, size = np.bincount(place, sums, len(names)), np.bincount(place, counts, len(names))
    return {name: float(total[i] / size[i]) for i, name in enumerate(names) if size[i]}
