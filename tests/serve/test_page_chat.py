"""The page's chat: Markdown, editing, regenerating, the history, and further request fields."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.page import ask, chat, ended, ready, sent, shown
from tests.support.server import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Open = Callable[..., "Page"]
RENDER = (
    "async texts => { const {markdown} = await import('/page/markdown.js'); return texts.map(text => {"
    " const root = document.createElement('div'); root.append(...markdown(text)); return root.innerHTML; }); }"
)
INSPECT = (
    "async texts => { const {markdown} = await import('/page/markdown.js'); const out = new Set(); for (const text of texts) {"
    " const root = document.createElement('div'); root.append(...markdown(text)); document.body.append(root);"
    " for (const one of root.querySelectorAll('*')) { out.add(one.localName);"
    "  for (const {name, value} of one.attributes) out.add(name == 'href' ? 'href ' + new URL(value).protocol : '@' + name); }"
    " root.remove(); } return [...out]; }"
)
HOSTILE = (
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[a](javascript:alert(1))", "[a](data:text/html,x)", "](", "[",
    "![x](http://evil/x.png)", "https://e.org/a", "[b](https://e.org/?q=1 'title')", "**", "*", "__", "_", "~~", "`", "```",
    "~~~", ")", "\n", "\n\n", "    ", "\t", "- ", "1. ", "> ", "# ", "---", "\\", "&lt;", "\u202e", "\ufffd", "\x00", "word",
    "<a href='javascript:x'>", "[x]( JaVaScRiPt:alert(1))", "[x](\x01javascript:alert(1))", "<svg/onload=alert(1)>", "***",
    '[x](https://e.org/" onmouseover="alert(1))', "[[x](https://a.b)](https://c.d)", "http://[", "https://%", "|a|b|", "a_b_c",
)  # fmt: skip
TAGS = {"p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "blockquote", "hr", "em", "strong", "s", "a"}
ATTRIBUTES = {"@rel", "@target", "@start", "@data-language", "href http:", "href https:"}


def record(**properties: Any) -> dict[str, Any]:
    """The schema of an object with just these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA = record(name={"enum": ["ada", "bob"]})
TOOL = {"type": "function", "function": {"name": "weather", "parameters": record(city={"enum": ["Oslo", "Rome"]})}}
LINK = '<a href="{0}" rel="noopener noreferrer nofollow" target="_blank">{1}</a>'


def test_markdown_becomes_elements(server: Running, opened: Open) -> None:
    cases = {
        "# One\n## Two ##\ntext": "<h3>One</h3><h4>Two</h4><p>text</p>",
        "a **b** *c* ~~e~~ `f*g*`": "<p>a <strong>b</strong> <em>c</em> <s>e</s> <code>f*g*</code></p>",
        "***d***": "<p><strong><em>d</em></strong></p>",
        "snake_case_name 2*3*4 is * not": "<p>snake_case_name 2<em>3</em>4 is * not</p>",
        "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul><p>more</p></li><li>d</li></ul>",
        "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
        "- a\n\n- b": "<ul><li>a</li><li>b</li></ul>",
        "```py x\n<b> & *c*\n\n  d\n```\nend": '<pre data-language="py"><code>&lt;b&gt; &amp; *c*\n\n  d</code></pre><p>end</p>',
        "```\nnot closed": "<pre><code>not closed</code></pre>",
        "> a\n> b\n\n---": "<blockquote><p>a\nb</p></blockquote><hr>",
        "\\*a\\* <b>x</b>": "<p>*a* &lt;b&gt;x&lt;/b&gt;</p>",
        "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
        "[x](https://e.org/a)": f"<p>{LINK.format('https://e.org/a', 'x')}</p>",
        "see http://e.org/b.": f"<p>see {LINK.format('http://e.org/b', 'http://e.org/b')}.</p>",
        "": "",
    }
    assert dict(zip(cases, ready(opened(server)).evaluate(RENDER, list(cases)), strict=True)) == cases


def test_hostile_markdown_is_harmless(server: Running, opened: Open) -> None:
    """Random Markdown gives only known elements, attributes and web links, and nothing is executed or fetched."""
    page = ready(opened(server))
    draw = random.Random(7)
    texts = ["".join(draw.choices(HOSTILE, k=draw.randrange(1, 14))) for _ in range(1500)]
    seen = set(page.evaluate(INSPECT, texts))
    assert {"a", "li", "code", "strong", "blockquote", "pre", "href https:"} <= seen <= TAGS | ATTRIBUTES
    assert page.title() == "Outrider"


def test_markdown_terminates_and_keeps_every_letter(server: Running, opened: Open) -> None:
    markup = ("*", "_a", "[", "](", "> ", "- ", "`", "``` `", "# ", "~", "<", "\\", "h", "**a", "[a](", "https://")
    long = [mark * 20_000 for mark in markup]
    long += ["~" * 20_000 + "`", "# " + " " * 20_000 + "x", "> " * 500 + "x\n" * 500]
    long += ["\n".join(" " * i + "- x" for i in range(300))]
    draw = random.Random(8)
    words = [" ".join(draw.choices(("alpha", "*beta*", "`gamma`", "**delta**", "[eps](https://e.org)"), k=30)) for _ in range(50)]
    page = ready(opened(server))
    texts = page.evaluate(
        "async texts => { const {markdown} = await import('/page/markdown.js'); return texts.map(text => {"
        " const root = document.createElement('div'); root.append(...markdown(text)); return root.textContent; }); }",
        long + words,
    )
    plain = [text.replace("*", "").replace("`", "").replace("[eps](https://e.org)", "eps") for text in words]
    assert texts[len(long) :] == plain


def answer_with(page: Page, text: str, reasoning: str = "") -> None:
    """Replace the text of every chat answer, after some reasoning. Everything else comes from the server."""

    def change(route: Route) -> None:
        response = route.fetch()
        events, left, reasoning_left = response.text().split("\n\n"), text, reasoning
        for i, event in enumerate(events):
            if not event.startswith("data: {"):
                continue
            data = json.loads(event[6:])
            for choice in data["choices"]:
                if choice["delta"].get("content"):
                    choice["delta"]["content"], left = left, ""
                    choice["delta"]["reasoning_content"], reasoning_left = reasoning_left, ""
            events[i] = f"data: {json.dumps(data)}"
        route.fulfill(response=response, body="\n\n".join(events))

    page.route("**/v1/chat/completions", change)


def say(page: Page, text: str, **fields: Any) -> None:
    ask(page, text, **{"max_tokens": 12, **fields})
    ended(page)


def contents(body: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_answers_are_markdown_and_tokens(server: Running, opened: Open, keep: Callable[..., None]) -> None:
    page = chat(ready(opened(server)))
    answer_with(page, "# Title\n\n1. one\n2. **two**\n\n```python\nprint(1)\n```\n<b>x</b>")
    say(page, "Show me.")
    prose = page.locator(".prose")
    assert prose.locator("h3").inner_text() == "Title"
    assert prose.locator("ol li strong").inner_text() == "two"
    assert prose.locator("pre[data-language=python] code").inner_text() == "print(1)"
    assert "<b>x</b>" in prose.inner_text()
    keep(page, "chat-markdown")
    page.get_by_text("Tokens", exact=True).click()
    assert prose.is_hidden()
    assert page.locator(".token").first.is_visible()


def test_reasoning_stands_before_the_answer_and_folds_when_that_begins(server: Running, opened: Open) -> None:
    page = chat(ready(opened(server)))
    answer_with(page, "The **answer**.", "<b>Hm</b>, let me\nsee.")
    say(page, "Think first.")
    reasoning = page.locator(".reasoning")
    assert reasoning.locator("p").text_content() == "<b>Hm</b>, let me\nsee."
    assert reasoning.locator("p").is_hidden()
    reasoning.locator("summary").click()
    assert reasoning.locator("p").is_visible()
    assert page.locator(".prose strong").inner_text() == "answer"

    answer_with(page, "", "Only thoughts.")
    say(page, "Think.")
    assert page.locator(".reasoning p").nth(1).is_visible()
    answer_with(page, "No thoughts.")
    say(page, "Do not think.")
    assert page.locator(".reasoning").nth(2).is_hidden()


def test_a_message_is_edited_and_an_answer_regenerated(server: Running, opened: Open) -> None:
    page = chat(ready(opened(server)))
    bodies = sent(page)
    for text in ("First.", "Second.", "Third."):
        say(page, text)
    page.locator("run-turn").nth(1).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Another second.")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("run-turn:nth-child(2) .foot:has-text('reached')")
    ended(page)
    assert page.locator(".said").all_inner_texts() == ["First.", "Another second."]
    assert [text for role, text in contents(bodies[3]) if role == "user"] == ["First.", "Another second."]
    assert contents(bodies[3])[:2] == contents(bodies[1])[:2]

    page.locator("run-turn").nth(1).get_by_role("button", name="Regenerate").click()
    page.wait_for_function("seed => document.querySelector('#seed').value === seed", arg=str(bodies[3]["seed"] + 1))
    ended(page)
    assert contents(bodies[4]) == contents(bodies[3])
    assert bodies[4]["seed"] == bodies[3]["seed"] + 1  # regenerating with a given seed uses the next seed, which is shown
    assert page.input_value("#seed") == str(bodies[4]["seed"])
    page.fill("#seed", "")
    page.locator("run-turn").nth(1).get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    assert page.locator(".said").count() == 2
    assert len(bodies) == 5


def test_conversations_survive_a_reload_until_they_are_deleted(server: Running, opened: Open) -> None:
    page = chat(ready(opened(server)))
    page.fill("#system", "Be brief.")
    answer_with(page, "The **answer**.")
    say(page, "First talk.")
    page.reload()
    ready(page)
    assert page.locator(".said").all_inner_texts() == ["First talk."]
    assert page.locator(".prose strong").inner_text() == "answer"
    assert page.input_value("#system") == "Be brief."
    bodies = sent(page)
    say(page, "And then?")
    assert contents(bodies[0]) == [
        ("system", "Be brief."), ("user", "First talk."), ("assistant", "The **answer**."), ("user", "And then?"),
    ]  # fmt: skip
    page.get_by_role("button", name="New chat").click()
    say(page, "Second talk.")
    page.get_by_role("button", name="History").click()
    assert page.locator(".past span").all_inner_texts() == ["Second talk.", "First talk."]
    page.locator(".past", has_text="First talk.").click()
    assert page.locator(".said").all_inner_texts() == ["First talk.", "And then?"]
    page.get_by_role("button", name="History").click()
    page.get_by_label("Delete “First talk.”").click()
    assert page.locator(".said").count() == 0  # the conversation on the screen was deleted
    assert page.locator(".past span").all_inner_texts() == ["Second talk."]
    page.get_by_role("button", name="Delete all").click()
    assert page.evaluate("localStorage.getItem('outrider.conversations')") is None
    page.reload()
    assert ready(page).locator(".said").count() == 0


def test_the_history_has_bounds(server: Running, opened: Open) -> None:
    page = ready(opened(server))
    fill = (
        "async ([count, size]) => { const {save, conversations} = await import('/page/history.js');"
        " for (let i = 0; i < count; i++) save({id: `${i}`, system: '', messages:"
        " [{role: 'user', content: `talk ${i}`}, {role: 'assistant', content: 'x'.repeat(size)}]});"
        " return conversations().map(({title}) => title); }"
    )
    assert page.evaluate(fill, [45, 10]) == [f"talk {i}" for i in reversed(range(5, 45))]
    assert page.evaluate(fill, [20, 200_000]) == [f"talk {i}" for i in reversed(range(13, 20))]
    assert page.evaluate(fill, [1, 9_000_000])[0] != "talk 0"  # more than the browser's storage: earlier conversations stay
    quota = (
        "const set = Storage.prototype.setItem; Storage.prototype.setItem = function (key, value) {"
        " if (value.length > {limit}) throw new DOMException('full', 'QuotaExceededError'); return set.call(this, key, value); };"
    )
    small = ready(opened(server, script=quota.replace("{limit}", "2500")))
    assert small.evaluate(fill, [10, 500]) == [f"talk {i}" for i in reversed(range(7, 10))]
    none = chat(ready(opened(server, script=quota.replace("{limit}", "0"))))
    say(none, "Who keeps this?")
    assert none.locator("#unkept").is_visible()
    assert none.locator(".said").inner_text() == "Who keeps this?"


def test_a_damaged_history_is_ignored(server: Running, opened: Open) -> None:
    good = {"id": "1", "title": "kept", "changed": 1, "system": "", "messages": [{"role": "user", "content": "kept"}]}
    page = chat(ready(opened(server, script="localStorage.setItem('outrider.conversations', '{')")))
    for stored in ("{", '"x"', "null", "[null, 1, {}]", json.dumps([{"id": "0", "messages": [{"role": "x"}]}, good])):
        page.evaluate("stored => localStorage.setItem('outrider.conversations', stored)", stored)
        page.get_by_role("button", name="History").click()
        assert page.locator(".past").count() == ("kept" in stored)
        page.keyboard.press("Escape")


def test_stop_strings_min_p_and_a_schema_reach_the_model(server: Running, opened: Open) -> None:
    page = ready(opened(server))
    bodies = sent(page)
    page.click("summary")
    page.fill("#stop_strings", "return\n\\n\\n")
    ask(page, min_p=0.05, max_tokens=64)
    ended(page)
    assert (bodies[0]["stop"], bodies[0]["min_p"]) == (["return", "\n\n"], 0.05)
    assert "ended by itself" in page.inner_text(".foot")
    page.fill("#stop_strings", "")
    page.fill("#response_format", json.dumps(SCHEMA))
    ask(page, "Who? ", max_tokens=64)
    ended(page)
    assert bodies[1]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert json.loads("".join(token["text"] for token in shown(page)))["name"] in ("ada", "bob")
    page.fill("#response_format", "{nonsense")
    page.click("summary")
    ask(page)
    assert "JSON schema: " in page.inner_text("#trouble")
    assert page.get_attribute("#response_format", "aria-invalid") == "true"
    assert page.locator("details.more").get_attribute("open") is not None
    assert len(bodies) == 2


def test_a_tool_is_called_and_its_result_sent(server: Running, opened: Open, keep: Callable[..., None]) -> None:
    page = chat(ready(opened(server)))
    bodies = sent(page)
    page.click("summary")
    page.fill("#tools", json.dumps([TOOL]))
    page.select_option("#tool_choice", "required")
    say(page, "Weather in Rome?", max_tokens=96)
    call = page.locator(".call")
    assert call.locator("p").inner_text() == "Calls weather"
    assert json.loads(call.locator("pre").inner_text())["city"] in ("Oslo", "Rome")
    assert page.inner_text("#prompt-label") == "Result of weather"
    keep(page, "tool")
    page.select_option("#tool_choice", "none")
    say(page, "20 degrees")
    assert bodies[0]["tools"] == [TOOL]
    *_, called, result = bodies[1]["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "weather"
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "20 degrees"}
    assert page.inner_text("#prompt-label") == "Your message"
    page.reload()
    assert ready(page).locator(".call").count() == 1
