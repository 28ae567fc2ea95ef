"""A function in another process: results, faults, and an end with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outrider.process import ProcessDied, PythonProcess


def test_results_come_back_and_the_process_stays() -> None:
    calls = PythonProcess("os:getpid")
    try:
        first = calls()
        assert first == calls()
        assert first != os.getpid()
    finally:
        calls.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_fault_of_the_function_is_told_and_survived() -> None:
    calls = PythonProcess("operator:truediv")
    try:
        assert calls(1, 2) == 0.5
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            calls(1, 0)
        assert calls(3, 2) == 1.5
    finally:
        calls.close()


def test_a_process_that_dies_is_replaced() -> None:
    calls = PythonProcess("os:_exit")
    for _ in range(2):
        with pytest.raises(ProcessDied):
            calls(3)
    calls.close()


def test_what_the_function_prints_does_not_reach_the_answers(capfd: pytest.CaptureFixture[str]) -> None:
    calls = PythonProcess("builtins:print")
    try:
        assert calls("hello") is None
        assert calls("hello") is None
    finally:
        calls.close()


def test_it_ends_with_its_parent() -> None:
    script = "import os; from outrider.process import PythonProcess; print(PythonProcess('os:getpid')(), flush=True); os._exit(0)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env, timeout=60)
    assert int(out.stdout), "the child holds the pipe of stderr too, so run() has waited for its end"


def test_a_call_beyond_its_budget_is_killed_and_the_next_one_served() -> None:
    calls = PythonProcess("time:sleep")
    try:
        with pytest.raises(ProcessDied):
            calls(60, budget=0.05)
        assert calls(0, budget=30.0) is None
        assert calls.starts == 2
    finally:
        calls.close()


def test_a_setup_is_called_once_in_each_process() -> None:
    calls = PythonProcess("operator:attrgetter", setup=lambda: ("real",))
    try:
        assert (calls(3), calls(4)) == (3, 4)
        assert calls.starts == 1
    finally:
        calls.close()
