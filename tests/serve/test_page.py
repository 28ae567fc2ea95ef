"""The page in a real browser, against a real server with the bundled model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import Running, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

PROMPT = 'def load_config(path):\n    """Read settings from a JSON file."""\n'
MARKUP = '<img src="x" onerror="document.title=1"><script>document.title=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'outrider[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        own = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server. It must ask nobody else for anything and throw no errors."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def show(server: Running, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 1000}, "reduced_motion": "reduce"} | options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: asked.url.startswith((server.url, "data:")) or faults.append(asked.url))
        page.goto(server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def keep(pytestconfig: pytest.Config) -> Callable[[Page, str], None]:
    """Keeps a screenshot of the whole page."""
    folder = Path(os.environ.get("OUTRIDER_SCREENSHOTS") or pytestconfig.rootpath / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True) and None


def ready(page: Page) -> Page:
    page.wait_for_selector("#state[data-kind=well]")
    return page


def ask(page: Page, prompt: str = PROMPT, **fields: Any) -> None:
    """Type a prompt, set fields and press Control and Enter."""
    for name, value in {"seed": 7, "max_tokens": 32, **fields}.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", prompt)
    page.keyboard.press("Control+Enter")


def ended(page: Page) -> None:
    page.wait_for_selector("#stop:disabled")


def details(server: Running, **changes: Any) -> dict[str, Any]:
    """What the API itself answers to what `ask` asks."""
    body = {
        "prompt": PROMPT,
        "temperature": 0.6,
        "seed": 7,
        "max_tokens": 32,
        "logprobs": 4,
        "return_token_details": True,
    } | changes
    answer: dict[str, Any] = server.post("/v1/completions", **body).json()
    return answer


def shown(page: Page, pane: int = 0) -> list[dict[str, Any]]:
    """Every token of an answer as the page shows it."""
    found: list[dict[str, Any]] = (
        page.locator(".pane")
        .nth(pane)
        .locator(".token")
        .evaluate_all(
            "all => all.map(one => { const style = getComputedStyle(one);"
            " return {text: one.textContent, source: one.dataset.source, tint: style.backgroundColor,"
            " line: style.textDecorationLine + ' ' + style.textDecorationStyle}; })"
        )
    )
    return found


def falsify(route: Route, event: int, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """An answer of the server, but for the first token of one of its events."""
    response = route.fetch()
    events = response.text().split("\n\n")
    told = json.loads(events[event][6:])
    change(told["choices"][0]["token_details"][0], route.request.post_data_json)
    events[event] = f"data: {json.dumps(told)}"
    route.fulfill(response=response, body="\n\n".join(events))


def test_tokens_stream_in_with_their_sources(server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    page.evaluate(
        "batches = 0; new MutationObserver(() => batches++)"
        ".observe(document.getElementById('turns'), {childList: true, subtree: true})"
    )
    ask(page, temperature=0.6)
    ended(page)
    told = details(server)
    tokens, expected = shown(page), told["choices"][0]["token_details"]
    assert [(own["text"], own["source"]) for own in tokens] == [(own["text"], own["source"]) for own in expected]
    assert page.evaluate("batches") > 5  # it came in pieces, not at once

    guessed = {(own["tint"], own["line"]) for own in tokens if own["source"] == "eagle"}
    plain = {(own["tint"], own["line"]) for own in tokens if own["source"] == "target"}
    (tint, line), (bare, without) = *guessed, *plain
    assert tint != bare
    assert (line, without) == ("underline solid", "none solid")
    assert page.locator("#legend").inner_text().split("\n") == ["target's own", "guessed by eagle", "a draft begins"]

    speculation = told["metrics"]["speculative_decoding"]
    assert page.inner_text("#per-round") == f"{speculation['tokens_per_round']:.2f}"
    assert float(page.inner_text("#tok-s")) > 0
    assert page.locator("#positions .bar").count() == len(speculation["acceptance_by_position"])
    keep(page, "playground")


def test_a_token_tells_its_probability_and_alternatives(
    server: Running, opened: Callable[..., Page], keep: Callable[..., None]
) -> None:
    page = ready(opened(server))
    ask(page)
    ended(page)
    expected = details(server)["choices"][0]["token_details"]
    at = next(i for i, own in enumerate(expected) if own["position"] == 1)
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
    asked: list[dict[str, Any]] = []
    others: list[int] = []
    submit = server.service.submit
    monkeypatch.setattr(server.service, "submit", lambda *given: others.append(server.service.in_flight) or submit(*given))
    page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json))
    page.check("[name=compare]")
    ask(page, max_tokens=96)
    verdict = page.locator(".verdict[data-kind=equal]")
    verdict.wait_for()
    assert "Same tokens\nAll 96 token ids are equal." in verdict.inner_text()
    assert verdict.locator(".times strong").inner_text().endswith(("faster", "slower", "fast"))
    assert verdict.locator(".time .number").count() == 2
    assert [own["text"] for own in shown(page, 0)] == [own["text"] for own in shown(page, 1)]
    assert {own["source"] for own in shown(page, 0)} == {"eagle", "target"}
    assert {own["source"] for own in shown(page, 1)} == {"target"}

    assert others == [0, 0]  # one after the other, so that both have the machine to themselves
    on, off = asked
    assert (on.pop("speculation"), off.pop("speculation")) == ({"enabled": True}, {"enabled": False})
    assert on.pop("cache_salt") != off.pop("cache_salt")  # the second finds nothing of the first in the prefix cache
    assert on == off
    keep(page, "compare")


def test_comparison_shows_where_texts_part(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))

    def wrong(token: dict[str, Any], asked: dict[str, Any]) -> None:
        token["id"] += not asked["speculation"]["enabled"]

    page.route("**/v1/completions", lambda route: falsify(route, 9, wrong))
    page.check("[name=compare]")
    ask(page)
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
        assert [i for i, own in enumerate(marked) if own] == [9]


def test_markup_stays_text(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))

    def hostile(token: dict[str, Any], _: dict[str, Any]) -> None:
        token["text"] = token["top"][0]["text"] = MARKUP

    page.fill("#temperature", "0")
    ask(page, f"rows = [\n{f'    {MARKUP!r},' + chr(10)}" * 8, max_tokens=64)
    ended(page)
    assert "<img" in "".join(own["text"] for own in shown(page))  # the model wrote it too
    page.route("**/v1/completions", lambda route: falsify(route, 1, hostile))  # as if all of it were one token
    ask(page)
    ended(page)
    page.locator(".token", has_text=MARKUP).hover()
    assert page.locator("#token-card").inner_text().count(MARKUP.replace(" ", "␣")) == 2
    page.get_by_text("Chat", exact=True).click()
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


def test_escape_stops_a_run(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    page.check("[name=compare]")
    ask(page, max_tokens=1500)
    page.locator(".token").nth(8).wait_for(state="attached")
    page.keyboard.press("Escape")
    ended(page)
    assert "stopped" in page.inner_text(".foot")
    assert page.locator(".pane").count() == 1
    assert not page.locator("#trouble").is_visible()
    until(server.is_idle)


def test_a_comparison_that_fails_says_so(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    page.route(
        "**/v1/completions",
        lambda route: route.continue_() if route.request.post_data_json["speculation"]["enabled"] else route.abort(),
    )
    page.check("[name=compare]")
    ask(page, max_tokens=8)
    page.wait_for_selector("#trouble:not([hidden])")
    assert "Not compared" in page.inner_text(".verdict")
    assert page.locator(".pane").count() == 1


def test_chat_remembers_what_was_said(server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server))
    asked: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json))
    page.get_by_text("Chat", exact=True).click()
    page.fill("#system", "You write Python.")
    for message in ("Read a file.", "Now with pathlib."):
        ask(page, message, max_tokens=24)
        ended(page)
    roles = [(own["role"], own["content"]) for own in asked[1]["messages"]]
    first = "".join(own["text"] for own in shown(page, 0))
    assert roles[:2] == [("system", "You write Python."), ("user", "Read a file.")]
    assert roles[2][0] == "assistant"
    assert roles[2][1] == first
    assert roles[3] == ("user", "Now with pathlib.")
    keep(page, "chat")
    page.click("#fresh")
    assert page.locator(".pane").count() == 0


def test_errors_say_what_to_do(server: Running, opened: Callable[..., Page]) -> None:
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


def test_the_key_lives_in_the_tab(server_with: Callable[..., Running], opened: Callable[..., Page]) -> None:
    server = server_with(api_key="right")
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
    assert tiles.locator("bar-chart .bar").count() == len(stats["acceptance_by_position"])
    assert f"length\t{stats['finished']['length']}" in text
    keep(page, "server")
    page.context.set_offline(True)
    tiles.locator(".trouble").get_by_text("The server does not answer.").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_fits_a_phone_in_both_themes(theme: str, server: Running, opened: Callable[..., Page], keep: Callable[..., None]) -> None:
    page = ready(opened(server, viewport={"width": 390, "height": 844}, color_scheme=theme))
    page.check("[name=compare]")
    ask(page)
    page.wait_for_selector(".verdict[data-kind=equal]")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    keep(page, f"phone-{theme}")
    paper = "getComputedStyle(document.body).backgroundColor"
    own = page.evaluate(paper)
    other = "dark" if theme == "light" else "light"
    while page.get_attribute("html", "data-theme") != other:
        page.click("#theme")
    assert page.evaluate(paper) != own
    page.reload()
    assert page.get_attribute("html", "data-theme") == other


def test_keyboard_alone_reaches_everything(server: Running, opened: Callable[..., Page]) -> None:
    page = ready(opened(server))
    reached, hidden = set(), set()
    for _ in range(24):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(
            "(() => { const at = document.activeElement; const seen = at.type == 'radio' ? at.nextElementSibling : at;"
            " return [at.name || at.id || at.tagName != 'BODY' && at.textContent, getComputedStyle(seen).outlineStyle]; })()"
        )
        reached.add(name)
        hidden |= {name} if name and ring == "none" else set()
    assert {"Playground", "Server", "Key", "theme", "mode", "prompt", "run", "compare", "temperature", "top_p"} <= reached
    assert {"max_tokens", "seed", "top_k", "alternatives", "speculate", "method", "draft_tokens"} <= reached
    assert not hidden
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')].filter(one =>"
        " !(one.labels?.length || one.textContent.trim() || one.getAttribute('aria-label'))).map(one => one.outerHTML)"
    )
    assert unnamed == []
