"""Answers on the page: copying, the chart, colours, rejected draft tokens and the replay of a comparison."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from outrider.draft.registry import method_names
from tests.support.page import RECORD, ask, ended, ready, received, sent, shown
from tests.support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
REFUSED = "Object.defineProperty(navigator, 'clipboard', {value: {writeText: () => Promise.reject(new Error('no'))}});"
UNABLE = "document.execCommand = () => false;"


@pytest.mark.parametrize("script", [NO_CLIPBOARD, REFUSED])
def test_copies_without_a_clipboard(script: str, server: Running, opened: Open) -> None:
    page = ready(opened(server, script=script))
    ask(page, max_tokens=12)
    ended(page)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    page.fill("#prompt", "")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == "".join(token["text"] for token in shown(page))


@pytest.mark.parametrize("script", [NO_CLIPBOARD, REFUSED])
def test_a_failed_copy_is_reported(script: str, server: Running, opened: Open) -> None:
    page = ready(opened(server, script=script + UNABLE))
    ask(page, max_tokens=12)
    ended(page)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Not copied").wait_for()
    assert page.evaluate("getSelection().toString()").strip() == "".join(token["text"] for token in shown(page)).strip()


def acceptance(tokens: list[dict[str, Any]]) -> list[float]:
    """Acceptance by position in per cent, computed from the tokens so far."""
    drafted, accepted, depth = [0] * 8, [0] * 8, 0
    for token in tokens:
        if token["position"] is not None:
            depth += 1
            accepted[token["position"]] += 1
            drafted[token["position"]] += 1
        for position in range(depth, max([0, *(node["position"] + 1 for node in token.get("rejected", ()))])):
            drafted[position] += 1
        depth = depth if token["position"] is not None else 0
    return [round(100 * a / d, 2) for a, d in zip(accepted, drafted, strict=True) if d]


def test_the_chart_is_the_same_during_and_after_a_run(server: Running, opened: Open) -> None:
    page = ready(opened(server, script=RECORD))
    page.evaluate(
        "charts = []; new MutationObserver(() => charts.push([document.querySelectorAll('.token').length,"
        " [...document.querySelectorAll('#positions .bar')].map(bar => Number(bar.dataset.percent))]))"
        ".observe(document.getElementById('positions'), {childList: true})"
    )
    ask(page, max_tokens=64)
    ended(page)
    tokens, metrics = received(page)
    charts = page.evaluate("charts")
    assert len({count for count, _ in charts}) > 5
    for count, bars in charts:
        assert bars == acceptance(tokens[:count])
    final = [round(100 * share, 2) for share in metrics["speculative_decoding"]["acceptance_by_position"]]
    assert charts[-1] == [64, final]
    chart = page.locator("figure")
    assert "100 %" in chart.inner_text()
    assert "position in the draft" in chart.inner_text()
    assert "Accepted, % of the drafts that reached the position" in chart.inner_text()


def test_a_drafter_s_style_depends_only_on_its_name(server: Running, opened: Open) -> None:
    arms = ["suffix+eagle", "suffix+draft_model", "ngram+eagle", "suffix+medusa"]
    names = [*(name for name in method_names() if name != "none"), *arms]
    look = "async names => { const {marks} = await import('/page/palette.js'); return names.map(marks); }"
    everything = [*names, "my_drafter", "package.module:Class", "constructor", "__proto__"]
    first, second = (opened(server).evaluate(look, order) for order in (everything, everything[::-1]))
    assert first == second[::-1]
    assert len(set(first[: len(names)])) == len(names)
    assert all(re.fullmatch(r"hue-[1-6] line-(solid|dashed|dotted|double|wavy)", classes) for classes in first)


# What people see who lack one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
VISIONS = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hues_are_distinguishable_for_every_colour_vision(theme: str, server: Running, opened: Open) -> None:
    page = ready(opened(server, color_scheme=theme))
    colours = page.evaluate(
        "[...Array(6).keys()].map(i => { const one = document.createElement('span');"
        " one.className = `token hue-${i + 1} line-solid`; one.textContent = 'x'; document.querySelector('.card').append(one);"
        " return getComputedStyle(one).textDecorationColor; })"
        ".concat(getComputedStyle(document.querySelector('.card')).backgroundColor)"
    )
    *hues, sheet = [linear(colour) for colour in colours]
    light = [float(XYZ[1] @ colour) + 0.05 for colour in (*hues, sheet)]
    assert all(max(hue, light[-1]) / min(hue, light[-1]) >= 3 for hue in light[:-1])  # WCAG's contrast for graphics
    for name, vision in VISIONS.items():
        seen = [lab(np.array(vision) @ colour) for colour in hues]
        assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) >= 25, name


def linear(colour: str) -> np.ndarray:
    """An rgb() colour in linear light."""
    parts = np.array([int(part) / 255 for part in colour[4:-1].split(",")])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: np.ndarray) -> np.ndarray:
    """CIE L*a*b*: a distance of 2 can just be seen."""
    ratio = XYZ @ np.clip(colour, 0, 1) / XYZ.sum(1)
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_the_idle_page_offers_examples_and_compares(server: Running, opened: Open, keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    assert "writes Python code, not prose" in page.inner_text("#about")
    assert page.is_checked("[name=compare]")
    examples = page.locator(".example")
    assert examples.count() == 6
    keep(page, "idle")
    page.fill("#max_tokens", "16")
    examples.nth(1).click()
    page.wait_for_selector(".verdict[data-kind=equal]")
    assert page.input_value("#prompt").startswith("class Stack:")
    assert page.locator("#idle").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_rejected_guesses_are_shown_on_demand(server: Running, opened: Open, keep: Callable[..., None]) -> None:
    page = ready(opened(server, script=RECORD))
    bodies = sent(page)
    ask(page, max_tokens=48)
    ended(page)
    tokens, _ = received(page)
    expected, depth = [], 0
    for token in tokens:
        depth = depth + 1 if token["position"] is not None else depth
        nodes = [node for node in token.get("rejected", ()) if node["position"] >= depth]  # eagle:4 drafts chains
        expected += ["".join(node["text"] for node in nodes)] if nodes else []
        depth = depth if token["position"] is not None else 0
    ghosts = page.locator("token-stream .ghost")
    assert ghosts.count() == len(expected) > 3
    assert ghosts.first.is_hidden()
    page.check("#show-rejected")
    assert ghosts.first.is_visible()
    readable = [text.replace("\n", "↵").replace("\t", "⇥") if "\n" in text else text for text in expected]
    assert ghosts.all_text_contents() == readable
    assert [token["text"] for token in shown(page)] == [token["text"] for token in tokens]
    at = next(i for i, token in enumerate(tokens) if token["source"] == "target" and token.get("rejected"))
    page.locator(".token").nth(at).hover()
    assert "eagle guessed here:" in page.inner_text("#token-card")
    keep(page, "rejected")
    page.uncheck("#show-rejected")
    assert ghosts.first.is_hidden()
    assert len(bodies) == 1  # no second request was sent


def visible(page: Page, pane: int) -> int:
    tokens = page.locator(".pane").nth(pane).locator(".token")
    return int(tokens.evaluate_all("all => all.filter(one => getComputedStyle(one).visibility == 'visible').length"))


def test_the_comparison_can_be_replayed(server: Running, opened: Open, keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    ask(page, compare=True, max_tokens=32)
    race = page.locator("race-replay")
    race.wait_for()
    lanes = page.evaluate("document.querySelector('race-replay').lanes.map(({tally}) => tally.tokens.map(token => token.ms))")
    end = page.evaluate("document.querySelector('race-replay').end")
    assert end == max(map(max, lanes))
    slider = race.get_by_label("Time of the replay")
    for share in (0, 0.3, 0.8, 0.5, 1):
        slider.evaluate("(one, ms) => { one.value = ms; one.dispatchEvent(new Event('input')); }", share * end + 1)
        now = float(slider.input_value())
        assert [visible(page, pane) for pane in range(2)] == [sum(ms <= now for ms in lane) for lane in lanes]
        if share == 0.5:
            keep(page, "race")
    race.get_by_label("Speed of the replay").select_option("0.25")
    race.get_by_role("button", name="Replay").click()
    race.get_by_role("button", name="Pause").click()
    assert visible(page, 1) < 32
    assert "of 32" in race.inner_text()
    race.get_by_label("Speed of the replay").select_option("1")
    race.get_by_role("button", name="Replay").click()
    race.get_by_role("button", name="Replay").wait_for()  # the replay has ended
    assert [visible(page, pane) for pane in range(2)] == [32, 32]
