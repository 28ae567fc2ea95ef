"""The LoRA adapters that requests may name: loading, unloading, and who runs with which."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from outrider import checks
from outrider.config import EngineConfig
from outrider.core import Adapter, Sequence
from outrider.errors import InvalidParameter
from outrider.model import Runner
from outrider.model.lora import LoraParts, read_lora

__all__ = ["Adapters", "check_adapters"]

_serials = count(1)


@dataclass(eq=False, slots=True)
class _Loaded:
    """An adapter, and the unfinished sequences that run with it."""

    adapter: Adapter
    folder: Path
    users: set[Sequence] = field(default_factory=set)
    is_named: bool = True  # False: it was unloaded, and ends with its last sequence


class Adapters:
    """Adapters of one runner, by name. Any thread may load and unload; the engine's thread acquires and releases.

    Sequences that run with an adapter when it is unloaded run to their end with it. Its name is free at once. Every loading
    has its own serial number, so the prefix cache never confuses two adapters of one name.
    """

    def __init__(self, runner: Runner, sizes: EngineConfig, base: str = "") -> None:
        self._runner = runner
        self._sizes = sizes
        self._base = base
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # one at a time, without holding up those who run
        self._by_serial: dict[int, _Loaded] = {}

    def load(self, name: str, path: str | Path, replace: bool = False) -> Adapter:
        """Load an adapter from a PEFT folder. With `replace` it takes the place of one of the same name."""
        folder = check_adapters({name: path}, self._runner.device_name)[name]
        with self._loading:
            self._check_free(name, replace)
            dtype = self._runner.adapters.dtype
            parts = read_lora(folder, self._runner.decoder, dtype, self._sizes.max_lora_rank, self._base)
            return self.add(name, parts, folder)

    def add(self, name: str, parts: LoraParts, folder: Path = Path()) -> Adapter:
        """Make an adapter ready for requests, in place of one of the same name."""
        adapter = Adapter(name, self._runner.adapters.add(parts), next(_serials))
        with self._lock:
            if (before := self._find(name)) is not None:
                self._retire(before)
            self._by_serial[adapter.serial] = _Loaded(adapter, folder)
        return adapter

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and free its memory when its last sequence has ended."""
        with self._lock:
            self._retire(self._named(name))

    def get(self, name: str) -> Adapter:
        """The adapter of a name."""
        with self._lock:
            return self._named(checks.text("lora", name)).adapter

    def folders(self) -> dict[str, Path]:
        """Names and folders, in the order of loading."""
        with self._lock:
            return {loaded.adapter.name: loaded.folder for loaded in self._by_serial.values() if loaded.is_named}

    def acquire(self, sequences: Iterable[Sequence]) -> None:
        """Keep the adapters of sequences until they are released; all, or none where one has been unloaded meanwhile."""
        with self._lock:
            users = [(self._by_serial.get(seq.request.adapter.serial), seq) for seq in sequences if seq.request.adapter]
            for loaded, seq in users:
                if loaded is None or not loaded.is_named:
                    assert seq.request.adapter is not None
                    raise InvalidParameter("lora", f"the adapter {seq.request.adapter.name!r} was unloaded", "model_not_found")
            for loaded, seq in users:
                assert loaded is not None
                loaded.users.add(seq)

    def release(self, seq: Sequence) -> None:
        """A sequence has ended."""
        adapter = seq.request.adapter
        if adapter is None:
            return
        with self._lock:
            loaded = self._by_serial.get(adapter.serial)
            if loaded is not None:
                loaded.users.discard(seq)
                self._free(loaded)

    def _check_free(self, name: str, replace: bool) -> None:
        with self._lock:
            before = self._find(name)
            if not replace and before is not None:
                raise InvalidParameter("lora", f"an adapter {checks.shown(name)} is loaded already; unload it first")
            leaves = before is not None and not before.users  # as soon as the new one is loaded
            if len(self._by_serial) - leaves >= self._sizes.max_loras:
                raise InvalidParameter("lora", f"{len(self._by_serial)} adapters are loaded or still in use, max_loras of them")

    def _retire(self, loaded: _Loaded) -> None:
        loaded.is_named = False
        self._free(loaded)

    def _free(self, loaded: _Loaded) -> None:
        if not loaded.is_named and not loaded.users:
            del self._by_serial[loaded.adapter.serial]
            self._runner.adapters.remove(loaded.adapter.number)

    def _find(self, name: str) -> _Loaded | None:
        named = (loaded for loaded in self._by_serial.values() if loaded.is_named and loaded.adapter.name == name)
        return next(named, None)

    def _named(self, name: str) -> _Loaded:
        loaded = self._find(name)
        if loaded is None:
            names = sorted(other.adapter.name for other in self._by_serial.values() if other.is_named)
            known = f"loaded: {', '.join(names)}" if names else "none is loaded"
            raise InvalidParameter("lora", f"there is no adapter {checks.shown(name)}; {known}", "model_not_found")
        return loaded


def check_adapters(adapters: Any, device: str) -> dict[str, Path]:
    """Names and folders of adapters, before anything is read; refused where the device does not run them."""
    if not isinstance(adapters, Mapping):
        raise InvalidParameter("lora", f"must be folders by name, such as {{'sql': 'path'}}, got {checks.shown(adapters)}")
    if adapters and device != "cpu":
        raise InvalidParameter("lora", f"no LoRA adapters on {device} yet; pass device=cpu")
    return {_checked_name(name): _folder(path) for name, path in adapters.items()}


def _checked_name(name: Any) -> str:
    if not checks.text("lora", name).strip() or len(name) > 256:
        raise InvalidParameter("lora", f"the name of an adapter must have 1 to 256 characters, got {checks.shown(name)}")
    return str(name)


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise InvalidParameter("lora", f"must be the folder of an adapter, got {checks.shown(path)}")
    folder = Path(path).expanduser()
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise InvalidParameter("lora", f"{checks.shown(str(path))} cannot be read: {error.strerror}") from None
    if not is_folder:
        raise InvalidParameter("lora", f"{checks.shown(str(path))} is no folder; pass one that holds adapter_config.json")
    return folder
