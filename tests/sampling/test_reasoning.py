"""Markers in token streams: every split of a text into tokens places the reasoning where the text has it."""

from __future__ import annotations

import random

import pytest

from outrider.sampling.reasoning import Markers, Phase, Place, Reasoning

TEXTS = [
    "",
    "ab",
    "<t>x</t>y",
    "x</t>",
    "<t></t>",
    " \n<t> a <</t </t>{}",
    "<",
    "<t",
    "<tx</t>",
    "no <t>x</t>",
    "</</t>",
    "é<t>é</t>",
]


def splits(text: bytes, rng: random.Random) -> list[bytes]:
    out = []
    while text:
        size = rng.randint(1, 5)
        out.append(text[:size])
        text = text[size:]
    return out


def placed(markers: Markers, pieces: list[bytes]) -> list[Place]:
    """The place after every piece, each piece a token."""
    follower = Markers(Reasoning(markers.end.decode(), markers.begin.decode()), pieces.__getitem__)
    return [follower.after(follower.start, range(count)) for count in range(len(pieces) + 1)]


def expected(text: str, begin: str, end: str) -> tuple[Phase, bool]:
    """Phase after a text, and whether there was reasoning before the answer."""
    if begin:
        text = text.lstrip()
        if not text.startswith(begin):
            return (Phase.BEFORE, False) if begin.startswith(text) else (Phase.ANSWER, False)
        text = text[len(begin) :]
    return (Phase.ANSWER, True) if end in text else (Phase.INSIDE, False)


@pytest.mark.parametrize(("begin", "end"), [("<t>", "</t>"), ("", "</t>"), ("<", "</t"), ("", "</</t>")])
def test_every_split_finds_the_markers_of_the_text(begin: str, end: str) -> None:
    rng = random.Random(begin + end)
    markers = Markers(Reasoning(end, begin), lambda _: b"")
    for text in TEXTS:
        for _ in range(30):
            pieces = splits(text.encode(), rng)
            for count, place in enumerate(placed(markers, pieces)):
                so_far = b"".join(pieces[:count]).decode(errors="replace")
                assert (place.phase, place.reasoned) == expected(so_far, begin, end), (pieces, count)


def test_the_answer_begins_after_the_token_that_completes_the_marker() -> None:
    words = [b"<t>", b"a", b"</", b"t>", b"{", b"}"]
    markers = Markers(Reasoning("</t>", "<t>", budget=1), words.__getitem__)
    places = [markers.after(markers.start, range(count)) for count in range(7)]
    assert [place.phase.name for place in places] == ["BEFORE", "INSIDE", "INSIDE", "INSIDE", "ANSWER", "ANSWER", "ANSWER"]
    assert [markers.exhausted(place) for place in places] == [False, False, True, True, False, False, False]
    assert places[4] == places[6] == Place(Phase.ANSWER, tokens=4, reasoned=True)


@pytest.mark.parametrize(
    ("pieces", "begin", "count"),
    [
        (["a", "b", "</t>", "c"], "", 2),
        (["a", "</", "b", "<", "/t>", "c"], "", 3),
        (["<t>", "a", "</t>"], "<t>", 1),
        (["\n", "<", "t>", "a", "b"], "<t>", 2),
        (["</t>"], "", 0),
        (["<t>", "</t>", "x"], "<t>", 0),
        (["a", "b"], "<t>", 0),
        (["<", "t"], "<t>", 0),
        ([], "", 0),
    ],
)
def test_reasoning_tokens_are_counted_without_the_markers(pieces: list[str], begin: str, count: int) -> None:
    markers = Markers(Reasoning("</t>", begin), lambda token: pieces[token].encode())
    assert markers.count(range(len(pieces))) == count


def test_tokens_that_run_over_the_marker_are_known() -> None:
    markers = Markers(Reasoning("</t>"), lambda _: b"")
    assert markers.overshoots(0, b"x</t>y")
    assert markers.overshoots(3, b">y")
    assert not markers.overshoots(3, b">")
    assert not markers.overshoots(2, b">y")
    assert markers.overshoots(1, b"</t>>")
