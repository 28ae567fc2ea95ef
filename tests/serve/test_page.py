"""The page in a real browser, against a real server with the bundled model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM
from tests.support.page import RECORD, ask, chat, details, ended, ready, received, sent, shown
from tests.support.server import Running, until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

MARKUP = '<img src="x" onerror="document.title=1"><script>document.title=1</script>'


def falsify(route: Route, event: int, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Pass on an answer of the server with a changed first token in one of its events."""
    response = route.fetch()
    events = response.text().split("\n\n")
    event_data = json.loads(events[event][6:])
    change(event_data["choices"][0]["token_details"][0], route.request.post_data_json)
    events[event] = f"data: {json.dumps(event_data)}"
    route.fulfill(response=response, body="\n\n".join(events))


def test_tokens_stream_in_with_their_sources(server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server, script=RECORD))
    page.evaluate(
        "batches = 0; new MutationObserver(() => batches++)"
        ".observe(document.getElementById('turns'), {childList: true, subtree: true})"
    )
    ask(page, temperature=0.6)
    ended(page)
    tokens, (expected, metrics) = shown(page), received(page)
    assert [token["text"] for token in tokens] == [token["text"] for token in details(server)["choices"][0]["token_details"]]
    assert [(token["text"], token["source"]) for token in tokens] == [(token["text"], token["source"]) for token in expected]
    assert page.evaluate("batches") > 5  # the answer was streamed

    guessed = {(token["tint"], token["line"]) for token in tokens if token["source"] == "eagle"}
    plain = {(token["tint"], token["line"]) for token in tokens if token["source"] == "target"}
    (tint, line), (bare, without) = *guessed, *plain
    assert tint != bare
    assert (line, without) == ("underline solid", "none solid")
    legend = page.locator("#legend").inner_text().split("\n")
    assert legend == ["target's own", "guessed by eagle", "a draft begins", "abc", "rejected guess"]

    speculation = metrics["speculative_decoding"]
    assert page.inner_text("#per-round") == f"{speculation['tokens_per_round']:.2f}"
    assert float(page.inner_text("#tok-s")) > 0
    assert page.locator("#positions .bar").count() == len(speculation["acceptance_by_position"])
    keep(page, "playground")


def test_a_token_s_card_shows_probability_and_alternatives(
    server: Running, opened: Callable[..., Page], keep: Callable[..., None]
) -> None:
    page = ready(opened(server, script=RECORD))
    ask(page)
    ended(page)
    expected, _ = received(page)
    at = next(i for i, detail in enumerate(expected) if detail["position"] == 1)
    card = page.locator("#token-card")

    page.locator(".token").nth(at).hover()
    text = card.inner_text()
    assert "guessed by eagle, position 2 of the draft" in text
    assert f"id {expected[at]['id']}" in text
    rows = card.locator("tr").all_inner_texts()
    assert len(rows) >= 4
    chosen = card.locator("tr.chosen .number").inner_text()
    assert chosen == f"{100 * 2.718281828459045 ** expected[at]['logprob']:.1f} %"
    keep(page, "token")

    page.mouse.move(0, 0)
    assert card.is_hidden()
    page.locator(".token").first.focus()
    for _ in range(at + 1):
        page.keyboard.press("ArrowRight")
    assert f"id {expected[at + 1]['id']}" in card.inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "token-card"
    page.keyboard.press("Escape")
    assert card.is_hidden()


def test_comparison_shows_equal_tokens_and_both_times(
    server: Running, opened: Callable[..., Page], keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ready(opened(server))
    bodies: list[dict[str, Any]] = []
    others: list[int] = []
    submit = server.service.submit
    monkeypatch.setattr(server.service, "submit", lambda *args: others.append(server.service.in_flight) or submit(*args))
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    ask(page, compare=True, max_tokens=96)
    verdict = page.locator(".verdict[data-kind=equal]")
    verdict.wait_for()
    assert "Same tokens\nAll 96 token ids are equal." in verdict.inner_text()
    assert verdict.locator(".times strong").inner_text().endswith(("faster", "slower", "fast"))
    assert verdict.locator(".time .number").count() == 2
    assert [token["text"] for token in shown(page, 0)] == [token["text"] for token in shown(page, 1)]
    assert {token["source"] for token in shown(page, 0)} == {"eagle", "target"}
    assert {token["source"] for token in shown(page, 1)} == {"target"}

    assert others == [0, 0]  # the runs do not overlap
    on, off = bodies
    assert (on.pop("speculation"), off.pop("speculation")) == ({"enabled": True, "return_rejected": True}, {"enabled": False})
    assert on.pop("cache_salt") != off.pop("cache_salt")  # the second run has no prefix-cache hits from the first
    assert on == off
    keep(page, "compare")


def test_comparison_marks_the_first_difference(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))

    def wrong(token: dict[str, Any], body: dict[str, Any]) -> None:
        token["id"] += not body["speculation"]["enabled"]

    page.route("**/v1/completions", lambda route: falsify(route, 9, wrong))
    ask(page, compare=True)
    verdict = page.locator(".verdict[data-kind=differ]")
    verdict.wait_for()
    assert "The texts part at token 10" in verdict.inner_text()
    for pane in range(2):
        marked = (
            page.locator(".pane")
            .nth(pane)
            .locator(".token")
            .evaluate_all("all => all.map(one => one.classList.contains('parts'))")
        )
        assert [i for i, is_marked in enumerate(marked) if is_marked] == [9]


def test_markup_stays_text(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))

    def hostile(token: dict[str, Any], _: dict[str, Any]) -> None:
        token["text"] = token["top"][0]["text"] = MARKUP

    page.fill("#temperature", "0")
    ask(page, f"rows = [\n{f'    {MARKUP!r},' + chr(10)}" * 8, max_tokens=64)
    ended(page)
    assert "<img" in "".join(token["text"] for token in shown(page))  # the model wrote it too
    page.route("**/v1/completions", lambda route: falsify(route, 1, hostile))  # the whole markup as one token
    ask(page)
    ended(page)
    page.locator(".token", has_text=MARKUP).hover()
    assert page.locator("#token-card").inner_text().count(MARKUP.replace(" ", "␣")) == 2
    chat(page)
    ask(page, MARKUP, max_tokens=4)
    ended(page)
    assert page.inner_text(".said") == MARKUP
    page.evaluate("text => document.getElementById('method').append(new Option(text, text))", MARKUP)
    page.select_option("#method", MARKUP)
    ask(page, "x", max_tokens=4)
    page.wait_for_selector("#trouble:not([hidden])")
    assert "<img" in page.inner_text("#trouble")
    assert page.locator("img, body script").count() == 0
    assert page.title() == "Outrider"


def test_escape_stops_a_run(server: Running, opened: Callable[..., Page], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = llm.engine.round
    # slow rounds, so that the run lasts until the key is pressed
    monkeypatch.setattr(llm.engine, "round", lambda: (time.sleep(0.02), rounds())[1])
    page = ready(opened(server))
    ask(page, compare=True, max_tokens=1500)
    page.locator(".token").nth(8).wait_for(state="attached")
    page.keyboard.press("Escape")
    ended(page)
    assert "stopped" in page.inner_text(".foot")
    assert page.locator(".pane").count() == 1
    assert not page.locator("#trouble").is_visible()
    until(server.is_idle)


def test_a_failed_comparison_is_reported(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    page.route(
        "**/v1/completions",
        lambda route: route.continue_() if route.request.post_data_json["speculation"]["enabled"] else route.abort(),
    )
    ask(page, compare=True, max_tokens=8)
    page.wait_for_selector("#trouble:not([hidden])")
    assert "Not compared" in page.inner_text(".verdict")
    assert page.locator(".pane").count() == 1


def test_chat_remembers_what_was_said(server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    bodies = sent(page)
    chat(page)
    page.fill("#system", "You write Python.")
    for message in ("Read a file.", "Now with pathlib."):
        ask(page, message, max_tokens=24)
        ended(page)
    roles = [(message["role"], message["content"]) for message in bodies[1]["messages"]]
    first = "".join(token["text"] for token in shown(page, 0))
    assert roles[:2] == [("system", "You write Python."), ("user", "Read a file.")]
    assert roles[2][0] == "assistant"
    assert roles[2][1] == first
    assert roles[3] == ("user", "Now with pathlib.")
    keep(page, "chat")
    page.click("#fresh")
    assert page.locator(".pane").count() == 0


def test_errors_are_shown_with_a_remedy(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    trouble = page.locator("#trouble")
    ask(page, max_tokens=999_999)
    trouble.wait_for()
    assert "max_tokens: must be at most" in trouble.inner_text()
    assert page.get_attribute("#max_tokens", "aria-invalid") == "true"
    ask(page, max_tokens=4)
    ended(page)
    assert not trouble.is_visible()
    assert page.get_attribute("#max_tokens", "aria-invalid") is None
    page.context.set_offline(True)
    ask(page, max_tokens=4)
    trouble.wait_for()
    assert "The server does not answer.\nIs `outrider serve` still running" in trouble.inner_text()


def test_the_key_is_kept_in_the_tab_s_session(server_with: Callable[..., Running], opened: Callable[..., Page]) -> None:
    server = server_with(api_key=("right",))
    page = opened(server, http_credentials={"username": "", "password": "right"})
    ready(page)
    for key, good in (("wrong", False), ("right", True)):
        page.get_by_role("button", name="Key").click()
        page.fill("#key", key)
        page.keyboard.press("Enter")
        if good:
            ready(page)
        else:
            page.wait_for_selector("#state[data-kind=ill]")
            page.keyboard.press("Escape")
            ask(page, max_tokens=4)
            page.wait_for_selector("#trouble:not([hidden])")
            assert "The API key was refused" in page.inner_text("#trouble")
            page.keyboard.press("Escape")
    assert page.evaluate("sessionStorage.getItem('outrider.api_key')") == "right"
    assert "right" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def spelled(ms: float) -> str:
    """A time as the page writes it: ties are rounded up there, and to even digits by Python's formats."""
    value, digits, unit = (ms / 1000, 2 if ms < 10_000 else 1, "s") if ms >= 1000 else (ms, 1 if ms < 10 else 0, "ms")
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)} {unit}"


def test_dashboard_shows_the_server(server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    ask(page)
    ended(page)
    page.get_by_role("link", name="Server").click()
    stats = server.http.get("/stats").json()
    tiles = page.locator("server-dashboard")
    tiles.locator("spark-line .line").wait_for(state="attached")
    text = tiles.inner_text()
    assert f"Tokens generated\n{stats['generated_tokens']:,}" in text
    assert f"eagle\t{stats['by_method']['eagle']['drafted']:,}\t{stats['by_method']['eagle']['accepted']:,}" in text
    assert tiles.locator("acceptance-chart .bar").count() == len(stats["acceptance_by_position"])
    assert f"length\t{stats['finished']['length']}" in text
    for name, label in (
        ("first_token_ms", "To the first token"),
        ("inter_token_ms", "Between tokens"),
        ("total_ms", "Whole request"),
    ):
        times = "\t".join(spelled(stats["latency"][name][quantile]) for quantile in ("p50", "p95"))
        assert f"{label}\t{times}" in text
    keep(page, "server")
    page.context.set_offline(True)
    tiles.locator(".trouble").get_by_text("The server does not answer.").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_fits_a_phone_in_both_themes(theme: str, server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server, viewport={"width": 390, "height": 844}, color_scheme=theme))
    ask(page, compare=True)
    page.wait_for_selector(".verdict[data-kind=equal]")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    keep(page, f"phone-{theme}")
    paper = "getComputedStyle(document.body).backgroundColor"
    colour = page.evaluate(paper)
    other = "dark" if theme == "light" else "light"
    while page.get_attribute("html", "data-theme") != other:
        page.click("#theme")
    assert page.evaluate(paper) != colour
    page.reload()
    assert page.get_attribute("html", "data-theme") == other


def test_keyboard_alone_reaches_everything(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    page.click("summary")
    page.evaluate("document.activeElement.blur(); document.getSelection().removeAllRanges(); scrollTo(0, 0)")
    page.mouse.click(1, 1)
    reached, hidden = set(), set()
    for _ in range(34):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(
            "(() => { const at = document.activeElement; const seen = at.type == 'radio' ? at.nextElementSibling : at;"
            " return [at.name || at.id || at.tagName != 'BODY' && at.textContent, getComputedStyle(seen).outlineStyle]; })()"
        )
        reached.add(name)
        hidden |= {name} if name and ring == "none" else set()
    assert {"Playground", "Server", "Key", "theme", "mode", "prompt", "run", "compare", "temperature", "top_p"} <= reached
    assert {"max_tokens", "seed", "top_k", "alternatives", "speculate", "method", "draft_tokens"} <= reached
    assert {"min_p", "stop_strings", "response_format"} <= reached
    assert not hidden
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')].filter(one =>"
        " !(one.labels?.length || one.textContent.trim() || one.getAttribute('aria-label'))).map(one => one.outerHTML)"
    )
    assert unnamed == []
