"""A mixture merges what its members say, weighs it by the record, and learns from all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.mixture import Member, MixtureDrafter, MixtureOptions
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.suffix import SuffixDrafter
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams
from tests.support import make_request


@dataclass
class Fixed:
    """Says the same every time."""

    tokens: list[int]
    survival: list[float]
    parents: list[int] | None = None
    needs: Needs = field(default_factory=Needs)
    further: list[int] = field(default_factory=list)
    asked: int = 0
    seen: list[Scores] = field(default_factory=list)
    planned: list[tuple[int, ...]] = field(default_factory=list)

    def begin(self, seq: Sequence) -> None: ...
    def end(self, seq: Sequence) -> None: ...

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self.seen.append(scores)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self.asked += 1
        self.planned.append(plan.lengths)
        parents = self.parents or list(range(-1, len(self.tokens) - 1))
        trees = [(self.tokens[:n], parents[:n]) for n in plan.lengths]
        return Drafts.trees(trees, survival=[self.survival[:n] for n in plan.lengths])

    def follow(self, seq: Sequence, path: list[int], nodes: int) -> Tree:
        n = min(nodes, len(self.further))
        return Tree(self.further[:n], list(range(-1, n - 1)), [0.9 ** (i + 1) for i in range(n)])


def sequence() -> Sequence:
    return Sequence(make_request([1, 2, 3], SamplingParams(temperature=0.0)))


def mixed(members: list[Any], **options: Any) -> tuple[MixtureDrafter, Sequence]:
    drafter = MixtureDrafter(
        [member if isinstance(member, Member) else Member(member) for member in members], MixtureOptions(**options)
    )
    seq = sequence()
    drafter.begin(seq)
    return drafter, seq


def drafted(drafter: MixtureDrafter, seq: Sequence, nodes: int, rule: str = "match") -> Drafts:
    return drafter.propose(Batch([seq], [1]), Plan((nodes,), rule))


def told(drafter: MixtureDrafter, seq: Sequence, text: list[int], rounds: int = 1, nodes: int = 1) -> None:
    """Rounds after each of which the text went on like this, whatever was drafted."""
    for _ in range(rounds):
        drafts = drafted(drafter, seq, nodes)
        seq.tokens += text
        drafter.commit(Batch([seq], [1]), drafts, [Verdict([], text)], Scores(torch.empty(0), [0]))


def test_common_paths_are_drafted_once() -> None:
    drafter, seq = mixed([Fixed([5, 6, 7], [0.9, 0.8, 0.7]), Fixed([5, 6, 8], [0.9, 0.5, 0.4])])
    tree = drafted(drafter, seq, 10).per_sequence[0]
    assert tree[:2] == ([5, 6, 7, 8], [-1, 0, 1, 1])


def test_the_budget_goes_to_the_likeliest_nodes() -> None:
    drafter, seq = mixed([Fixed([5, 6, 7], [0.9, 0.8, 0.7]), Fixed([8, 9, 4], [0.6, 0.3, 0.1])])
    assert drafted(drafter, seq, 4).per_sequence[0][:2] == ([5, 6, 7, 8], [-1, 0, 1, -1])
    survival = drafted(drafter, seq, 6).survival[0]
    assert survival == sorted(survival, reverse=True)


def test_claims_are_weighed_by_the_record() -> None:
    """Equal claims, and one of the two is always wrong: soon only the other is drafted."""
    drafter, seq = mixed([Fixed([5], [0.6]), Fixed([6], [0.6])])
    assert drafted(drafter, seq, 1).per_sequence[0].tokens == [5]
    told(drafter, seq, [6], rounds=4)
    assert drafted(drafter, seq, 1).per_sequence[0].tokens == [6]


def test_a_member_that_never_played_is_judged_too() -> None:
    """There is room for one node and the bold one gets it; that the modest one was right is still seen."""
    bold, modest = Fixed([5], [0.95]), Fixed([6], [0.05])
    drafter, seq = mixed([bold, modest])
    for _ in range(40):
        played = drafted(drafter, seq, 1).per_sequence[0].tokens
        if played == [6]:
            break
        told(drafter, seq, [6])
    assert played == [6]


def test_only_what_the_text_reached_is_judged() -> None:
    """One token came: the second node of a chain is neither right nor wrong yet."""
    drafter, seq = mixed([Fixed([5, 6], [0.9, 0.45])])
    before = drafted(drafter, seq, 2).survival[0]
    told(drafter, seq, [5], rounds=30, nodes=2)
    after = drafted(drafter, seq, 2).survival[0]
    assert after[0] > before[0]
    assert after[1] / after[0] == pytest.approx(0.5)
    told(drafter, seq, [5, 9], rounds=30, nodes=2)
    last = drafted(drafter, seq, 2).survival[0]
    assert last[1] / last[0] < 0.1


def test_lookups_go_on_where_a_branch_ends() -> None:
    tail = Fixed([], [], needs=Needs(follows=True), further=[11, 12, 13])
    drafter, seq = mixed([tail, Fixed([5, 6], [0.9, 0.8])])
    assert drafted(drafter, seq, 8).per_sequence[0][:2] == ([5, 6, 11, 12, 13, 11, 12, 13], list(range(-1, 7)))
    drafter, seq = mixed([tail, Fixed([5, 6], [0.9, 0.8])], splice=False)
    assert drafted(drafter, seq, 10).per_sequence[0].tokens == [5, 6]


@pytest.mark.parametrize("lookup", [NGramDrafter(NGramOptions(2, 3)), SuffixDrafter()])
def test_real_lookups_follow_a_path(lookup: Any) -> None:
    """After a guessed token the text goes on as it did before, and the lookup's own text is as it was."""
    seq = Sequence(make_request([9, 1, 2, 3, 4, 5, 9], SamplingParams()))
    lookup.begin(seq)
    assert lookup.follow(seq, [1, 2], 3).tokens[:3] == [3, 4, 5]
    assert lookup.follow(seq, [7, 7], 3).tokens == []
    assert lookup.follow(seq, [1, 2], 3).tokens[:3] == [3, 4, 5]


def test_the_best_expected_draft_wins() -> None:
    members = [Fixed([5], [0.9]), Fixed([6, 7, 8], [0.7, 0.6, 0.5])]
    drafter, seq = mixed(members, merge=False)
    assert drafted(drafter, seq, 10).per_sequence[0].tokens == [6, 7, 8]
    told(drafter, seq, [5], rounds=30, nodes=10)
    assert drafted(drafter, seq, 10).per_sequence[0].tokens == [5]


def test_members_that_are_not_needed_are_not_asked() -> None:
    first, second = Fixed([5, 6, 7], [0.99, 0.98, 0.97]), Fixed([8], [0.9])
    drafter, seq = mixed([first, second], enough=2.0)
    assert drafted(drafter, seq, 10).per_sequence[0].tokens == [5, 6, 7]
    assert second.asked == 0
    told(drafter, seq, [1], rounds=20, nodes=10)
    assert second.asked > 0


def test_members_have_limits_of_their_own() -> None:
    first, second = Fixed([5, 6, 7], [0.9, 0.8, 0.7]), Fixed([8, 9], [0.5, 0.4])
    drafter, seq = mixed([Member(first, 2), Member(second)])
    assert drafted(drafter, seq, 10).per_sequence[0].tokens == [5, 6, 8, 9]
    assert first.planned == [(2,)]


def test_each_member_gets_the_taps_it_asked_for() -> None:
    deep, shallow, none = (Fixed([5], [0.5], needs=Needs(taps=taps)) for taps in ((7, 2), (4,), ()))
    drafter, seq = mixed([deep, shallow, none])
    assert drafter.needs.taps == (2, 4, 7)
    drafts = drafted(drafter, seq, 3)
    taps = torch.arange(2 * 3 * 2.0).reshape(2, 6)  # two rows, three layers, two wide
    seq.tokens += [5, 5]
    drafter.commit(Batch([seq], [1]), drafts, [Verdict([0], [5, 5])], Scores(torch.empty(0), [0], [0], taps))
    assert deep.seen[0].taps is not None
    assert deep.seen[0].taps.tolist() == [[4, 5, 0, 1], [10, 11, 6, 7]]
    assert shallow.seen[0].taps is not None
    assert shallow.seen[0].taps.tolist() == [[2, 3], [8, 9]]
    assert none.seen[0].taps is None


def test_under_other_rules_the_first_member_drafts_alone() -> None:
    second = Fixed([8], [0.9])
    drafter, seq = mixed([Fixed([5, 6], [0.5, 0.4]), second])
    assert drafted(drafter, seq, 5, "rejection").per_sequence[0][:2] == ([5, 6], [-1, 0])
    assert second.asked == 0


def test_a_mixture_has_members() -> None:
    with pytest.raises(InvalidParameter, match="members"):
        MixtureDrafter([])


def test_survival_is_a_chance() -> None:
    drafter, seq = mixed([Fixed([5, 6], [1.0, 1.0]), Fixed([7], [0.0])])
    survival = drafted(drafter, seq, 5).survival[0]
    assert all(0 < value < 1 and math.isfinite(value) for value in survival)
