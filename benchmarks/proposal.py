"""`python -m benchmarks.proposal`: what a lookup drafter costs per round as the context grows."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import outrider
from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.core import Batch, Drafts, Needs, Plan, Request, Scores, Verdict
from outrider.core import Sequence as Generation
from outrider.draft import Drafter
from outrider.draft.lookahead import LookaheadDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.recycle import RecycleDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.model.bundled import bundled_model
from outrider.options import Threads, numbers, set_threads
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer
from outrider.verify.match import walk

__all__ = ["LOOKUPS", "measure_proposals"]

LOOKUPS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
    "lookahead": LookaheadDrafter,
}
_VOCAB = 8192


class TimedDrafter:
    """Another drafter, and the seconds of each proposal and of each commit after one."""

    def __init__(self, drafter: Drafter) -> None:
        self.proposals: list[float] = []
        self.commits: list[float] = []
        self._drafter = drafter

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    def begin(self, seq: Generation) -> None:
        self._drafter.begin(seq)

    def end(self, seq: Generation) -> None:
        self._drafter.end(seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        start = time.perf_counter()
        drafts = self._drafter.propose(batch, plan)
        assert isinstance(drafts, Drafts)
        self.proposals.append(time.perf_counter() - start)
        return drafts

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        start = time.perf_counter()
        self._drafter.commit(batch, drafts, verdicts, scores)
        self.commits.append(time.perf_counter() - start)


def measure_proposals(contexts: Sequence[int], rounds: int = 200, nodes: int = 24) -> Iterator[dict[str, Any]]:
    """Medians over the rounds that drafted something, reading on in a text after a context of each length.

    The text is this package's source, and what is read on is the same after every context. No model runs: a
    target that wrote the text accepts drafts that agree with it, and chooses arbitrary tokens elsewhere.
    """
    text = _source_tokens(max(contexts) + rounds * (nodes + 1))
    for name, make in LOOKUPS.items():
        for context in contexts:
            drafter = TimedDrafter(make())
            drafted = _read_on(drafter, text[max(contexts) - context :], context, rounds, nodes)
            kept = [i for i in range(1, rounds) if drafted[i]]  # the first proposal reads the context
            yield {
                "method": name,
                "context": context,
                "drafting_rounds": len(kept),
                "propose_us": statistics.median(drafter.proposals[i] for i in kept) * 1e6,
                "commit_us": statistics.median(drafter.commits[i] for i in kept) * 1e6,
                "first_proposal_us": drafter.proposals[0] * 1e6,
            }


def _source_tokens(count: int) -> list[int]:
    tokenizer = Tokenizer.load(bundled_model())
    assert tokenizer is not None
    files = sorted(Path(outrider.__file__).parent.rglob("*.py"))
    once = [token for path in files for token in tokenizer.encode_bare(path.read_text(encoding="utf-8"))]
    return (once * (count // len(once) + 1))[:count]


def _read_on(drafter: TimedDrafter, text: Sequence[int], context: int, rounds: int, nodes: int) -> list[bool]:
    """Whether each round drafted something."""
    params = SamplingParams(temperature=0.0)
    seq = Generation(Request("bench", tuple(text[:context]), params, 0, frozenset(), len(text)))
    batch, plan = Batch([seq], [1]), Plan((nodes,))
    logits = torch.randn(nodes + 1, _VOCAB, generator=torch.Generator().manual_seed(0))
    drafted: list[bool] = []
    drafter.begin(seq)
    for _ in range(rounds):
        drafts = drafter.propose(batch, plan)
        drafted.append(bool(drafts.per_sequence[0].tokens))
        verdict = _verdict(drafts, text[len(seq.tokens) :][: nodes + 1])
        seq.tokens += verdict.tokens
        drafter.commit(batch, drafts, [verdict], Scores(logits[: 1 + len(drafts.per_sequence[0].tokens)], [0]))
    drafter.end(seq)
    return drafted


def _verdict(drafts: Drafts, truth: Sequence[int]) -> Verdict:
    """The verdict of a target that writes this text: it chooses the text's next token, and arbitrary ones on other paths."""
    tree = drafts.per_sequence[0]
    reached = {-1: 0}
    choices = [truth[0]]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        depth = reached.get(parent, len(truth))
        if depth + 1 < len(truth) and token == truth[depth]:
            reached[node] = depth + 1
        choices.append(truth[reached[node]] if node in reached else (token * 31 + 7) % _VOCAB)
    path = walk(tree.parents, tree.tokens, choices)
    return Verdict(path, [choices[0], *(choices[1 + node] for node in path)], choices)


def main(
    contexts: Annotated[str, typer.Option(help="Comma-separated context lengths.")] = "1024,2048,4096,8192,16384",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time at each.")] = 200,
    threads: Threads = None,
) -> None:
    """What a round of each lookup drafter costs as the context grows; needs no model's forward."""
    set_threads(threads)
    rows = list(measure_proposals(numbers("--contexts", contexts, int), rounds))
    print(json.dumps(environment() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    run(main)
