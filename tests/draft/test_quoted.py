"""Lines of a file in the JSON strings of tool calls, drafted from the prompt. Every byte is a token here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.patches import Words, lines_of
from outrider.draft.quoted import QuotedCursor

FILE = '''import os


def first(path, "naïve"):
    """One."""
\treturn os.stat(path) or "\\\\n"


def second(path):
    return os.lstat(path)
'''
BYTES = {byte: (False, bytes([byte])) for byte in range(256)}
NUMBERED = "".join(f"{number:6}\t{line}" for number, line in enumerate(FILE.splitlines(True), 1))
ARROWS = "".join(f"{number:5}→{line}" for number, line in enumerate(FILE.splitlines(True), 1))


def after(output: bytes, prompt: str = FILE, room: int = 40) -> Words | None:
    text = [*f"The file:\n{prompt}\nEdit it.\n".encode()]
    cursor = QuotedCursor(tuple(text), BYTES)
    for byte in output:  # one by one, as they come
        text.append(byte)
        cursor.advance(text)
    return cursor.guess(room)


def words(output: str, prompt: str = FILE) -> str:
    found = after(output.encode(), prompt)
    return "" if found is None else found.text


def call(**arguments: Any) -> str:
    return json.dumps({"name": "edit", "arguments": arguments}, ensure_ascii=False)


def upto(mark: str, **arguments: Any) -> str:
    text = call(**arguments)
    return text[: text.index(mark) + len(mark)]


@pytest.mark.parametrize("prompt", [FILE, NUMBERED, ARROWS], ids=["bare", "numbered", "arrows"])
def test_a_string_goes_on_as_the_file_does_escaped(prompt: str) -> None:
    text = call(content=FILE)
    begun = text.index("def f") + 5
    assert words(text[:begun], prompt).startswith(text[begun:].removesuffix('"}}'))
    line = text.index("\\n\\ndef sec") + 4
    assert words(text[:line], prompt).startswith("def second(path):\\n    return os.lstat")


def test_every_place_behind_the_first_letters_is_guessed() -> None:
    """Also inside an escape, where its backslash is one token and the letter another."""
    text = call(content=FILE)
    start, end = text.index("import os") + 4, text.index("(path)\\n", text.index("second") + 20)
    for place in range(start, end):
        guess = words(text[:place])
        assert guess, text[:place]
        assert text[place : place + 9].startswith(guess[:9])


def test_what_replaces_a_text_begins_as_it_did() -> None:
    old = "def second(path):\n    return os.lstat(path)"
    text = call(old=old, new="x")
    assert words(text[: text.index('"x"') + 1]).startswith("def second(path):\\n    return os.lstat(path)\\n")
    assert words(upto('"old": "', old=old)) == "", "nothing tells where it begins"
    assert words(text + "\n" + upto('"path": "', path="a.py")) == "", "another call begins"


def test_a_changed_line_and_a_name_that_is_changed_throughout() -> None:
    new = FILE.replace("path", "folder")
    text = call(content=new)
    begun = text.index("second(") + 7
    assert words(text[:begun]).startswith("folder):\\n    return os.lstat(folder)\\n")
    text = call(content=FILE.replace("One.", "Two."))
    assert words(text[: text.index("Two.") + 10]).startswith("\\n\\treturn os.stat"), "the line ends as the old one did"


def test_a_name_that_is_not_changed_everywhere_is_left_alone() -> None:
    text = call(content=FILE.replace("first(path", "first(folder"))
    assert words(text[: text.index("def sec") + 7]).startswith("ond(path):")


def test_text_outside_of_strings_has_no_guess() -> None:
    for output in ("import os\n\n\ndef fi", '{"content": 3, "import os', '{"a": "import os\\n"}\ndef fi', 'He said: "import o'):
        assert words(output) == ""


def test_numbers_that_belong_to_a_table_stay() -> None:
    table = "7\tseven\n3\tthree\n12\ttwelve\n"
    assert lines_of(tuple(table.encode()), BYTES)[:3] == [b"7\tseven", b"3\tthree", b"12\ttwelve"]
    assert lines_of(tuple(NUMBERED.encode()), BYTES) == FILE.encode().split(b"\n")


@given(st.lists(st.sampled_from(['"a": "', "import os", "\\n", "\\", '"', "}", "\\u00e9", "\\ud83d", "def first", "\x00", "é"])))
def test_any_output_will_do(pieces: list[str]) -> None:
    found = after(f'{{"b": "{"".join(pieces)}'.encode())
    assert found is None or found.text


def test_a_very_long_line_costs_no_memory() -> None:
    text = [*FILE.encode()]
    cursor = QuotedCursor(tuple(text), BYTES)
    text += [*b'{"data": "', *b"A" * 100_000]
    cursor.advance(text)
    assert len(cursor._line) <= 2000
    assert cursor.guess(8) is None
