"""LoRA adapters over HTTP: chosen by model name, loaded and unloaded while the server runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from benchmarks.lora import write_adapter
from outrider import LLM
from outrider.errors import InvalidParameter
from outrider.serve.flags import parse_loras
from tests.support.server import Running

Starter = Callable[..., Running]
KEY = ("secret",)
ASK: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folders(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{i}", llm.config, 8, i) for i in range(2)]


@pytest.fixture
def server(server_with: Starter, llm: LLM) -> Iterator[Running]:
    yield server_with(api_key=KEY)
    for name in llm.loras:
        llm.unload_lora(name)


def load(server: Running, name: str, folder: Path | str, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder), **more)


def text(server: Running, model: str) -> str:
    answer = server.post("/v1/completions", model=model, **ASK)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_adapters_are_models(server: Running, folders: list[Path], llm: LLM) -> None:
    for name, folder in zip("ab", folders, strict=True):
        answer = load(server, name, folder)
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY[0])
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["pyrite", "a", "b"]
    assert cards["a"].model_dump()["parent"] == "pyrite"
    assert client.models.retrieve("b").model_dump()["root"] == str(folders[1])
    texts = {name: text(server, name) for name in ("pyrite", "a", "b")}
    assert len(set(texts.values())) == 3
    for name, lora in (("pyrite", None), ("a", "a"), ("b", "b")):
        alone = llm.generate(ASK["prompt"], lora=lora, max_tokens=12, temperature=0.0, speculation=False)
        assert texts[name] == alone[0].outputs[0].text
    events = server.events("/v1/completions", model="a", **ASK)
    assert "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"]) == texts["a"]
    assert {event["model"] for event in events[:-1]} == {"a"}
    with pytest.raises(NotFoundError, match="'c' is not served here"):
        client.completions.create(model="c", prompt="x")


def test_unloading(server: Running, folders: list[Path]) -> None:
    """A stream that runs with the adapter goes on to its end; the name is unknown at once."""
    load(server, "a", folders[0])
    body = ASK | {"max_tokens": 200, "ignore_eos": True}
    want = server.post("/v1/completions", model="a", **body).json()["choices"][0]["text"]
    pieces: list[str] = []
    first, unloaded = threading.Event(), threading.Event()

    def read() -> None:
        headers = {"Authorization": f"Bearer {KEY[0]}"}
        with server.http.stream("POST", "/v1/completions", json=body | {"model": "a", "stream": True}, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first.set()
                    unloaded.wait(30)
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(30)
    answer = server.post("/v1/unload_lora_adapter", lora_name="a")
    unloaded.set()
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert server.post("/v1/completions", model="a", **ASK).status_code == 404
    reader.join()
    assert "".join(pieces) == want
    assert server.post("/v1/unload_lora_adapter", lora_name="a").status_code == 404
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["pyrite"]


def test_an_adapter_is_replaced_in_place(server: Running, folders: list[Path]) -> None:
    load(server, "a", folders[0])
    before = text(server, "a")
    assert load(server, "a", folders[1]).status_code == 400
    assert load(server, "a", folders[1], load_inplace=True).status_code == 200
    assert text(server, "a") != before


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lora_name": "x", "lora_path": "/does/not/exist"}, "no folder"),
    ({"lora_name": "pyrite", "lora_path": "."}, "name of the model"),
    ({"lora_name": "x", "lora_path": "."}, "adapter_config.json is missing"),
    ({"lora_name": " ", "lora_path": "."}, "1 to 256 characters"),
    ({"lora_name": "x"}, "lora_path"),
    ({"lora_name": 3, "lora_path": "."}, "lora_name"),
    ({"lora_name": "x", "lora_path": "a\0b"}, "folder"),
]


@pytest.mark.parametrize(("body", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_adapters_are_refused_and_change_nothing(server: Running, body: dict[str, Any], words: str) -> None:
    answer = server.post("/v1/load_lora_adapter", **body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["pyrite"]
    assert server.post("/v1/completions", model="pyrite", **ASK).status_code == 200


def test_an_adapter_of_another_model_names_tensor_and_shapes(
    server: Running, folders: list[Path], tmp_path: Path, llm: LLM
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_adapter(tmp_path / "a", llm.config, 8)
    stored = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in stored if name.endswith("q_proj.lora_A.weight"))
    shape = tuple(stored[name].shape)
    stored[name] = stored[name].repeat(1, 2)
    save_file(stored, folder / "adapter_model.safetensors")
    error = load(server, "a", folder).json()["error"]
    assert error["code"] == "invalid_adapter"
    assert all(part in error["message"] for part in (name, str(shape), str((shape[0], 2 * shape[1]))))


def test_updates_are_off_without_a_key(server_with: Starter, folders: list[Path], llm: LLM) -> None:
    server = server_with()
    for path, body in (("load", {"lora_path": str(folders[0])}), ("unload", {})):
        answer = server.post(f"/v1/{path}_lora_adapter", lora_name="a", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lora_updates_off")
    server = server_with(api_key=KEY)
    bare = server.http.post("/v1/load_lora_adapter", json={}, headers={"Authorization": "Bearer wrong"})
    assert bare.status_code == 401
    server = server_with(allow_lora_updates=True)
    assert load(server, "a", folders[0]).status_code == 200
    assert server.post("/v1/unload_lora_adapter", lora_name="a").status_code == 200
    assert llm.loras == {}


def test_names_and_paths_on_the_command_line() -> None:
    assert parse_loras(["a=x/y", "b=p=q"], ["m"]) == {"a": "x/y", "b": "p=q"}
    for wrong in ("a", "=x", "a=", "m=x"):
        with pytest.raises(InvalidParameter, match="--lora"):
            parse_loras([wrong], ["m"])
    with pytest.raises(InvalidParameter, match="taken"):
        parse_loras(["a=x", "a=y"], ["m"])
