"""Helpers of the browser tests: sending requests through the page, and reading what it shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = 'def load_config(path):\n    """Read settings from a JSON file."""\n'

# For `opened`: keeps a copy of every streamed answer. The browser itself may forget the body of an answer that was read.
RECORD = """
    const send = fetch;
    window.streams = [];
    window.fetch = async (...request) => {
        const answer = await send(...request);
        if (answer.url.endsWith("/v1/completions")) streams.push(answer.clone().text());
        return answer;
    };
"""


def ready(page: Page) -> Page:
    page.wait_for_selector("#state[data-kind=well]")
    return page


def ask(page: Page, prompt: str = PROMPT, compare: bool = False, **fields: Any) -> None:
    """Type a prompt, set fields and press Control and Enter."""
    page.set_checked("[name=compare]", compare)
    for name, value in {"seed": 7, "max_tokens": 32, **fields}.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", prompt)
    page.keyboard.press("Control+Enter")


def ended(page: Page) -> None:
    page.wait_for_selector("#stop:disabled")


def details(server: Running, **changes: Any) -> dict[str, Any]:
    """The API's answer to the request that `ask` sends."""
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
    tokens: list[dict[str, Any]] = (
        page.locator(".pane")
        .nth(pane)
        .locator(".token")
        .evaluate_all(
            "all => all.map(one => { const style = getComputedStyle(one);"
            " return {text: one.textContent, source: one.dataset.source, tint: style.backgroundColor,"
            " line: style.textDecorationLine + ' ' + style.textDecorationStyle}; })"
        )
    )
    return tokens


def chat(page: Page) -> Page:
    """Switch to the chat."""
    page.get_by_text("Chat", exact=True).click()
    return page


def received(page: Page) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tokens of the only answer of a page opened with RECORD, and its metrics. In another run drafts may differ."""
    (stream,) = page.evaluate("Promise.all(streams)")
    events = [json.loads(event[6:]) for event in stream.split("\n\n") if event.startswith("data: {")]
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_details", ())]
    return tokens, next(event["metrics"] for event in events if "metrics" in event)


def sent(page: Page) -> list[Any]:
    """The bodies of all requests that follow."""
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    return bodies
