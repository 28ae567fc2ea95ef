"""The comparison: every engine and mode on the same prompts, interleaved, each engine in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import outrider
from benchmarks.baselines.figures import Measured, PromptRun, Reference, ratios, record
from benchmarks.baselines.to_gguf import write_gguf
from benchmarks.baselines.weights import export_model, find_model
from outrider.errors import InvalidParameter, OutriderError
from outrider.model import read_spec
from outrider.text import Tokenizer

__all__ = ["ENGINES", "BaselineSetting", "compare_baselines"]

ENGINES = ("outrider", "transformers", "llama.cpp", "openvino")
_INSTALL = "pip install 'outrider[baselines]'"
_TOP = 20  # likeliest tokens among which another engine's choice is looked up
_WORKER = Path(__file__).with_name("worker.py")
_MODES = {  # as their documentation shows them; the shorter lookups are its advice for processors
    "transformers": ("plain", "lookup:10", "lookup:3", "draft", "draft:5"),
    "llama.cpp": ("plain", "lookup:10", "lookup:2", "draft:5"),
    "openvino": ("plain", "lookup:10", "lookup:5", "draft:5"),
}
_KINDS = {  # weights of an engine: (kind it is compared under, its name for them)
    "outrider": (("bf16", "bfloat16"), ("int8", "int8")),
    "transformers": (("bf16", "bfloat16"),),
    "llama.cpp": (("bf16", "BF16"), ("int8", "Q8_0")),
    "openvino": (("bf16", "F16"), ("int8", "INT8")),
}
_ON_GPU = ("plain", "compiled", "draft", "draft:5", "lookup:10")


@dataclass(frozen=True, slots=True)
class BaselineSetting:
    """What is compared, and how often."""

    engines: Sequence[str] = ENGINES
    methods: Sequence[str] = ("none", "auto")  # of Outrider; the first is plain decoding
    prompts: Sequence[str] = ()
    tokens: int = 128
    prefill: int = 512
    repeats: int = 2
    threads: int = 2
    device: str = "cpu"
    pythons: Mapping[str, str] = field(default_factory=dict)  # where an engine is installed, if elsewhere
    kinds: Sequence[str] = ("bf16", "int8")  # of weights, all loaded at once
    plain_only: bool = False


class Worker:
    """An engine's process, with its model loaded."""

    def __init__(self, load: Mapping[str, Any], python: str, folder: Path) -> None:
        self.engine, self.kind = load["peer"], load["kind"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        source = str(Path(outrider.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]) if self.engine == "outrider" else ""
        threads = str(load["threads"])
        environment = os.environ | {"OUTRIDER_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment | ({"PYTHONPATH": path} if path else {}),
            text=True,
        )
        self.answer = self.ask(load)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer; for a process that died, an error with the last line it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
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
class _Contender:
    """One engine, kind of weights and mode, and the process that serves it."""

    worker: Worker
    measured: Measured

    def ask(self, ids: Sequence[int], tokens: int, **more: int) -> dict[str, Any] | None:
        if self.measured.failure is None:
            answer = self.worker.ask({"mode": self.measured.mode, "ids": ids, "tokens": tokens, **more})
            if "total_s" in answer:
                return answer
            self.measured.failure = answer.get("error") or answer.get("missing")
        return None


def compare_baselines(model: str, setting: BaselineSetting, say: Callable[[str], None]) -> dict[str, Any]:
    """Rows and ratios for one model. Engines that are not installed are named with how to get them."""
    if unknown := [name for name in setting.engines if name not in ENGINES]:
        raise InvalidParameter("--engines", f"unknown {unknown[0]!r}; known: {', '.join(ENGINES)}")
    bare = find_model(model) is None
    # random models may be large: one kind of weights at a time, or memory would not hold all engines
    turns = [[kind] for kind in setting.kinds] if bare else [setting.kinds]
    with tempfile.TemporaryDirectory(prefix="outrider-baselines-") as folder:
        say(f"{model}: writing weights")
        source = export_model(model, Path(folder) / "model")
        settings = [replace(setting, kinds=kinds, plain_only=bare or setting.plain_only) for kinds in turns]
        parts = [_measure(model, source, each, say) for each in settings]
    rows = [row for part in parts for row in part["rows"]]
    merged = {name: {key: part[name][key] for part in parts for key in part[name]} for name in ("missing", "versions")}
    return {"rows": rows, "ratios": {model: ratios(rows)}, **merged}


def _measure(model: str, source: Path, setting: BaselineSetting, say: Callable[[str], None]) -> dict[str, Any]:
    """Rows of all engines in these kinds of weights, which were missing, and versions."""
    missing: dict[str, str] = {}
    versions: dict[str, str] = {}
    rows: list[_Contender] = []
    prompts = _prompt_ids(model, setting, source)
    with ExitStack() as stack:
        for load in _loads(source, setting, missing):
            say(f"{model}: loading {load['peer']} {load['kind']}")
            worker = Worker(load, setting.pythons.get(load["peer"], sys.executable), source.parent)
            stack.enter_context(worker)
            if "versions" not in worker.answer:
                missing[load["peer"]] = _absence(worker.answer)
                continue
            versions |= worker.answer["versions"]
            rows += [_Contender(worker, Measured(worker.engine, worker.kind, mode)) for mode in load["modes"]]
        _interleave(rows, prompts, setting, lambda i: say(f"{model}: repeat {i} of {setting.repeats}"))
        say(f"{model}: comparing texts")
        plain_rows = {row.measured.kind: row for row in reversed(rows) if row.measured.engine == "outrider" and row.measured.runs}
        finds_loops = find_model(model) is not None
        references = {kind: _reference(row, prompts, finds_loops) for kind, row in plain_rows.items()}
        records = [record(model, row.measured, references.get(row.measured.kind)) for row in rows]
    return {"rows": records, "missing": missing, "versions": versions}


def _absence(answer: Mapping[str, Any]) -> str:
    if "missing" in answer:
        return f"{answer['missing']}; {_INSTALL}, or name the Python that has it with --python"
    return str(answer.get("error"))


def _loads(source: Path, setting: BaselineSetting, missing: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What each process has to load; files are written when the engine that reads them is next."""
    context = read_spec(source).context
    for engine in setting.engines:
        if setting.device != "cpu" and engine not in ("outrider", "transformers"):
            missing[engine] = f"is compared on the CPU alone, not on {setting.device}"
            continue
        for kind, dtype in _KINDS[engine][:1] if setting.device != "cpu" else _KINDS[engine]:  # a GPU serves bf16
            if kind not in setting.kinds:
                continue
            shared = {"peer": engine, "kind": kind, "dtype": dtype, "threads": setting.threads, "context": context}
            files = {"model": str(source), "draft": str(source / "draft") if (source / "draft").exists() else None}
            if engine in ("llama.cpp", "openvino"):
                try:
                    files = _gguf_files(source, "F16" if engine == "openvino" else dtype)
                except OutriderError as error:
                    missing[engine] = str(error)
                    break
            modes = setting.methods if engine == "outrider" else _ON_GPU if setting.device != "cpu" else _MODES[engine]
            if setting.plain_only:
                modes = modes[:1]
            modes = [mode for mode in modes if files["draft"] or not mode.startswith("draft")] if engine != "outrider" else modes
            yield shared | files | {"modes": list(modes), "device": setting.device}


def _gguf_files(source: Path, kind: str) -> dict[str, str | None]:
    out: dict[str, str | None] = {"model": None, "draft": None}
    for name, directory in (("model", source), ("draft", source / "draft")):
        if directory.exists():
            path = source.parent / f"{name}-{kind}.gguf"
            if not path.exists():
                write_gguf(directory, path, kind)
            out[name] = str(path)
    return out


def _prompt_ids(model: str, setting: BaselineSetting, source: Path) -> list[list[int]]:
    """The prompts in tokens; what has no tokenizer reads made-up ones. The last is for the prefill alone."""
    tokenizer, vocab = Tokenizer.load(source), read_spec(source).vocab
    made_up = [[(i * 7919 + j * 104729) % vocab for i in range(64)] for j in range(max(len(setting.prompts), 1))]
    prompts = made_up if tokenizer is None else [tokenizer.encode(text) for text in setting.prompts]
    longest = read_spec(source).context - setting.tokens
    if any(len(ids) > longest for ids in prompts):
        raise InvalidParameter(
            "--prompts", f"one is longer than {longest} tokens, all that {model} can read before {setting.tokens}"
        )
    joined = [token for ids in prompts * (setting.prefill // sum(map(len, prompts)) + 1) for token in ids]
    return [*prompts, joined[: setting.prefill]]


def _interleave(
    rows: Sequence[_Contender], prompts: Sequence[Sequence[int]], setting: BaselineSetting, say: Callable[[int], None]
) -> None:
    """Every repeat runs all prompts through all rows; the zeroth, a quarter as long, warms up and is not counted."""
    *texts, long = prompts
    for repeat in range(setting.repeats + 1):
        say(repeat)
        tokens = setting.tokens if repeat else max(setting.tokens // 4, 2)
        order = rows if repeat % 2 else rows[::-1]
        runs: dict[int, list[PromptRun]] = {id(row): [] for row in rows}
        for ids in texts:
            for row in order:
                if answer := row.ask(ids, tokens):
                    run = PromptRun(answer["total_s"] - answer["first_s"], answer["total_s"], answer["ids"])
                    runs[id(row)].append(run)
        for row in order:
            first = row.ask(long, 1) if row.measured.mode in ("plain", "none") else None
            if repeat and row.measured.failure is None:
                row.measured.runs.append(runs[id(row)])
                if first is not None:
                    row.measured.prefill.append(first["total_s"])


def _reference(row: _Contender, prompts: Sequence[Sequence[int]], finds_loops: bool) -> Reference:
    """What a row of Outrider's wrote, and how likely each of its tokens and their rivals were."""
    texts = row.measured.texts
    answers = [row.ask(ids, len(text), top=_TOP) for ids, text in zip(prompts, texts, strict=False)]
    top = [[dict(position) for position in answer["top"]] for answer in answers if answer]
    return Reference(texts, top, finds_loops)
