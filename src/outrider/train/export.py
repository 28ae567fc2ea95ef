"""A trained drafter on disk: written as it is served, loaded again, or taken as the start of another run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.heads import EagleHead, MedusaHeads, SaveOptions, load_eagle, load_medusa, save_eagle, save_medusa
from outrider.model import Decoder, load_decoder, save_decoder, write_config
from outrider.train.frozen import FrozenTarget
from outrider.train.networks import DraftModelNetwork, DraftNetwork, EagleNetwork, MedusaNetwork
from outrider.train.tokenizer import copy_tokenizer

__all__ = ["begin_from", "export", "export_model", "load_network", "require_replaceable"]


def export(network: DraftNetwork, tokenizer: Path, directory: Path) -> None:
    """Write a network as it is served: int8 matrices, and nothing that the target has."""
    module = network.module
    if isinstance(module, Decoder):
        export_model(module, tokenizer, directory)
        return
    with _replaced(directory) as folder:
        if isinstance(module, EagleHead):
            save_eagle(module, folder, SaveOptions("eagle", int8=True))
        else:
            assert isinstance(module, MedusaHeads)
            save_medusa(module, folder, SaveOptions("medusa", int8=True))


def export_model(decoder: Decoder, tokenizer: Path, directory: Path) -> None:
    """Write a decoder as a model directory with int8 weights."""
    config = replace(decoder.config, dtype="bfloat16")
    eos = config.eos_ids[0]
    generation = {"eos_token_id": list(config.eos_ids), "pad_token_id": eos, "do_sample": False}
    with _replaced(directory) as folder:
        save_decoder(decoder, folder, int8=True)
        write_config(config, folder, {"bos_token_id": None, "pad_token_id": eos})
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        copy_tokenizer(tokenizer, folder)


def require_replaceable(directory: Path, target: Path) -> None:
    """Refuse an output folder that holds something other than a drafter: an export replaces the whole folder."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    holds_target = directory.resolve() in (target.resolve(), *target.resolve().parents)
    is_drafter = (directory / "config.json").is_file() and not any(path.is_dir() for path in directory.iterdir())
    if holds_target or not is_drafter:
        raise InvalidParameter("out", f"{directory} exists and is no drafter's folder; training would replace it, choose another")


def load_network(network: DraftNetwork, target: FrozenTarget, directory: Path) -> DraftNetwork:
    """A copy of a network with the weights that `export` wrote."""
    device = target.decoder.norm.device
    if isinstance(network, DraftModelNetwork):
        return replace(network, module=load_decoder(directory).to(device))
    if isinstance(network, EagleNetwork):
        return replace(network, module=load_eagle(directory, target.decoder).to(device))
    assert isinstance(network, MedusaNetwork)
    return replace(network, module=load_medusa(directory, target.decoder).to(device))


def begin_from(network: DraftNetwork, target: FrozenTarget, directory: Path) -> None:
    """Copy the weights of an exported drafter into a fresh network of the same shape."""
    saved = load_network(network, target, directory).module.state_dict()
    try:
        network.module.load_state_dict(saved)
    except RuntimeError as error:
        raise ModelError(f"{directory} holds a drafter of another shape: {error}") from None


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """A folder to write into; it takes the place of `directory` only when the block ends well."""
    temporary = directory.with_name(directory.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutriderError(f"cannot write to {directory}: {error}; free some space or choose another --out") from error
