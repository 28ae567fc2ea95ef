"""Names that users of other engines know: flags are answered with ours, and methods are understood."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import typer

from outrider import __version__, cli
from outrider.config import ALIASES, METHODS, RequestSpeculation, SpeculationConfig, parse_method
from outrider.draft import check_speculation
from outrider.errors import InvalidParameter
from outrider.other_engines import EQUIVALENTS, refuse_foreign_flags

FLAGS = [(engine, flag, ours) for engine, flags in EQUIVALENTS.items() for flag, ours in flags.items()]


def served_flags() -> set[str]:
    group: Any = typer.main.get_command(cli.app)
    return {name for command in group.commands.values() for option in command.params for name in option.opts}


@pytest.mark.parametrize(("engine", "flag", "ours"), FLAGS)
@pytest.mark.parametrize("command", [["serve"], ["generate", "x"], ["serve", "dir", "--port", "0"]])
def test_flags_of_other_engines_are_answered_with_ours(engine: str, flag: str, ours: str, command: list[str]) -> None:
    for words in ([flag, "4"], [f"{flag}=4"]):
        with pytest.raises(InvalidParameter) as refused:
            refuse_foreign_flags([*command, *words])
        assert str(refused.value) == f"{flag}: is a flag of {engine}; here: {ours}"


def test_flags_that_are_ours_are_not_refused() -> None:
    assert not {flag for _, flag, _ in FLAGS} & served_flags()
    refuse_foreign_flags(["generate", "--draft-tokens", "3", "x", "--", "--speculate"])


@pytest.mark.parametrize(("engine", "flag", "ours"), FLAGS)
def test_what_is_advised_exists(engine: str, flag: str, ours: str) -> None:
    words = shlex.split(ours.replace(";", " ").replace(",", " "))
    assert {word for word in words if word.startswith("--")} <= served_flags()
    for flag_name, value in pairwise(words):
        if flag_name == "--method" and "NAME" not in value:
            check_speculation(SpeculationConfig.parse({"model": "x"} | parse_method(value.replace("N", "4"))))


def test_the_command_line_answers_before_it_loads_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "serve", "--speculate", "4"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "--speculate: is a flag of TGI; here: --method ngram:N" in " ".join(done.stderr.split())


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[0] == __version__


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("standard", "draft_model"), ("sampling", "draft_model"), ("stochastic", "draft_model"), ("self", "early_exit"),
        ("self_speculative", "early_exit"), ("hierarchical", "cascade"), ("prompt_lookup", "ngram"), ("[ngram]", "ngram"),
        ("eagle2", "eagle"), ("eagle3", "eagle"),
    ],
)  # fmt: skip
def test_methods_have_their_other_names(name: str, method: str) -> None:
    assert name in ALIASES
    assert method in METHODS
    for speculation in (name, {"method": name}, f"{name}:7", {"method": name, "num_speculative_tokens": 7}):
        config = SpeculationConfig.parse(speculation)
        assert config.method == method
        if speculation not in (name, {"method": name}):
            assert config.draft_tokens == 7
    assert RequestSpeculation.parse({"method": name}).method == method


def test_eagle2_is_a_tree_unless_settings_say_otherwise() -> None:
    config = SpeculationConfig.parse("eagle2")
    assert (config.draft_tokens, dict(config.options)) == (24, {"beam": 3, "branch": 6, "depth": 9})
    assert dict(SpeculationConfig.parse("eagle2:12:beam=2").options) == {"beam": 2, "branch": 6, "depth": 9}
    check_speculation(config)


def test_other_names_work_inside_other_methods() -> None:
    config = SpeculationConfig.parse("mixture:24:members=prompt_lookup+eagle3")
    assert [member.method for member in config.nested()] == ["ngram", "eagle"]


def test_an_unknown_method_stays_an_error() -> None:
    with pytest.raises(InvalidParameter, match="known: auto, cascade"):
        check_speculation(SpeculationConfig.parse("eagle4"))
    with pytest.raises(InvalidParameter, match="method must be a name"):
        RequestSpeculation.parse({"method": ["eagle"]})
