"""`python -m benchmarks.synthetic_heads`: EAGLE-3 and block heads beside an 8B-shaped target with synthetic weights, on a GPU.

The heads' cost is real: one layer of the target's width with 32,000 outputs, or five layers and a block of 16 rows. What they
guess is planted: after every token eight candidates get the chances of PLANTED, and the token that is right stands among them as
often as its chance says. The text means nothing, so exactness is tested elsewhere (tests/gpu).
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from benchmarks.synthetic import SHAPES, Synthetic, SyntheticRun, synthetic_decoder, timed
from outrider.cache import KVPool
from outrider.draft import Drafter
from outrider.draft.dflash import BlockDrafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import TreeShape
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.heads import EAGLE3, BlockConfig, BlockHead, Borrowed, EagleConfig, EagleHead
from outrider.heads.cuda_block import CudaBlockRunner
from outrider.heads.cuda_runners import CudaEagleRunner
from outrider.model import LlamaShape, ModelSpec, Rope
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_runner import CudaRunner
from outrider.ops import Plain
from outrider.ops.cuda.launch import AttentionMetadata

__all__ = ["PLANTED", "SyntheticHeads", "measure_heads"]

PLANTED = (0.69, 0.135, 0.062, 0.036, 0.021, 0.013, 0.009, 0.006)  # a tree of 60 nodes and 7 levels then gives 4.7 tokens a round
_WRONG = (3, 7, 11, 19, 27, 38, 45, 53)  # how far ahead in the text wrong candidates stand
_CYCLE, _CYCLES, _BLOCK, _PAGE = 64, 500, 16, 64
_DRAFTS = ("EAGLE's draft", "EAGLE's trees", "blocks of")  # graphs that draft
_TOP = 1000.0  # a planted logit; others reach 300 where the head borrows the target's output matrix
_TREES = {
    "chain of 3": (TreeShape(), 3),
    "chain of 5": (TreeShape(), 5),
    "tree of 24": (TreeShape(beam=8, branch=8, depth=6), 24),
    "tree of 60": (TreeShape(beam=8, branch=8, depth=7), 60),
}


class _TimedRunner(CudaRunner):
    """Keeps the replays of what it captures, by name."""

    def capture(self, name: str, work: Any) -> Any:
        if not hasattr(self, "replays"):
            self.replays: dict[str, Callable[[], object]] = {}
        self.replays.pop(name, None)  # the last one stands last
        self.replays[name] = replay = super().capture(name, work)
        return replay


class _PlantedEagle(CudaEagleRunner):
    """An EAGLE head whose best candidates after every token are given."""

    columns: Tensor  # (target tokens, candidates) outputs
    values: Tensor  # (candidates,) their logits

    def scores(self, hidden: Tensor, rows: AttentionMetadata) -> Tensor:
        columns = self.columns[rows.tokens.long()]
        return super().scores(hidden, rows).scatter_(1, columns, self.values.expand(len(columns), -1))


class _PlantedBlock(CudaBlockRunner):
    """A block drafter whose best candidates in every slot are given."""

    columns: Tensor  # (target tokens, candidates) outputs
    values: Tensor  # (candidates,) their logits
    walk: Tensor  # (target tokens, slots) the text after each token, from the token on

    def scores(self, rows: Tensor, blocks: Tensor) -> Tensor:
        before = self.walk[blocks[:, 0].long(), : len(rows) // len(blocks)].flatten()
        columns = self.columns[before]
        return super().scores(rows, blocks).scatter_(1, columns, self.values.expand(len(columns), -1))


class SyntheticHeads(Synthetic):
    """A target of the 8B shape, and heads beside it."""

    def __init__(self, layers: int | None = None, pages: int = 256) -> None:
        super().__init__(layers=layers, pages=pages)
        self.cycles = _cycles(self.perm)
        self.ids = self.cycles.flatten().sort().values  # a vocabulary of 32,000 tokens
        self._depth = self.target.decoder.spec.depth

    def _runner(self, shape: str, perm: Tensor, target: CudaRunner | None = None) -> CudaRunner:
        spec = self._shortened(SHAPES[shape])
        return _TimedRunner(synthetic_decoder(spec, perm), self._pages, _PAGE, "cuda", self.options, target)

    def eagle(self, shape: TreeShape) -> Drafter:
        taps = (2, self._depth // 2, self._depth - 3)
        config = EagleConfig(_layers(1), 4096, taps, EAGLE3, draft_vocab=len(self.ids), own_output=True)
        head = _randomised(lambda borrowed: EagleHead(config, borrowed, torch.bfloat16), self.target)
        head.vocab_ids = self.ids
        runner = _PlantedEagle(head, self.target)
        runner.columns, runner.values = self._candidates(True)
        return EagleDrafter(head, _nothing(1), Plain(), shape, runner)

    def block(self, reduced: bool) -> Drafter:
        taps = tuple(round(1 + i * (self._depth - 4) / 4) + 1 for i in range(5))
        vocabulary: dict[str, Any] = {"draft_vocab": len(self.ids), "own_output": True} if reduced else {}
        config = BlockConfig(_layers(5), 4096, taps, _BLOCK, mask=0, **vocabulary)
        head = _randomised(lambda borrowed: BlockHead(config, borrowed, torch.bfloat16), self.target)
        if reduced:
            head.vocab_ids = self.ids.cuda()
        runner = _PlantedBlock(head, self.target)
        runner.columns, runner.values = self._candidates(reduced)
        walk = [torch.arange(len(self.perm))]
        while len(walk) < _BLOCK:
            walk.append(self.perm[walk[-1]])
        runner.walk = torch.stack(walk, 1).cuda()
        return BlockDrafter(head, _nothing(5), Plain(), ranker=runner)

    def _candidates(self, reduced: bool) -> tuple[Tensor, Tensor]:
        """Outputs of the candidates after every token, and their logits."""
        tokens = torch.zeros(len(self.perm), len(PLANTED), dtype=torch.long)
        tokens[self.cycles.flatten()] = _planted(self.cycles).flatten(0, 1)
        columns = torch.searchsorted(self.ids, tokens).clamp_max(len(self.ids) - 1) if reduced else tokens
        return columns.cuda(), (torch.tensor(PLANTED).log() + _TOP).cuda()


def _planted(cycles: Tensor) -> Tensor:
    """Candidates (cycles, 64, 8) after every token of the cycles, best first; the right one stands where chance would put it."""
    generator = torch.Generator().manual_seed(1)
    edges = (torch.tensor(PLANTED).cumsum(0) * _CYCLE).round().long()
    places = torch.bucketize(torch.arange(_CYCLE), edges, right=True)  # of the right token; 8: it is not among them
    places = places[torch.stack([torch.randperm(_CYCLE, generator=generator) for _ in cycles])]
    wrong = torch.stack([cycles.roll(-ahead, 1) for ahead in _WRONG], -1)
    right = cycles.roll(-1, 1)[..., None]
    k = torch.arange(len(PLANTED))
    return torch.where(k == places[..., None], right, wrong)


def _cycles(perm: Tensor) -> Tensor:
    """Some cycles (500, 64) of the text."""
    following, seen, cycles = perm.tolist(), set[int](), []
    for start in range(len(following)):
        if start not in seen and following[start] != start:
            cycle = [start]
            while len(cycle) < _CYCLE:
                cycle.append(following[cycle[-1]])
            seen.update(cycle)
            cycles.append(cycle)
            if len(cycles) == _CYCLES:
                break
    return torch.tensor(cycles)


def _layers(count: int) -> ModelSpec:
    """Layers of the target's width."""
    shape = LlamaShape("LlamaForCausalLM", 128256, 4096, count, 32, 8, 128, 14336, 4096, Rope(500000.0), dtype="bfloat16")
    return shape.spec()


@torch.no_grad()
def _randomised(make: Callable[[Borrowed], Any], target: CudaRunner) -> Any:
    with torch.device("cuda"):
        head = make(Borrowed.of(target.decoder))
    for parameter in head.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
    return head.eval()


def _nothing(layers: int) -> KVPool:
    """A pool that only says what a token takes."""
    return KVPool(layers, 1, 8, _PAGE, 128)


def measure_heads(bench: SyntheticHeads, tokens: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Every head, chain and tree, as far as the time goes: times of a round, tokens, and efficiency."""
    began, prompt = time.perf_counter(), bench.prompt(128, int(bench.cycles[7, 0]))
    plain = _median(bench, bench.engine(), prompt, tokens, 0.0)
    yield {"what": "plain", "tok_s": plain.tok_s, "right": plain.right, "round_ms": plain.seconds / plain.rounds * 1e3}
    for name, make, nodes, temperatures in _cases(bench):
        if time.perf_counter() - began > seconds:
            return
        try:
            engine = bench.engine(make(), nodes)
            for temperature in temperatures:
                fast = _median(bench, engine, prompt, tokens, temperature)
                yield {"what": name, "temperature": temperature} | _row(bench, fast, plain, nodes)
        except Exception:
            yield {"what": name, "error": traceback.format_exc()[-1500:]}


_Case = tuple[str, Callable[[], Drafter], int, tuple[float, ...]]


def _cases(bench: SyntheticHeads) -> list[_Case]:
    """What is measured, the most telling first: name, drafter, nodes and temperatures."""
    eagle = {name: (f"eagle3 {name}", partial(bench.eagle, shape), nodes) for name, (shape, nodes) in _TREES.items()}
    blocks = {
        (reduced, nodes): (
            f"block of 16 rows{', 32k outputs' if reduced else ''}, tree of {nodes}", partial(bench.block, reduced), nodes
        )
        for reduced in (False, True) for nodes in (15, 64)
    }  # fmt: skip
    both, greedy = (0.0, 0.8), (0.0,)
    return [
        (*eagle["tree of 60"], both), (*blocks[False, 15], greedy), (*eagle["chain of 3"], both), (*eagle["tree of 24"], both),
        (*blocks[False, 64], greedy), (*blocks[True, 15], greedy), (*eagle["chain of 5"], both), (*blocks[True, 64], greedy),
    ]  # fmt: skip


def _row(bench: SyntheticHeads, fast: SyntheticRun, plain: SyntheticRun, nodes: int) -> dict[str, Any]:
    wall = fast.seconds / fast.rounds
    assert isinstance(bench.target, _TimedRunner)
    drafts = [replay for name, replay in bench.target.replays.items() if name.startswith(_DRAFTS)]
    drafting = timed(drafts[-1], 10)  # captured last
    verifying = bench.forward_seconds(bucket(1 + nodes, GRAPH_ROWS), 256)
    tokens = fast.tokens / fast.rounds
    return {
        "tok_s": fast.tok_s, "right": fast.right, "speedup": fast.tok_s / plain.tok_s, "tokens_per_round": tokens,
        "conversion": fast.tok_s / plain.tok_s / tokens, "round_ms": wall * 1e3, "rounds_s": 1 / wall,
        "draft_ms": drafting * 1e3, "verify_ms": verifying * 1e3, "efficiency": (drafting + verifying) / wall,
    }  # fmt: skip


def _median(bench: SyntheticHeads, engine: Engine, prompt: list[int], tokens: int, heat: float) -> SyntheticRun:
    """The median of three runs after one that captures graphs."""
    bench.run(engine, [prompt], tokens, heat)
    return sorted((bench.run(engine, [prompt], tokens, heat) for _ in range(3)), key=lambda run: run.seconds)[1]


def main(
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each run.")] = 160,
    seconds: Annotated[float, typer.Option(help="No case begins after so many.")] = 60.0,
) -> None:
    """Rounds of EAGLE-3 and block heads with planted agreement at the 8B shape, one JSON line per case."""
    Device.resolve("cuda")
    for row in measure_heads(SyntheticHeads(), tokens, seconds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
