"""API keys: several keys with names, from a file that is reloaded while the server runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.serve.guard import Keys
from outrider.serve.settings import ServerSettings
from tests.support.server import Running

Starter = Callable[..., Running]
SPACE = st.text(" \t\r\n", max_size=3)
KEY = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(KEY, SPACE, SPACE)
def test_white_space_around_a_key_is_ignored(key: str, before: str, after: str) -> None:
    keys = Keys([before + key + after])
    assert keys.client_of(key.encode()) is not None
    assert keys.client_of(key.encode() + b"x") is None


def test_a_key_with_a_newline_is_accepted(server_with: Starter) -> None:
    server = server_with(api_key=("secret\n",))
    for sent, status in (("secret", 200), ("secre", 401), ("secrets", 401)):
        assert server.http.get("/version", headers={"Authorization": f"Bearer {sent}"}).status_code == status, sent


def test_several_keys_and_their_clients(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# teams\nalice:one\nbob: two \n\nthree\nalice:four\r\n")
    keys = Keys(["zero"], file)
    assert [keys.client_of(key) for key in (b"one", b"two", b"four")] == ["alice", "bob", "alice"]
    for unnamed in (b"zero", b"three"):
        name = keys.client_of(unnamed)
        assert name is not None
        assert unnamed.decode() not in name, "a key never appears in a name"
    for wrong in (b"", b"alice", b"alice:one", b"# teams", b"on", b"onee"):
        assert keys.client_of(wrong) is None
    assert len(keys.names) == 4


def test_a_key_file_reloads_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\n")
    keys = Keys([], file)
    file.write_text("bob:two\n")
    assert keys.client_of(b"two") is None
    keys.reload()
    assert (keys.client_of(b"two"), keys.client_of(b"one")) == ("bob", None)
    for broken in (b"", b"# none\n", b"a:one\nb:one\n", b"\xff\xfe", b"tab\there\n"):
        file.write_bytes(broken)
        with pytest.raises(InvalidParameter):
            keys.reload()
        assert keys.client_of(b"two") == "bob"
    file.unlink()
    with pytest.raises(InvalidParameter, match="cannot be read"):
        keys.reload()
    assert keys.needed


@pytest.mark.parametrize("bad", ["", " \n", "a\nb", "a\x00b"])
def test_keys_that_no_header_can_carry_are_refused(bad: str) -> None:
    with pytest.raises(InvalidParameter):
        Keys([bad])


def test_a_key_file_protects_a_public_address(tmp_path: Path) -> None:
    assert ServerSettings(host="0.0.0.0", api_key_file=tmp_path / "keys").needs_key


def test_every_key_of_a_server_is_accepted(server_with: Starter, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\n")
    server = server_with(api_key=("zero", "more"), api_key_file=file)

    def status(key: str) -> int:
        return server.http.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(key) for key in ("zero", "more", "one", "two")] == [200, 200, 200, 401]
    file.write_text("bob:two\n")
    server.app.state.keys.reload()
    assert [status(key) for key in ("zero", "more", "one", "two")] == [200, 200, 401, 200]
