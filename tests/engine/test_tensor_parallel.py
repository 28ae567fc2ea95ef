"""`LLM(tensor_parallel_size=N)`: the same tokens with speculation on and off, and an end without anything left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.rank_identity import check_identities, identity_of
from outrider.engine.ranks import PORT, Ranks
from outrider.errors import InvalidParameter, ModelError, RankDied, RanksDiffer
from outrider.model import Feed, LoadOptions
from outrider.model.bundled import bundled_model
from tests.support import write_family
from tests.support.processes import children, command, is_running
from tests.support.server import until

PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "x = 1\n",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "from pathlib import Path\n",
    "while True:\n",
]
PARAMS = [
    SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=14, ignore_eos=True, logprobs=0, top_p=0.9)
    for i in range(len(PROMPTS))
]
METHODS = [
    "ngram", "suffix", "recycle", "lookahead", "draft_model", "eagle", "eagle:16:beam=3", "medusa", "early_exit",
    "early_exit:4:exit_layer=3", "cascade:8:levels=ngram+draft_model", "mixture:12:members=suffix+eagle", "auto",
]  # fmt: skip
GUESSING = {"lookahead", "draft_model", "eagle", "eagle:16:beam=3", "medusa", *METHODS[9:12]}  # they draft after any text
KINDS = [(2, "bfloat16"), (2, "int8"), (4, "bfloat16"), (4, "int8")]
pytestmark = pytest.mark.slow


class Shared:
    """One LLM at a time by ranks and dtype, and what it writes without speculation."""

    def __init__(self) -> None:
        self._kind: tuple[int, str] | None = None
        self._llm: LLM | None = None
        self._plain: list[object] = []

    def get(self, kind: tuple[int, str]) -> tuple[LLM, list[object]]:
        if self._kind != kind:
            self.close()
            self._llm = LLM(speculation="none", dtype=kind[1], tensor_parallel_size=kind[0], max_num_seqs=8, calibration_s=0)
            self._kind = kind
            self._plain = [written(self._llm, [i])[0] for i in range(len(PROMPTS))]
            assert_ranks_agree(self._llm, kind[0])
        assert self._llm is not None
        return self._llm, self._plain

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._kind = self._llm = None


def written(llm: LLM, which: list[int]) -> list[object]:
    """The tokens and their log probabilities of some of the prompts, as one batch."""
    outputs = [output.outputs[0] for output in llm.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which])]
    assert all(output.speculation["fallback_reason"] is None for output in outputs)
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.mark.grid(once=["method"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)  # varies least: each is loaded once
def test_the_same_tokens(shared: Shared, kind: tuple[int, str], batch: int, method: str) -> None:
    same_tokens(shared, kind, batch, method)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_tokens_everywhere(shared: Shared, kind: tuple[int, str], batch: int, method: str) -> None:
    same_tokens(shared, kind, batch, method)


def same_tokens(shared: Shared, kind: tuple[int, str], batch: int, method: str) -> None:
    llm, plain = shared.get(kind)
    name, *settings = method.split(":")
    pinned = ":".join([name, *(settings or ["4"]), "adaptive=false"]) if name != "auto" else name
    beside = llm.beside(pinned)
    which = list(range(batch)) if batch > 1 else [METHODS.index(method) % len(PROMPTS)]
    assert written(beside, which) == [plain[i] for i in which]
    assert beside.engine.tally.drafted or method not in GUESSING
    assert llm.engine.pages.used == 0


def assert_ranks_agree(llm: LLM, ranks: int) -> None:
    """Logits have the same bits on every rank, of prompts and of draft trees."""
    ids = [(17 * i) % 4000 for i in range(100)]
    pages = list(range(llm.engine.pages.count - 4, llm.engine.pages.count))
    feeds = [Feed(pages[:2], 0, ids), Feed(pages[2:], 0, ids[:9], [1, 2, 3, 4], [-1, 0, 0, 1])]
    digests = llm._host.call(lambda: llm.engine.runner.digests(feeds))  # type: ignore[attr-defined]
    assert len(digests) == ranks
    assert len(set(digests)) == 1


@pytest.mark.parametrize("kind", [KINDS[2]], ids=str)
def test_a_rank_that_dies_ends_the_llm(shared: Shared, kind: tuple[int, str]) -> None:
    llm, _ = shared.get(kind)
    ranks = processes(llm)
    stream = llm.stream(PROMPTS[0], max_tokens=1500, temperature=0.0, ignore_eos=True)
    next(stream)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        RankDied, match=rf"rank 2 of the model \(process {ranks[1]}\) was killed by SIGKILL; the others were ended"
    ):
        list(stream)
    assert time.monotonic() - began < 10, "what is promised"
    with pytest.raises(RankDied, match="load the model again"):
        llm.generate("x", max_tokens=2)
    until(lambda: not any(map(is_running, ranks)), 10)
    shared.close()


SCRIPT = """
import os, signal, sys, time
from outrider import LLM
llm = LLM(speculation="ngram", tensor_parallel_size=2, calibration_s=0)
print(*llm.engine.runner.others.processes, flush=True)
print(llm.generate("def f(x):", max_tokens=4, temperature=0.0)[0].outputs[0].token_ids, flush=True)
if "stay" in sys.argv:
    for _ in llm.stream("x = [", max_tokens=1500, temperature=0.0, ignore_eos=True):
        pass
"""


class Script:
    """A plain script without a main guard, in a process group of its own as in a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = folder / "script.py"
        path.write_text(SCRIPT)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.popen = subprocess.Popen(
            [sys.executable, str(path), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            cwd=folder, process_group=0,
        )  # fmt: skip
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.popen.communicate()[1]
        self.ranks = [int(word) for word in line.split()]
        self.first = self.popen.stdout.readline()

    def end(self, number: int) -> int:
        os.killpg(self.popen.pid, number)
        self.popen.communicate(timeout=60)
        until(lambda: not any(map(is_running, self.ranks)), 10)
        return self.popen.returncode


def test_a_plain_script_ends_with_nothing_left_behind(tmp_path: Path) -> None:
    script = Script(tmp_path)
    assert script.first.startswith("[")
    out, err = script.popen.communicate(timeout=60)
    assert (script.popen.returncode, out, err) == (0, "", "")
    assert not any(map(is_running, script.ranks))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_script_that_is_killed_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    script = Script(tmp_path, "stay")
    time.sleep(0.5)  # in the middle of rounds
    assert script.end(number) != 0


@pytest.mark.exhaustive
def test_a_rank_that_dies_while_nothing_runs() -> None:
    llm = LLM(speculation="none", tensor_parallel_size=2, calibration_s=0)
    (rank,) = processes(llm)
    os.kill(rank, signal.SIGKILL)
    until(lambda: llm.engine.runner.fault is not None, 10)
    with pytest.raises(RankDied, match="rank 1"):
        llm.generate("x", max_tokens=2)
    llm.close()
    assert not is_running(rank)


def processes(llm: LLM) -> list[int]:
    others = llm.engine.runner.others  # type: ignore[attr-defined]
    assert isinstance(others, Ranks)
    return others.processes


def test_ranks_with_other_weights_or_builds_are_refused(tmp_path: Path) -> None:
    mine = identity_of(bundled_model(), LoadOptions())
    check_identities([mine, dict(mine)])
    for name in mine:
        with pytest.raises(RanksDiffer, match=rf"rank 1 differs from rank 0 in {name} \(.* and other\); start them from one"):
            check_identities([mine, mine | {name: "other"}])
    folder = write_family(tmp_path, "llama2")
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(10**7))
    before = identity_of(folder, LoadOptions())["weights"]
    assert identity_of(folder, LoadOptions("float32"))["weights"] != before
    for place in (0, 10**7 - 1):  # sizes and times are equal
        changed = bytearray(10**7)
        changed[place] = 1
        weights.write_bytes(changed)
        assert identity_of(folder, LoadOptions())["weights"] != before


def ranks_here() -> set[int]:
    """The processes of ranks that this one has started."""
    return {child for child in children(os.getpid()) if b"outrider.engine.rank" in command(child)}


def test_ranks_that_differ_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = identity_of(bundled_model(), LoadOptions())
    monkeypatch.setattr("outrider.engine.ranks.identity_of", lambda *_: mine | {"torch": "1.0"})
    before = ranks_here()
    with pytest.raises(RanksDiffer, match=r"rank 1 differs from rank 0 in .*torch \(1.0 and "):
        LLM(speculation="none", tensor_parallel_size=2)
    assert ranks_here() <= before


def test_a_port_in_use_and_other_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidParameter, match="tensor_parallel_size: 3 ranks cannot share 8 attention heads evenly; this model takes 1, 2, 4$"
    ):
        LLM(tensor_parallel_size=3)
    with pytest.raises(InvalidParameter, match="tensor_parallel_size: must be"):
        LLM(tensor_parallel_size=0)
    with pytest.raises(InvalidParameter, match="lora: tensor parallel does not serve LoRA adapters yet"):
        LLM(tensor_parallel_size=2, lora={"a": adapter(tmp_path)})
    monkeypatch.setenv(PORT, "many")
    with pytest.raises(InvalidParameter, match=f"{PORT}: must be a port"):
        LLM(tensor_parallel_size=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv(PORT, str(taken.getsockname()[1]))
        with pytest.raises(InvalidParameter, match=f"{PORT}: port .* is in use"):
            LLM(tensor_parallel_size=2)


def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama2")
    with pytest.raises(ModelError, match="holds no"):
        LLM(folder, tensor_parallel_size=2)


def adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder
