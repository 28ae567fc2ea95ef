"""Diffs and search blocks, drafted from a file in the prompt. Every byte is a token here."""

from __future__ import annotations

import difflib

from outrider.draft.patches import PatchCursor, Words

FILE = """import os


def first(path):
    # One.
    return path


def second(path):
    # Two.
    return os.stat(path)
"""
EDITED = FILE.replace("# One.", "# The first.").replace("os.stat(path)", "os.lstat(path)")
DIFF = "".join(difflib.unified_diff(FILE.splitlines(True), EDITED.splitlines(True), "a/paths.py", "b/paths.py", n=1))
BYTES = {byte: (False, bytes([byte])) for byte in range(256)}


def after(output: str, prompt: str = f"paths.py:\n```python\n{FILE}```\nAnswer with a diff.\n") -> Words | None:
    text = [*prompt.encode()]
    cursor = PatchCursor(tuple(text), BYTES)
    for byte in output.encode():  # one by one, as they come
        text.append(byte)
        cursor.advance(text)
    return cursor.guess(24)


def words(output: str) -> str:
    found = after(output)
    return "" if found is None else found.text


def upto(mark: str) -> str:
    return DIFF[: DIFF.index(mark) + len(mark)]


def test_the_header_says_where_it_begins() -> None:
    assert words(upto("@@ -4,3 +4,3 @@\n")).startswith(" def first(path):\n     # One")


def test_lines_that_stay_have_a_space_and_what_follows_them() -> None:
    assert words(upto(" def fi")).startswith("rst(path):\n     # One.\n     return path\n")
    assert words(upto("+    # The first.\n")).startswith("     return path\n \n")


def test_a_line_that_goes_is_likely_to_come_again() -> None:
    assert words(upto("-    # O")) == "ne.\n+    # One."
    assert words(upto("-    # One.\n")) == "+    # One."
    assert words(upto("+    #")) == " One."
    assert words(upto("+    # The")) == ""


def test_it_finds_its_place_without_a_header() -> None:
    assert words("@@\n def sec").startswith("ond(path):\n     # Two.\n     return os.stat(path)\n ```\n")
    assert words("@@\n") == ""
    assert words("@@\n     # Tw").startswith("o.\n     return os.stat")


def test_text_that_is_no_diff_has_no_guess() -> None:
    assert words("def first(pa") == ""
    assert words(upto("return path\n") + "```\ndef first(") == ""
    assert words("@@ decorators\n\nAs you see, def first(") == ""


def test_every_line_of_a_recorded_diff_that_is_in_the_file_is_guessed() -> None:
    lines = DIFF.splitlines(True)[3:]  # behind the headers
    right = 0
    for i, line in enumerate(lines):
        begun = DIFF[: len(DIFF) - len("".join(lines[i:]))] + line[:1]
        right += line[0] in " -" and words(begun).startswith(line[1:])
    assert right == sum(line[0] in " -" for line in lines)


def test_what_replaces_a_searched_text_begins_with_it() -> None:
    output = "<<<<<<< SEARCH\ndef first(path):\n=======\n"
    text = [*b"prompt\n"]
    cursor = PatchCursor(tuple(text), BYTES)
    ended = []
    for byte in output.encode():
        text.append(byte)
        if cursor.advance(text):
            ended.append(len(text))
    assert ended == [len(text)]
    assert bytes(text[cursor.search_start :]).startswith(b"def first(path):\n=")


def test_any_bytes_will_do() -> None:
    for output in ("@@\n-\u00e9\n+\n-", "\n\n@@ -99999,1 @@\n ", "<<<<<<<\n>>>>>>>\n=======\n", "--- \n@@ -1 @@\n"):
        after(output)
