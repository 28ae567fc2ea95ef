"""Earlier texts: what is kept for whom, how much of it, what is dropped, and who has drafted from it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.core import Batch, Plan, Sequence
from outrider.draft.lookahead import LookaheadDrafter, LookaheadOptions
from outrider.draft.lookup import LookupDrafter
from outrider.draft.mixture import Member, MixtureDrafter
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.shared_texts import Kept, SharedTexts
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from tests.support import make_request, renamed

TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
MEMORY = SuffixOptions(shared_tokens=1000, shared_prompts=True, edits=True)


def sharing() -> dict[str, LookupDrafter]:
    return {
        "suffix": SuffixDrafter(MEMORY),
        "ngram": NGramDrafter(NGramOptions(shared_tokens=1000)),
        "lookahead": LookaheadDrafter(LookaheadOptions(shared_tokens=1000, window=0)),
    }


def lived(drafter: LookupDrafter, owner: str | None, prompt: list[int], output: list[int], reason: str | None = "stop") -> None:
    seq = Sequence(make_request(prompt, SamplingParams(temperature=0.0), tenant=owner))
    drafter.begin(seq)
    seq.tokens += output
    seq.finish_reason = reason
    drafter.end(seq)


def guess(drafter: LookupDrafter, owner: str | None, text: list[int], rule: str = "match") -> list[int]:
    seq = Sequence(make_request(text, SamplingParams(temperature=0.0), tenant=owner))
    drafter.begin(seq)
    return drafter.propose(Batch([seq], [1]), Plan((4,), rule)).per_sequence[0].tokens


@pytest.mark.parametrize("name", ["suffix", "ngram", "lookahead"])
def test_every_lookup_drafts_from_the_earlier_texts_of_its_owner_alone(name: str) -> None:
    drafter = sharing()[name]
    lived(drafter, "a", [1], TEXT)
    lived(drafter, None, [2], [11, 12, 21, 22, 23])
    assert guess(drafter, "a", [3, 11, 12]) == [13, 14, 15, 16]
    assert guess(drafter, "b", [3, 11, 12]) == guess(drafter, None, [3, 11, 12]) == []
    assert drafter._shared.sources() == {("a", "a")}
    assert drafter.kept("a").texts == 1
    assert drafter.forget("a") == Kept(1, 9 + (name == "suffix"))
    assert guess(drafter, "a", [3, 11, 12]) == []
    assert drafter.kept("a") == drafter.forget("a") == Kept()


def test_the_record_of_sources_shows_a_text_that_drafts_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = SuffixDrafter(MEMORY)
    lived(drafter, "a", [1], TEXT)
    monkeypatch.setattr(drafter._shared, "of", lambda owner: iter([drafter._shared._by_tenant["a"][0].indexed()]))
    assert guess(drafter, "b", [3, 11, 12, 13, 14, 15]) == [16, 17, 18]
    assert drafter.sources() == {("a", "b")}


@pytest.mark.parametrize("seed", range(3))
def test_no_text_ever_drafts_for_another_owner(seed: int) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter(SuffixOptions(min_prob=0.0, shared_tokens=120, shared_prompts=True, tenants=2, edits=True))
    words = {"a": range(10, 20), "b": range(20, 30), "c": range(30, 40), None: range(40, 50)}
    for _ in range(80):
        owner = rng.choice(list(words))
        text = [rng.choice([rng.randrange(5), rng.choice(words[owner])]) for _ in range(10)]
        seq = Sequence(make_request(text[:4], SamplingParams(temperature=0.0), tenant=owner))
        drafter.begin(seq)
        for token in text[4:]:
            drafted = drafter.propose(Batch([seq], [1]), Plan((6,))).per_sequence[0].tokens
            assert {*drafted} <= {*range(5), *words[owner]}
            seq.tokens.append(token)
        seq.finish_reason = "stop"
        drafter.end(seq)
        assert all(source == reader for source, reader in drafter.sources())
        assert drafter._shared.size <= 120
        assert len(drafter._shared._by_tenant) <= 2
    assert drafter.sources()


def test_only_what_is_new_in_a_prompt_is_kept() -> None:
    drafter = SuffixDrafter(MEMORY)
    conversation = list(range(100, 140))
    lived(drafter, "a", conversation[:10], conversation[10:20])
    lived(drafter, "a", conversation[:30], conversation[30:])
    assert drafter.kept("a") == Kept(2, 40 + 2)  # a number stands before each
    assert guess(drafter, "a", [1, 105, 106]) == [107, 108, 109, 110]  # of a prompt
    assert guess(drafter, "a", [1, 125, 126]) == [127, 128, 129, 130]


def test_the_file_that_a_cut_history_no_longer_holds_is_copied_with_edits() -> None:
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=1000, shared_prompts=True, edits=True))
    lived(drafter, "a", [*range(100, 160)], [1])
    seq = Sequence(make_request([2, 3], SamplingParams(temperature=0.0), tenant="a"))
    drafter.begin(seq)
    for token in [*range(100, 120), 7]:
        seq.tokens.append(token)
        tokens = drafter.propose(Batch([seq], [1]), Plan((4,))).per_sequence[0].tokens
    assert tokens == [121, 122, 123, 124]
    (text,) = drafter._shared.of("a")
    text.readers.clear()
    assert drafter.propose(Batch([seq], [1]), Plan((4,))).per_sequence[0].tokens == tokens
    assert drafter.sources() == {("a", "a")}  # the copy is noted, too


def test_a_preempted_text_and_one_that_is_not_to_be_remembered_are_not_kept() -> None:
    drafter = SuffixDrafter(MEMORY)
    lived(drafter, "a", [1], TEXT, reason=None)
    assert drafter.kept("a") == Kept()
    request = renamed(make_request([1], SamplingParams(temperature=0.0), tenant="a"), memory="")
    seq = Sequence(request)
    drafter.begin(seq)
    seq.finish_reason = "stop"
    drafter.end(seq)
    assert drafter.kept("a") == Kept()


def test_rules_by_which_the_text_depends_on_drafts_look_at_no_other_text() -> None:
    for drafter in sharing().values():
        lived(drafter, "a", [1], TEXT)
        assert guess(drafter, "a", [3, 11, 12], rule="rejection") == []


def test_a_long_text_is_indexed_over_several_rounds() -> None:
    texts = SharedTexts(10_000, 5)
    texts.add("a", list(range(2000)))
    sizes = [next(texts.of("a")).size for _ in range(6)]
    assert sizes[0] < sizes[1] < sizes[-1] == 2001
    assert texts.size == 2001


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=30))
def test_dropping_leaves_the_others_and_the_bounds(added: list[tuple[str, int, bool]]) -> None:
    texts = SharedTexts(24, 5, owners=2)
    for owner, length, drop in added:
        if drop:
            before = texts.size
            assert texts.drop(owner).tokens == before - texts.size
            assert texts.kept(owner) == Kept()
            assert list(texts.of(owner)) == []
        else:
            texts.add(owner, [1] * length)
        assert texts.size == sum(texts.kept(name).tokens for name in "abc") <= 24
        assert sum(texts.kept(name).texts > 0 for name in "abc") <= 2


def test_members_of_a_mixture_are_asked_and_told() -> None:
    members = sharing()
    mixture = MixtureDrafter([Member(members["suffix"]), Member(members["ngram"])])
    for drafter in members.values():
        lived(drafter, "a", [1], TEXT)
    assert mixture.needs.keeps
    assert mixture.kept("a") == Kept(2, 10 + 9)
    assert mixture.forget("a") == Kept(2, 10 + 9)
    assert mixture.kept("a") == Kept()


def test_a_prediction_is_drafted_from_and_gone_on_with_behind_an_edit() -> None:
    drafter = SuffixDrafter(SuffixOptions(edits=True))
    request = renamed(make_request([1, 2], SamplingParams(temperature=0.0)), prediction=tuple(TEXT))
    seq = Sequence(request)
    drafter.begin(seq)
    assert drafter.propose(Batch([seq], [1]), Plan((4,))).per_sequence[0].tokens == TEXT[:4]
    seq.tokens += [11, 12, 13, 99]
    assert drafter.propose(Batch([seq], [1]), Plan((4,))).per_sequence[0].tokens == TEXT[4:8]
    plain = SuffixDrafter()
    plain.begin(seq)
    seq.tokens += [13, 14]
    assert plain.propose(Batch([seq], [1]), Plan((4,))).per_sequence[0].tokens == TEXT[4:8]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculation="auto:members=(suffix:shared_tokens=4096:shared_prompts=1:edits=1)", max_num_seqs=2, calibration_s=0)


def test_an_engine_keeps_drafts_and_forgets_by_tenant(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = "def area(width, height):\n    return"
    plain = llm.generate(prompt, params, speculation=False)[0].outputs[0].token_ids
    assert llm.kept("a") == Kept()
    for _ in range(2):
        assert llm.generate(prompt, params, tenant="a")[0].outputs[0].token_ids == plain
    assert llm.kept("a").texts == 1  # the second brought nothing new
    assert llm.kept("b") == Kept()
    llm.generate(prompt, params, tenant="b", speculation={"remember": False})
    assert llm.kept("b") == Kept()
    assert llm.forget("a").tokens > 24
    assert llm.kept("a") == Kept()


def test_a_prediction_changes_no_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    prompt = "class Stack:\n    def __init__(self):\n"
    plain = llm.generate(prompt, params, speculation=False)[0].outputs[0]
    for prediction in (plain.text, "something else", list(plain.token_ids), ""):
        assert llm.generate(prompt, params, prediction=prediction)[0].outputs[0].token_ids == plain.token_ids
