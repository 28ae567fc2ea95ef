"""Checkpoints of gpt-oss with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["quantise_experts"]


def quantise_experts(directory: Path) -> None:
    """Rewrite gpt-oss experts as MXFP4 blocks and scales; those in the folder `plain` are what these decode to."""
    tensors, plain = load_file(directory / "model.safetensors"), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 124, (experts, outputs, inner // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        plain[name] = (values[nibbles] * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).mT.contiguous()
    (directory / "plain").mkdir()
    save_file(
        {k: v for k, v in tensors.items() if not k.endswith(("_blocks", "_scales"))} | plain,
        directory / "plain" / "model.safetensors",
    )
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "plain" / "config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
