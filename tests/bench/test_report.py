"""The report as a reader sees it: headless Chromium, offline, light and dark; and the plots' arithmetic."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.record import write_report
from outrider.bench.report import render_report
from outrider.bench.suite import Suite, expand_methods, run_suite
from outrider.charts import Series, bars, lines, stacked

SECTIONS = ("speedup", "acceptance", "time", "batch", "costs", "rows", "meaning")
MARKS = {
    "device": "a <processor>",
    "versions": {"outrider": "0"},
    "command": 'outrider bench --methods "ngram & eagle"',
    "begun": "2026-01-01",
    "model": "Pyrite",
    "core": "native",
    "meaning": {"tok/s": "tokens & seconds"},
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    suite = Suite(expand_methods("ngram,eagle", []), ["code"], batches=[1, 2], max_tokens=16, limit=2, repeats=1)
    failed = {"method": "medusa", "workload": "code", "category": None, "temperature": 0.0, "batch": 1, "failed": "<planted>"}
    return [row | {"conditions": MARKS} for row in [*run_suite(suite, lambda text: None), failed]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine; on Debian: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as play:
        element = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield element
        element.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_offline_and_its_plots_are_drawn(
    rows: list[dict[str, Any]], browser: Any, scheme: str, tmp_path: Path
) -> None:
    path = write_report(rows, tmp_path)
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1100, "height": 900})
    page, urls, troubles = context.new_page(), [], []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(path.as_uri())
    assert urls == [path.as_uri()]
    assert troubles == []
    assert [element.get_attribute("id") for element in page.query_selector_all("section")] == list(SECTIONS)
    for name in SECTIONS[:5]:
        drawn = page.query_selector_all(f"#{name} svg .mark")
        assert drawn, name
        for mark in drawn:
            box, picture = mark.bounding_box(), mark.evaluate_handle("node => node.ownerSVGElement").as_element().bounding_box()
            assert box["x"] >= picture["x"] - 1, name
            assert box["x"] + box["width"] <= picture["x"] + picture["width"] + 1, name
            assert box["y"] + box["height"] <= picture["y"] + picture["height"] + 1, name
        assert all(element.inner_html().strip() for element in page.query_selector_all(f"#{name} svg title"))
        assert all(element.get_attribute("aria-label") for element in page.query_selector_all(f"#{name} svg"))
    assert page.query_selector("text=failed: <planted>")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(21, 23, 27)") == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # only the table scrolls sideways
    fills = {element.evaluate("node => getComputedStyle(node).fill") for element in page.query_selector_all("#speedup rect")}
    assert len(fills) == 2  # one colour for each method beside plain decoding
    context.close()


def test_nothing_is_fetched_and_text_is_escaped(rows: list[dict[str, Any]]) -> None:
    page = render_report(rows)
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "a &lt;processor&gt;" in page
    assert "<planted>" not in page
    assert "ngram &amp; eagle" in page


def test_rows_that_all_failed_still_make_a_report(rows: list[dict[str, Any]]) -> None:
    page = render_report([row for row in rows if row["failed"]])
    assert "failed: &lt;planted&gt;" in page
    assert "<svg" not in page


def test_a_bar_is_as_high_as_its_number() -> None:
    drawn = bars("t", ["a"], [Series("m", 1, [(0.0, 2.0)], [(1.0, 4.0)]), Series("n", 2, [(0.0, 4.0)])], "x", 4.0)
    heights = [float(value) for value in re.findall(r'height="([\d.]+)" rx', drawn)]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert "m, a: 2.00 x (1.00 to 4.00)" in drawn
    assert drawn.count("whisker") == 1


def test_a_line_goes_through_its_points() -> None:
    drawn = lines("t", [Series("m", 1, [(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)])], ("x", "y"))
    places = [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]+)"', drawn)[0].split()]
    assert places[1][0] == pytest.approx((places[0][0] + places[2][0]) / 2, abs=0.2)
    assert places[1][1] == pytest.approx((places[0][1] + places[2][1]) / 2, abs=0.2)
    assert drawn.count("<circle") == 3


def test_stacked_parts_follow_each_other() -> None:
    drawn = stacked("t", [("m", [1.0, 3.0], "note"), ("n", [0.0, 2.0], "")], ["a", "b"], "ms")
    value = [(float(x), float(w)) for x, w in re.findall(r'<rect class="mark" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn)]
    (x0, w0), (x1, w1), _, (_, w3) = value
    assert x1 == pytest.approx(x0 + w0, abs=0.2)
    assert w1 == pytest.approx(3 * w0, abs=0.3)
    assert w3 == pytest.approx(2 * w0, abs=0.3)
