"""The comparison: every peer and mode on the same prompts, interleaved, with medians and the ratios they are read for."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.peers.to_gguf import write_gguf
from outrider.bench.peers.weights import export_model, find_model
from outrider.errors import InvalidParameter, OutriderError
from outrider.model import ModelConfig
from outrider.text import Tokenizer

__all__ = ["PEERS", "Setting", "compare_peers", "ratios"]

PEERS = ("outrider", "transformers", "llama.cpp", "openvino")
_INSTALL = "pip install 'outrider[peers]'"
_AGREE = 32  # leading tokens compared with Outrider's
_WORKER = Path(__file__).with_name("worker.py")
_MODES = {  # as their documentation shows them; the shorter lookups are its advice for processors
    "transformers": ("plain", "lookup:10", "lookup:3", "draft", "draft:5"),
    "llama.cpp": ("plain", "lookup:10", "lookup:2", "draft:5"),
    "openvino": ("plain", "lookup:10", "lookup:5", "draft:5"),
}
_KINDS = {  # weights of a peer: (kind it is compared under, what it calls it)
    "outrider": (("bf16", "bfloat16"), ("int8", "int8")),
    "transformers": (("bf16", "bfloat16"),),
    "llama.cpp": (("bf16", "BF16"), ("int8", "Q8_0")),
    "openvino": (("bf16", "F16"), ("int8", "Q8_0")),
}
_ON_GPU = ("plain", "compiled", "draft", "draft:5", "lookup:10")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared, and how often."""

    peers: Sequence[str] = PEERS
    methods: Sequence[str] = ("none", "auto")  # of Outrider; the first is plain decoding
    prompts: Sequence[str] = ()
    tokens: int = 128
    prefill: int = 512
    repeats: int = 3
    threads: int = 2
    device: str = "cpu"
    pythons: Mapping[str, str] = field(default_factory=dict)  # where a peer lives, if elsewhere
    plain_only: bool = False


class Worker:
    """A peer's process, its model loaded."""

    def __init__(self, given: Mapping[str, Any], python: str, folder: Path) -> None:
        self.peer, self.kind = given["peer"], given["kind"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        source = str(Path(__file__).parents[3])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]) if self.peer == "outrider" else ""
        threads = str(given["threads"])
        environment = os.environ | {"OUTRIDER_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment | ({"PYTHONPATH": path} if path else {}),
            text=True,
        )
        self.answer = self.ask(given)

    def ask(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer; a process that died says so with its last words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(given), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            words = self._log.read().strip().splitlines()[-1:] or [f"exit code {self._process.wait()}"]
            return {"error": f"the process ended: {words[0]}"}
        return json.loads(line)  # type: ignore[no-any-return]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


@dataclass(slots=True)
class _Row:
    """One peer, kind of weights and mode: its runs, repeat by repeat."""

    worker: Worker
    mode: str
    decode: list[float] = field(default_factory=list)  # tok/s after the first token
    wall: list[float] = field(default_factory=list)  # tok/s from request to last token
    prefill: list[float] = field(default_factory=list)  # seconds
    texts: list[list[int]] = field(default_factory=list)
    failure: str | None = None

    def ask(self, ids: Sequence[int], tokens: int) -> dict[str, Any] | None:
        if self.failure is None:
            answer = self.worker.ask({"mode": self.mode, "ids": ids, "tokens": tokens})
            if "total_s" in answer:
                return answer
            self.failure = answer.get("error") or answer.get("missing")
        return None


def compare_peers(model: str, setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    """Rows and ratios for one model. Peers that are not installed are named with how to get them."""
    if unknown := [peer for peer in setting.peers if peer not in PEERS]:
        raise InvalidParameter("--peers", f"unknown {unknown[0]!r}; known: {', '.join(PEERS)}")
    missing: dict[str, str] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as name, ExitStack() as stack:
        folder = Path(name)
        say(f"{model}: writing weights")
        source = export_model(model, folder / "model")
        prompts = _prompt_ids(model, setting, source)
        rows: list[_Row] = []
        for given in _loads(source, folder, setting, find_model(model) is None, missing):
            say(f"{model}: loading {given['peer']} {given['kind']}")
            worker = stack.enter_context(Worker(given, setting.pythons.get(given["peer"], sys.executable), folder))
            if "versions" not in worker.answer:
                missing[given["peer"]] = _absence(worker.answer)
                continue
            versions |= worker.answer["versions"]
            rows += [_Row(worker, mode) for mode in given["modes"]]
        _interleave(rows, prompts, setting, lambda i: say(f"{model}: repeat {i} of {setting.repeats}"))
        reference = {kind: own.texts for own in rows for kind in [own.worker.kind] if own.worker.peer == "outrider" and own.texts}
        records = [_record(model, own, reference.get(own.worker.kind) or reference.get("bf16") or []) for own in rows]
    return {"rows": records, "ratios": {model: ratios(records)}, "missing": missing, "versions": versions}


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Outrider over its peers, as the comparison is read; above 1 it is ahead. None: one of the two did not run."""

    def best(peers: Sequence[str], kinds: Sequence[str], plain: bool | None = None) -> float | None:
        found = [
            row["tok_s"]
            for row in rows
            if row["peer"] in peers and row["kind"] in kinds and row["tok_s"] and plain in (None, _plain(row))
        ]
        return max(found, default=None)

    def prefill(peer: str, kind: str) -> float | None:
        return min((r["prefill_s"] for r in rows if r["peer"] == peer and r["kind"] == kind and r["prefill_s"]), default=None)

    others = [peer for peer in PEERS if peer != "outrider"]
    out: dict[str, float | None] = {}
    if any(row["mode"] == "compiled" for row in rows):  # on a GPU
        for mode, name in (("plain", "eager"), ("compiled", "compiled")):
            theirs = [row["tok_s"] for row in rows if (row["peer"], row["mode"]) == ("transformers", mode) and row["tok_s"]]
            out[f"plain bf16 over Transformers {name}"] = _over(best(["outrider"], ["bf16"], True), max(theirs, default=None))
    for kind, file in (("bf16", "BF16"), ("int8", "Q8_0")):
        own = best(["outrider"], [kind])
        out[f"plain {kind} over llama.cpp {file}"] = _over(best(["outrider"], [kind], True), best(["llama.cpp"], [kind], True))
        out[f"prefill {kind} over llama.cpp {file}"] = _over(prefill("llama.cpp", kind), prefill("outrider", kind))
        out[f"best {kind} over the fastest peer's best mode in {kind}"] = _over(own, best(others, [kind]))
        out[f"best {kind} over Transformers' best mode"] = _over(own, best(["transformers"], ["bf16"]))
    return out


def _plain(row: Mapping[str, Any]) -> bool:
    return row["mode"] in ("plain", "none")


def _over(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, 3) if ours and theirs else None


def _absence(answer: Mapping[str, Any]) -> str:
    if "missing" in answer:
        return f"{answer['missing']}; {_INSTALL}, or name the Python that has it with --python"
    return str(answer.get("error"))


def _loads(source: Path, folder: Path, setting: Setting, bare: bool, missing: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What each process is told to load; files are written when their peer's turn comes."""
    context = ModelConfig.read(source).context
    for peer in setting.peers:
        if setting.device != "cpu" and peer not in ("outrider", "transformers"):
            missing[peer] = f"is compared on the CPU alone, not on {setting.device}"
            continue
        for kind, own in _KINDS[peer][:1] if setting.device != "cpu" else _KINDS[peer]:  # a GPU serves bf16
            shared = {"peer": peer, "kind": kind, "dtype": own, "threads": setting.threads, "context": context}
            files = {"model": str(source), "draft": str(source / "draft") if (source / "draft").exists() else None}
            if peer in ("llama.cpp", "openvino"):
                try:
                    files = _gguf_files(source, folder, own)
                except OutriderError as error:
                    missing[peer] = str(error)
                    break
            modes = setting.methods if peer == "outrider" else _ON_GPU if setting.device != "cpu" else _MODES[peer]
            if bare or setting.plain_only:
                modes = modes[:1]
            modes = [mode for mode in modes if files["draft"] or not mode.startswith("draft")] if peer != "outrider" else modes
            yield shared | files | {"modes": list(modes), "device": setting.device}


def _gguf_files(source: Path, folder: Path, kind: str) -> dict[str, str | None]:
    out: dict[str, str | None] = {"model": None, "draft": None}
    for name, directory in (("model", source), ("draft", source / "draft")):
        if directory.exists():
            path = folder / f"{name}-{kind}.gguf"
            if not path.exists():
                write_gguf(directory, path, kind)
            out[name] = str(path)
    return out


def _prompt_ids(model: str, setting: Setting, source: Path) -> list[list[int]]:
    """The prompts in tokens; what has no tokenizer reads made-up ones. The last is for the prefill alone."""
    tokenizer, vocab = Tokenizer.load(source), ModelConfig.read(source).vocab
    made_up = [[(i * 7919 + j * 104729) % vocab for i in range(64)] for j in range(max(len(setting.prompts), 1))]
    prompts = made_up if tokenizer is None else [tokenizer.encode(text) for text in setting.prompts]
    longest = ModelConfig.read(source).context - setting.tokens
    if any(len(ids) > longest for ids in prompts):
        raise InvalidParameter(
            "--prompts", f"one is longer than {longest} tokens, all that {model} can read before {setting.tokens}"
        )
    joined = [token for ids in prompts * (setting.prefill // sum(map(len, prompts)) + 1) for token in ids]
    return [*prompts, joined[: setting.prefill]]


def _interleave(rows: Sequence[_Row], prompts: Sequence[Sequence[int]], setting: Setting, say: Callable[[int], None]) -> None:
    """Every repeat runs all prompts through all rows; the zeroth warms up and is not counted."""
    *texts, long = prompts
    for repeat in range(setting.repeats + 1):
        say(repeat)
        spent = {id(row): [0, 0.0, 0.0] for row in rows}
        order = rows if repeat % 2 else rows[::-1]
        for ids in texts:
            for row in order:
                answer = row.ask(ids, setting.tokens)
                if answer is None:
                    continue
                own = spent[id(row)]
                own[0] += len(answer["ids"])
                own[1] += answer["total_s"] - answer["first_s"]
                own[2] += answer["total_s"]
                if repeat == 0:
                    row.texts.append(answer["ids"])
        for row in order:
            first = row.ask(long, 1) if row.mode in ("plain", "none") else None
            tokens, decode, wall = spent[id(row)]
            if repeat and row.failure is None:
                row.decode.append((tokens - len(texts)) / decode if decode else 0.0)
                row.wall.append(tokens / wall)
                if first is not None:
                    row.prefill.append(first["total_s"])


def _record(model: str, row: _Row, reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One row as plain data."""
    agree = [
        next((i for i, (a, b) in enumerate(zip(own[:_AGREE], ours[:_AGREE], strict=False)) if a != b), len(own[:_AGREE]))
        / max(len(own[:_AGREE]), 1)
        for own, ours in zip(row.texts, reference, strict=False)
    ]
    return {
        "model": model,
        "peer": row.worker.peer,
        "kind": row.worker.kind,
        "mode": row.mode,
        "tok_s": _median(row.decode),
        "spread": [round(min(row.decode), 2), round(max(row.decode), 2)] if row.decode else None,
        "wall_tok_s": _median(row.wall),
        "prefill_s": _median(row.prefill, 5),
        "agrees": round(statistics.mean(agree), 3) if agree else None,
        "failure": row.failure,
    }


def _median(values: Sequence[float], digits: int = 2) -> float | None:
    return round(statistics.median(values), digits) if values else None
