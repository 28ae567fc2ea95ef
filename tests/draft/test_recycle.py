"""Token recycling: the table against what was scored, the tree against its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Verdict
from outrider.draft.recycle import CHANCES, RecycleDrafter, RecycleOptions, SuccessorTable, read_tree
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_request, random_decoder, run, write_family


def started(drafter: RecycleDrafter, tokens: list[int], tenant: str | None = "all") -> Sequence:
    seq = Sequence(make_request(tokens, SamplingParams(), tenant=tenant))
    drafter.begin(seq)
    return seq


def rows(*best: list[int]) -> torch.Tensor:
    """Logits whose largest entries are the given tokens, in this order."""
    logits = torch.zeros(len(best), 50)
    for row, tokens in zip(logits, best, strict=True):
        for rank, token in enumerate(tokens):
            row[token] = 10.0 - rank
    return logits


def drafted(drafter: RecycleDrafter, seq: Sequence, length: int, rule: str = "match") -> tuple[list[int], list[int]]:
    tree = drafter.propose(Batch([seq], [1]), Plan((length,), rule)).per_sequence[0]
    return tree.tokens, tree.parents


def test_every_row_lands_under_the_token_it_followed() -> None:
    """Roots, accepted and rejected nodes, beside a prompt still being read and a sequence that ended."""
    drafter = RecycleDrafter(RecycleOptions(top=2))
    reading, going, ended = started(drafter, [1]), started(drafter, [20, 21]), started(drafter, [30])
    drafts = Drafts.trees([([], []), ([5, 6, 7], [-1, 0, -1]), ([8, 9], [-1, 0])])
    logits = rows([5, 40], [41, 42], [43, 44], [45, 46], [8, 47], [9, 48], [49, 11])
    going.tokens += [5, 41]
    ended.tokens += [8]  # it stopped there: the 9 after it was accepted and thrown away
    ended.finish_reason = "stop"
    verdicts = [Verdict([], []), Verdict([0], [5, 41]), Verdict([0, 1], [8, 9, 49])]
    tables = [drafter._states[seq] for seq in (reading, going, ended)]
    drafter.commit(Batch([reading, going, ended], [1, 1, 1]), drafts, verdicts, Scores(logits, [-1, 0, 4]))
    assert [len(table) for table in tables] == [0, 5, 2]
    assert tables[1].after(20) == [21]
    assert [list(tables[1].after(token)) for token in (21, 5, 6, 7)] == [[5, 40], [41, 42], [43, 44], [45, 46]]
    assert [list(tables[2].after(token)) for token in (30, 8, 9)] == [[], [9, 48], [49, 11]]


def test_what_was_chosen_comes_first_whatever_the_logits_say() -> None:
    """Penalties and bias move the choice, not the logits; a spoilt row's choice is no token."""
    drafter = RecycleDrafter(RecycleOptions(top=3))
    seq = started(drafter, [1])
    seq.tokens += [5, 12]
    drafts = Drafts.trees([([5, 6], [-1, 0])])
    logits = rows([9, 5, 8], [10, 11, 13], [14, 15, 16])
    drafter.commit(Batch([seq], [1]), drafts, [Verdict([0], [5, 12])], Scores(logits, [0]))
    table = drafter._states[seq]
    assert [list(table.after(token)) for token in (1, 5, 6)] == [[5, 9, 8], [12, 10, 11], [14, 15, 16]]
    seq.finish_reason = "stop"
    drafter.commit(Batch([seq], [1]), drafts, [Verdict([0], [5, -1])], Scores(logits, [0]))
    assert list(table.after(5)) == [10, 11, 13]


def test_the_table_s_first_successor_is_what_the_target_chose(tmp_path: Path) -> None:
    """Through the engine, greedy, nothing drafted: the last row under a token is the choice after it."""
    drafter = RecycleDrafter()
    engine = make_engine(random_decoder(write_family(tmp_path, "llama2")), drafter, 0)
    writers = [engine.submit(make_request(p, SamplingParams(temperature=0.0, max_tokens=30)), "t") for p in ([3], [4, 5, 6])]
    engine.round()
    tables = [drafter._states[writer.seq] for writer in writers]
    while engine.has_work:
        engine.round()
    for writer, table in zip(writers, tables, strict=True):
        tokens, seen = writer.seq.tokens, set[int]()
        for i in range(len(tokens) - 3, writer.seq.prompt_len - 2, -1):  # the last round's root is not noted
            if tokens[i] not in seen:
                seen.add(tokens[i])
                assert table.after(tokens[i])[0] == tokens[i + 1]
                assert len(table.after(tokens[i])) == 8
        assert seen


def test_prompts_fill_what_the_target_was_not_asked_about() -> None:
    table = SuccessorTable(100)
    table.note([1], [[7, 8]])
    table.read([1, 2, 3, 2, 4, 2, 3, 2, 5], 2)
    assert table.after(1) == [7, 8]
    assert table.after(2) == [5, 3]  # the latest first, each once, no more than asked
    assert table.after(4) == [2]
    assert table.after(5) == ()


def test_the_stalest_row_goes_when_the_table_is_full() -> None:
    table = SuccessorTable(3)
    table.note([1, 2, 1, None, 3, 4], [[10], [20], [11], [50], [30], [40]])
    assert [list(table.after(token)) for token in (1, 2, 3, 4)] == [[11], [], [30], [40]]
    table.read(list(range(50, 60)), 8)
    assert len(table) == 3
    assert table.after(58) == [59]


@given(
    table=st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=4, unique=True)),
    width=st.integers(1, 4),
    nodes=st.integers(0, 12),
)
def test_trees_are_the_likeliest_paths(table: dict[int, list[int]], width: int, nodes: int) -> None:
    successors = SuccessorTable(9)
    successors.note(list(table), list(table.values()))
    tree = read_tree(successors, 0, width, nodes)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    every: dict[tuple[int, ...], float] = {(): 1.0}
    level = [()]
    for _ in range(nodes if width == 1 else min(nodes, 5)):  # a level of best nodes is never worth less than CHANCES[0]**5
        level = [
            (*path, token)
            for path in level
            for rank, token in enumerate(table.get(path[-1] if path else 0, [])[:width])
            if every.setdefault((*path, token), every[path] * CHANCES[rank]) > 0
        ]
    assert len(set(paths)) == len(paths)
    shallow = [(path, survival) for path, survival in zip(paths, tree.survival, strict=True) if path in every]
    assert all(survival == pytest.approx(every[path]) for path, survival in shallow)
    del every[()]
    left_out = [worth for path, worth in every.items() if path not in set(paths)]
    assert len(paths) == nodes or not left_out
    assert not left_out or not tree.survival or max(left_out) <= min(tree.survival) + 1e-12


def test_other_rules_get_chains() -> None:
    drafter = RecycleDrafter()
    seq = started(drafter, [1, 2, 1, 3, 1])
    assert drafted(drafter, seq, 4)[1].count(-1) == 2
    assert drafted(drafter, seq, 4, "block") == ([3, 1, 3, 1], [-1, 0, 1, 2])


def test_sequences_keep_to_themselves_unless_shared() -> None:
    for shared in (0, 1):
        drafter = RecycleDrafter(RecycleOptions(shared=shared))
        started(drafter, [1, 2, 3])
        assert drafted(drafter, started(drafter, [9, 1]), 2)[0] == ([2, 3] if shared else [])


def test_a_shared_table_is_of_one_tenant_alone() -> None:
    drafter = RecycleDrafter(RecycleOptions(shared=1))
    started(drafter, [1, 2, 3], "a")
    assert drafted(drafter, started(drafter, [9, 1], "a"), 2)[0] == [2, 3]
    assert drafted(drafter, started(drafter, [9, 1], "b"), 2)[0] == []
    assert drafted(drafter, started(drafter, [9, 1], None), 2)[0] == []


def test_tables_of_many_tenants_are_bounded() -> None:
    drafter = RecycleDrafter(RecycleOptions(shared=1, tenants=3))
    for tenant in "abcadb":
        drafter.end(started(drafter, [1, 2, 3], tenant))
    assert list(drafter._common) == ["a", "d", "b"]


def test_a_shared_table_stays_bounded_and_warm() -> None:
    drafter = RecycleDrafter(RecycleOptions(table_tokens=5, shared=True))
    for i in range(20):
        seq = started(drafter, [i, i + 1, i + 2])
        drafter.end(seq)
    assert not drafter._states
    assert [len(table) for table in drafter._common.values()] == [5]


def test_a_sequence_with_spoilt_logits_teaches_nothing() -> None:
    drafter = RecycleDrafter(RecycleOptions(shared=True))
    seq = started(drafter, [1])
    seq.finish_reason = "error"
    nan = torch.full((2, 50), float("nan"))
    drafter.commit(Batch([seq], [1]), Drafts.chains([[5]]), [Verdict([], [-1])], Scores(nan, [0]))
    assert [len(table) for table in drafter._common.values()] == [0]


def test_guesses_are_accepted(tmp_path: Path) -> None:
    """A model whose greedy text loops: once round the loop, the table knows the way."""
    decoder = random_decoder(write_family(tmp_path, "llama2"))
    request = make_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200, logit_bias={7: 30.0}))
    stats = run(make_engine(decoder, RecycleDrafter(), 12), [request])[0].seq.stats
    assert stats.tokens_per_round > 2
