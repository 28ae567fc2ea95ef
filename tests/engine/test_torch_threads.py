"""A program that loads an LLM keeps its torch thread count; only the engine's thread has one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.core import Batch, Drafts, Needs, Plan
from outrider.ops import find_core
from tests.support import write_family

COUNT = 3  # neither one nor the machine's


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(COUNT)
    yield write_family(tmp_path, "llama2")
    torch.set_num_threads(before)
    if (core := find_core()[0]) is not None:
        core.take_threads()


def elsewhere() -> int:
    """Torch's count on a thread that has not used it yet."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


class Counting:
    """Notes torch's thread count where it is called, and guesses nothing."""

    needs = Needs()
    seen: list[int] = []  # noqa: RUF012 (of the class, to be read by the test)

    def begin(self, *_: object) -> None: ...

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self.seen.append(torch.get_num_threads())
        return Drafts.empty(len(plan.lengths))

    def commit(self, *_: object) -> None: ...

    def end(self, *_: object) -> None: ...


@pytest.mark.parametrize("speculation", ["none", "auto", f"{__name__}:Counting:adaptive=false"])
def test_the_thread_count_of_the_process_stays(model: Path, both_paths: str, speculation: str) -> None:
    here = 1 if both_paths == "native" else COUNT  # where torch decodes it needs its threads
    Counting.seen.clear()
    with LLM(model, load_format="dummy", speculation=speculation, calibration_s=0.2) as llm:
        assert (torch.get_num_threads(), elsewhere()) == (COUNT, COUNT)
        llm.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)
        assert (torch.get_num_threads(), elsewhere()) == (COUNT, COUNT)
        assert llm.thread.ask(lambda _: torch.get_num_threads()).result() == here
        if both_paths == "native":
            core = llm.engine.runner.ops.core
            assert core is not None
            assert core.threads == COUNT
    assert set(Counting.seen) <= {here}
    assert bool(Counting.seen) == ("Counting" in speculation)
    assert (torch.get_num_threads(), elsewhere()) == (COUNT, COUNT)
