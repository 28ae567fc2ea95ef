"""The command `medusa-tree` of `python -m recipes.pyrite`: it chooses the static tree of Medusa heads.

The target continues prompts, and every head ranks the tokens that the target wrote. The tree holds the paths of ranks that
were right most often; chosen greedily, it is the best tree of every size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.train.frozen import FrozenTarget
    from outrider.train.generate import Written
    from outrider.train.networks import TrainableMedusa
    from outrider.train.tree import Ranks

__all__ = ["TreeOptions", "measure_ranks", "medusa_tree"]

_BATCH = 16  # texts written side by side, of like length
_SIZES = (4, 8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The text that the target writes to measure on."""

    max_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 0


def medusa_tree(
    prompts: Annotated[Path, typer.Argument(help="A JSONL file of prompts, as `bench acceptance` reads it.")],
    heads: Annotated[Path | None, typer.Option(help="Folder of Medusa heads; default: `medusa` in the target.")] = None,
    target: Annotated[Path | None, typer.Option(help="Model directory; default: the bundled model.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the tree.")] = 64,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens written after each prompt.")] = 200,
    temperatures: Annotated[str, typer.Option(help="Temperatures to write at, comma-separated.")] = "0,0.8",
    seed: int = 0,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Put the tree into the heads' config.json.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Choose the static tree of Medusa heads by how often each rank was right on text the target writes."""
    from outrider.engine.acceptance import read_prompts
    from outrider.heads import load_medusa
    from outrider.model.bundled import bundled_model
    from outrider.train.corpus import load_tokenizer
    from outrider.train.frozen import FrozenTarget
    from outrider.train.networks import TrainableMedusa
    from outrider.train.sizing import pick_device
    from outrider.train.tree import static_tree

    if nodes < 1:
        raise InvalidParameter("nodes", f"must be at least 1, got {nodes}")
    model = target or bundled_model()
    directory = heads or model / "medusa"
    options = TreeOptions(max_tokens, _temperatures(temperatures), seed)
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in read_prompts(prompts, limit)]
    frozen = FrozenTarget.load(model, pick_device(device))
    network = TrainableMedusa(load_medusa(directory, frozen.decoder).to(frozen.decoder.norm.device))
    ranks = measure_ranks(network, frozen, texts, options)
    choices = static_tree(ranks, nodes)
    _report(ranks, choices)
    if write:
        _write(directory / "config.json", choices)
        print(f"wrote {len(choices)} nodes to {directory / 'config.json'}")


def measure_ranks(network: TrainableMedusa, target: FrozenTarget, prompts: Sequence[list[int]], options: TreeOptions) -> Ranks:
    """(places, heads): each head's rank of the token the target wrote, on texts that neither loop nor end early."""
    import numpy as np

    from outrider.train.tree import steady_ranks

    target = target.reading(network.taps)
    parts = []
    for temperature in options.temperatures:
        for written in _texts(target, prompts, temperature, options):
            ranks = steady_ranks(network, target, written, temperature)
            parts.append(ranks.reshape(-1, ranks.shape[-1]))
    return np.concatenate(parts)


def _texts(target: FrozenTarget, prompts: Sequence[list[int]], temperature: float, options: TreeOptions) -> Iterator[Written]:
    """The prompts and what the target writes after them, those of like length together."""
    import torch

    from outrider.train.generate import write_text

    longest = target.config.context - options.max_tokens
    if longest < 1:
        raise InvalidParameter(
            "max_tokens", f"{options.max_tokens} leaves no room for a prompt in {target.config.context} tokens"
        )
    ordered = sorted((prompt[-longest:] for prompt in prompts if prompt), key=len)
    for begin in range(0, len(ordered), _BATCH):
        batch = ordered[begin : begin + _BATCH]
        lengths = torch.tensor([len(prompt) for prompt in batch])
        rows = torch.tensor([prompt + [0] * (len(batch[-1]) - len(prompt)) for prompt in batch])
        temperatures = torch.full((len(batch),), temperature)
        seed, keep_noise = options.seed + begin, temperature > 0
        yield write_text(target.decoder, rows, options.max_tokens, temperatures, seed, keep_noise, lengths)


def _report(ranks: Ranks, choices: tuple[tuple[int, ...], ...]) -> None:
    from outrider.train.tree import expected

    print(f"{len(ranks)} places; how often the right token is among a head's first 1, 2, 3, 5, 10:")
    for head in range(ranks.shape[1]):
        shares = [float((ranks[:, head] < first).mean()) for first in (1, 2, 3, 5, 10)]
        print(f"  head {head + 1}: " + "  ".join(f"{share:.3f}" for share in shares))
    print("tokens per round expected of the best tree, by nodes:")
    sizes = [size for size in _SIZES if size < len(choices)] + [len(choices)]
    print("  " + "  ".join(f"{size}: {expected(ranks, choices[:size]):.3f}" for size in sizes))


def _write(path: Path, choices: tuple[tuple[int, ...], ...]) -> None:
    from outrider.train.checkpoint import guarded_write

    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["medusa_choices"] = [list(choice) for choice in choices]
    with guarded_write(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        parsed = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidParameter("temperatures", f"{text!r} is not a list of numbers like 0,0.8") from None
    if any(temperature < 0 for temperature in parsed):
        raise InvalidParameter("temperatures", f"must not be below 0, got {text}")
    return parsed
