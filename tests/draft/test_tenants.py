"""Nothing of one tenant's text is ever drafted for another, whatever a drafter shares."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core import Batch, Plan, Scores, Sequence, Verdict
from outrider.draft import Drafter
from outrider.draft.lookahead import LookaheadDrafter
from outrider.draft.mixture import Member, MixtureDrafter
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.recycle import RecycleDrafter, RecycleOptions
from outrider.draft.shared_texts import Kept
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from tests.support import make_request, write_family

COMMON = 5  # tokens everyone uses, so that contexts match across tenants
EACH = 20
WORDS = {tenant: range(COMMON + i * EACH, COMMON + (i + 1) * EACH) for i, tenant in enumerate(("a", "b", None))}
SHARING: dict[str, Callable[[], Drafter]] = {
    "suffix": lambda: SuffixDrafter(SuffixOptions(min_prob=0.0, branch=3, shared_tokens=400)),
    "recycle": lambda: RecycleDrafter(RecycleOptions(shared=1)),
    "mixture": lambda: MixtureDrafter(
        [
            Member(SuffixDrafter(SuffixOptions(shared_tokens=400))),
            Member(RecycleDrafter(RecycleOptions(shared=1))),
            Member(NGramDrafter(NGramOptions(1, 2))),
        ]
    ),
    "lookahead": LookaheadDrafter,
}


def text(rng: random.Random, tenant: str | None, size: int) -> list[int]:
    return [rng.choice([rng.randrange(COMMON), rng.choice(WORDS[tenant])]) for _ in range(size)]


def lived(drafter: Drafter, tenant: str | None, rng: random.Random) -> set[int]:
    """A sequence from its begin to its end; all tokens that were drafted for it."""
    seq = Sequence(make_request(text(rng, tenant, 12), SamplingParams(temperature=0.0), tenant=tenant))
    drafter.begin(seq)
    drafted: set[int] = set()
    for _ in range(12):
        batch = Batch([seq], [1])
        drafts = drafter.propose(batch, Plan((12,)))
        tree = drafts.per_sequence[0]
        drafted |= set(tree.tokens)
        new = text(rng, tenant, 1)
        logits = torch.full((1 + len(tree.tokens), COMMON + 3 * EACH), -9.0)
        words = [*range(COMMON), *WORDS[tenant]]  # the model's own candidates, in this tenant's words too
        logits[:, words] = torch.rand(len(logits), len(words), generator=torch.Generator().manual_seed(rng.randrange(999)))
        choices = [new[0], *(rng.choice(words) for _ in tree.tokens)]
        seq.tokens += new
        drafter.commit(batch, drafts, [Verdict([], new, choices)], Scores(logits, [0]))
    seq.finish_reason = "stop"
    drafter.end(seq)
    return drafted


@pytest.mark.parametrize("name", SHARING)
def test_no_tenants_words_are_drafted_for_another(name: str) -> None:
    rng = random.Random(name)
    drafter = SHARING[name]()
    drafted_own_words = 0
    for turn in range(18):
        tenant = ("a", "b", None)[turn % 3]
        drafted = lived(drafter, tenant, rng)
        assert drafted <= {*range(COMMON), *WORDS[tenant]}
        drafted_own_words += len(drafted & set(WORDS[tenant]))
    assert drafted_own_words > 0


def test_sharing_is_what_the_settings_and_the_key_allow(tmp_path: Path) -> None:
    """Through the front door: outputs are kept for their tenant, up to the limit; without a key for the process, if at all."""
    write_family(tmp_path, "llama2", max_position_embeddings=128)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for settings, tenant, share, kept in (
        ("suffix:adaptive=false", "a", True, 0),
        ("suffix:shared_tokens=30:adaptive=false", None, False, 0),
        ("suffix:shared_tokens=30:adaptive=false", "a", True, 15),
        ("suffix:shared_tokens=30:adaptive=false", "a", False, 15),
        ("suffix:shared_tokens=30:adaptive=false", None, True, 15),
    ):
        llm = LLM(tmp_path, load_format="dummy", speculation=settings, share=share)
        for _ in range(3):
            llm.generate([[1, 2, 3], [4, 5]], params, tenant=tenant)
            next(iter(llm.stream([1, 2], params, tenant=tenant)))
        shared = llm.engine.drafter.drafter._shared  # type: ignore[attr-defined]
        assert shared.size <= 30
        assert shared.size >= kept
        assert len(shared._by_tenant) == bool(kept)
        assert llm.kept(tenant).tokens == shared.size
        assert llm.kept("b" if tenant is None else None) == Kept()
