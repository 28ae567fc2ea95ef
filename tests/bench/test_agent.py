"""`outrider bench agent`: recorded answers are what the model writes, and a wrong draft is rejected as it would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench.agent import RECORDINGS, Replay, TurnSpeed, summary
from outrider.bench.cli import app
from outrider.bench.recordings import PlantedRunner, Turn, read_recordings
from outrider.core import Batch, Drafts, Scores, Sequence
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams
from tests.support import make_request

FILE = "".join(f"def {name}(path):\n    return path.{name}\n\n\n" for name in ("first", "parent", "name", "suffix"))


@pytest.fixture
def replayed() -> Replay:
    return Replay(None, "suffix:32:edits=1:shared_tokens=4096:shared_prompts=1:adaptive=false")


def test_the_bundled_recordings_edit_in_every_form() -> None:
    recordings = read_recordings(RECORDINGS)
    assert {recording.kind for recording in recordings} == {"rewrite", "search", "diff", "tool", "free"}
    assert all(recording.turns[0].user.strip() for recording in recordings)
    assert any(turn.forgets for recording in recordings if recording.kind == "rewrite" for turn in recording.turns)
    for recording in recordings:
        for _, turn in recording.prompts():
            assert (turn.answer is None) == (recording.kind == "free")


def test_prompts_hold_as_much_of_the_conversation_as_the_agent_kept() -> None:
    (recording,) = [one for one in read_recordings(RECORDINGS) if one.name == "rewrite rates.py compacted"]
    first, second, third = [prompt for prompt, _ in recording.prompts()]
    assert second.startswith(first)
    assert recording.turns[0].answer is not None
    assert recording.turns[0].answer in second
    assert third == recording.turns[2].user


def test_both_engines_write_what_was_recorded_and_edits_are_drafted(replayed: Replay) -> None:
    answer = FILE.replace("def name", "def title")
    plain, fast, prompt = replayed.run(f"{FILE}\n# With name renamed to title.\n", Turn("", answer), "a")
    assert [contestant.processors[0].output().text for contestant in (plain, fast)] == [answer, answer]
    assert prompt > 20
    assert plain.rounds > 4 * fast.rounds
    assert 0 < plain.first_token_s < plain.seconds
    again = replayed.run("# Once more.\n", Turn("", answer), "a")[1]
    assert plain.rounds > 4 * again.rounds
    drafter: Any = replayed.engines[1].drafter.drafter
    assert drafter.sources() == {("a", "a")}  # from the earlier turn
    assert replayed.runner.recorded == {}


def test_recorded_tokens_are_planted_along_the_recorded_path_alone() -> None:
    class Flat:
        def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
            return Scores(torch.zeros(1 + drafts.counts[0], 10), [0])

    runner = PlantedRunner(Flat())  # type: ignore[arg-type]
    seq = Sequence(make_request([1], SamplingParams(), name="r"))
    runner.recorded["r"] = [2, 3, 4]
    drafts = Drafts.trees([([2, 3, 5, 4], [-1, 0, 0, 1])])
    logits = runner.score(Batch([seq], [1]), drafts).logits
    assert [row.nonzero().flatten().tolist() for row in logits] == [[2], [3], [4], [], []]
    seq.tokens += [2, 3]
    assert runner.score(Batch([seq], [1]), Drafts.empty(1)).logits.argmax() == 4


def test_the_summary_names_the_slowest_and_the_least() -> None:
    rows = [TurnSpeed("a", kind, turn, 9, 9, speed, speed, speed * 2, 50.0, True) for kind, turn, speed in
            [("rewrite", 1, 4.0), ("rewrite", 2, 2.0), ("diff", 1, 3.0)]]  # fmt: skip
    made = summary(rows)
    assert made["by_kind"]["rewrite"] == {
        "speedup": 3.0,
        "with_prompt": 3.0,
        "tokens_per_round": 6.0,
        "least_tokens_per_round": 4.0,
    }
    assert made["by_turn"]["1"]["speedup"] == 3.5
    assert made["slowest_with_prompt"] == 2.0
    assert made["equal"] is True
    assert json.loads(json.dumps(made)) == made


def test_the_command_prints_one_json_line_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.bench.agent._CALIBRATION_S", 0.05)
    file = tmp_path / "own.jsonl"
    turns = [{"user": "x = 1\n", "answer": "x = 2\n"}, {"user": "y", "answer": None, "forgets": True}]
    file.write_text(json.dumps({"name": "own", "kind": "rewrite", "turns": turns}) + "\n")
    monkeypatch.setattr("outrider.bench.agent._FREE_TOKENS", 4)
    ran = CliRunner().invoke(app, ["agent", "--recordings", str(file), "--repeats", "1", "--method", "suffix"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["equal"]
    assert [row["turn"] for row in result["rows"]] == [1, 2]
    assert {"device", "versions", "command", "by_kind", "slowest_with_prompt"} <= set(result)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"name": "a", "kind": "b"}', '{"name": "a", "kind": "b", "turns": []}', "", "[" * 9999, "\xff"]
)
def test_what_is_no_recording_is_an_error_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(InvalidParameter, match="recordings: .*own.jsonl"):
        read_recordings(file)
