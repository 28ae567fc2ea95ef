"""The main benchmark: workloads, rows, equality counted, failures, interruption, one JSON line last."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.bench.record import read_rows, record_suite
from outrider.bench.suite import Suite, expand_methods, run_suite
from outrider.bench.validity import meets, read_schema
from outrider.bench.workloads import BUNDLED, Conversation, TurnReader, load_prompts
from outrider.cli import app
from outrider.engine import llm as llm_module
from outrider.engine.acceptance import read_items
from outrider.errors import InvalidParameter

REQUIRED = {
    "method", "workload", "batch", "tok_s", "tok_s_per_user", "speedup", "tokens_per_round", "mean_acceptance_length",
    "acceptance_rate", "accepted_by_position", "conversion", "efficiency", "equal",
}  # fmt: skip


def small(methods: str, workloads: list[str], **changes: Any) -> Suite:
    settings: dict[str, Any] = {"max_tokens": 12, "limit": 2, "repeats": 1} | changes
    return Suite(expand_methods(methods, []), workloads, **settings)


def rows_of(suite: Suite) -> list[dict[str, Any]]:
    return list(run_suite(suite, lambda text: None))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["def greet(name):\n", "and now in French"]},
        {"question_id": 2, "category": "math", "turns": ["def add(a, b):\n"]},
        {"question_id": 3, "category": "writing", "turns": ["class Poem:\n"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_bundled_workloads_hold_texts_of_their_own() -> None:
    for name in BUNDLED:
        prompts = load_prompts(name).categories[name]
        assert len(set(prompts)) == len(prompts) >= 16
    json_prompts = load_prompts("json").categories["json"]
    assert all('"' in str(prompt) and "{" in str(prompt) for prompt in json_prompts)


def test_files_by_category_and_plain_fields(mixed: Path, tmp_path: Path) -> None:
    loaded = load_prompts(str(mixed))
    assert loaded.name == "mixed"
    greeting = Conversation(("def greet(name):\n", "and now in French"))
    assert loaded.categories == {"writing": [greeting, "class Poem:\n"], "math": ["def add(a, b):\n"]}
    simple = tmp_path / "own.jsonl"
    simple.write_text('{"task_id": "HumanEval/0", "prompt": "def f():\\n"}\n{"text": "import os\\n"}\n')
    assert load_prompts(str(simple)).categories == {"own": ["def f():\n", "import os\n"]}


def test_files_of_other_benchmarks_are_read_as_they_are(tmp_path: Path) -> None:
    rows = {
        "mt": {"question_id": 1, "category": "math", "turns": ["a", "b"], "reference": ["x"]},
        "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": "t", "canonical_solution": "s"},
        "gsm8k": {"question": "How many?", "answer": "Two. #### 2"},
        "speed": {"question_id": "q", "category": "rag", "sub_category": "s", "turns": ["a", "b"], "difficulty": "low"},
        "chat": {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "category": "rag"},
    }
    expected = {"mt": ("math", ("a", "b")), "humaneval": (None, ("def f():",)), "gsm8k": (None, ("How many?",)),
                "speed": ("rag", ("a", "b")), "chat": ("rag", ("a",))}  # fmt: skip
    for name, row in rows.items():
        (path := tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        (packed := tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert read_items(path) == read_items(packed) == [expected[name]]
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_items(tmp_path / "broken.jsonl.gz")


def test_placeholders_of_speed_bench_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path.write_text(json.dumps({"turns": ["fine"]}) + "\n" + json.dumps({"turns": [text]}))
    with pytest.raises(InvalidParameter, match=r"speed\.jsonl:2 is a placeholder .* prepare_data\.py"):
        read_items(path)


def test_parquet_is_read_where_pyarrow_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(InvalidParameter, match="pip install pyarrow"):
            read_items(path)
    arrow = pytest.importorskip("pyarrow", reason="reads a parquet file: pip install pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(
        arrow.Table.from_pylist([{"category": "rag", "turns": ["a", "b"]}, {"category": "math", "turns": ["c"]}]), path
    )
    assert read_items(path) == [("rag", ("a", "b")), ("math", ("c",))]


@pytest.mark.parametrize(("name", "rows", "categories"), [("spec_bench", 480, 6), ("humaneval", 82, 1)])
def test_the_published_files_are_read(name: str, rows: int, categories: int) -> None:
    path = Path(os.environ.get("OUTRIDER_TEST_DATA", "data")) / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; OUTRIDER_TEST_DATA names the folder that holds it")
    loaded = load_prompts(str(path)).categories
    assert (sum(map(len, loaded.values())), len(loaded)) == (rows, categories)


@pytest.mark.parametrize(
    "line", [b"{", b'{"turns": []}', b'{"prompt": 5}', b'{"other": "x"}', b'["x"]', b'{"text": ""}', b'{"text": "\xff"}', b"7"]
)
def test_a_bad_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InvalidParameter, match=r"bad\.jsonl:3 is not"):
        record_suite(small("ngram", [str(path)]), tmp_path / "out", Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()


def test_what_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidParameter, match="holds no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidParameter, match=r"neither a workload \(code, .*constrained, random\) nor"):
        load_prompts("cod")
    with pytest.raises(InvalidParameter, match="random:256"):
        load_prompts("random:x", 100)
    assert {len(prompt) for prompt in load_prompts("random:5", 100).categories["random:5"]} == {5}


def test_methods_and_lengths() -> None:
    assert expand_methods("ngram,none,eagle:24:beam=3,auto", []) == ["none", "ngram", "eagle:24:beam=3", "auto"]
    assert expand_methods("suffix:min_match=2,eagle:24,auto", [4, 8]) == [
        "none", "suffix:4:min_match=2", "suffix:8:min_match=2", "eagle:24", "auto",
    ]  # fmt: skip
    with pytest.raises(InvalidParameter, match="eagel"):
        expand_methods("none,eagel", [])
    with pytest.raises(InvalidParameter, match="unknown setting 'colour'"):
        expand_methods("ngram:colour=2", [])
    with pytest.raises(InvalidParameter, match="must be above 0, got 1, 0"):
        small("ngram", ["code"], batches=[1, 0])
    with pytest.raises(InvalidParameter, match="temperature"):
        small("ngram", ["code"], temperatures=[-1.0])


def test_rows_by_category_and_batch(mixed: Path) -> None:
    rows = rows_of(small("ngram,eagle", [str(mixed), "random:9"], temperatures=[0.8], batches=[1, 3], repeats=2, max_tokens=8))
    marks = [(row["workload"], row["temperature"], row["batch"], row["category"], row["method"]) for row in rows]
    assert marks == [
        (workload, temperature, batch, category, method)
        for workload, categories in (("mixed", ("writing", "math", None)), ("random:9", (None,)))
        for temperature in (0.8,)
        for batch in (1, 3)
        for category in categories
        for method in ("none", "ngram", "eagle")
    ]
    for row in rows:
        assert row["failed"] is None
        assert row["equal"] == 1.0
        assert row["requests"] == (3 if row["category"] == "writing" or row["batch"] == 3 else 1) or row["category"] is None
        assert row["compared"] >= 2 * row["requests"]
        assert row["tok_s"] > 0
        assert row["speedup_interval"][0] <= row["speedup_interval"][1]
        assert row["tok_s_quartiles"][0] <= row["tok_s_quartiles"][1]
        shares = row["share_of_round"]
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= 0
        assert row["ms_per_round"]["wall"] == pytest.approx(sum(row["ms_per_round"][name] for name in shares))
        assert row["efficiency"] > 0
        assert row["ttft_ms"]["median"] > 0
        assert row["itl_ms"]["p99"] >= row["itl_ms"]["median"] > 0
    plain = [row for row in rows if row["method"] == "none"]
    assert {row["speedup"] for row in plain} == {1.0}
    assert {row["tokens_per_round"] for row in plain} == {1.0}
    for row in rows:
        rate = row["accepted"] / row["drafted"] if row["drafted"] else None
        assert row["acceptance_rate"] == pytest.approx(rate, abs=1e-4)
        assert row["conversion"] == pytest.approx(row["speedup"] / row["tokens_per_round"])
        assert (row["mean_acceptance_length"] is None) == (rate is None)
        if rate is not None:
            drafts = row["accepted"] / (row["mean_acceptance_length"] - 1) if row["accepted"] else 1.0
            assert drafts == pytest.approx(round(drafts), rel=1e-3)
            assert row["drafted"] <= 5 * round(drafts) or not row["accepted"]  # up to five tokens each
        assert row["tok_s_per_user"] > 0
    guessing = [row for row in rows if row["method"] == "eagle" and row["category"] is None]
    assert all(row["tokens_per_round"] > 1.0 and len(row["accepted_by_position"]) == 5 for row in guessing)


def test_a_difference_is_counted_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = llm_module.LLM.generate

    def spoilt(self, prompts, params=None, **kwargs):  # type: ignore[no-untyped-def]
        results = real(self, prompts, params, **kwargs)
        if self.speculation.method == "ngram" and params[0].seed == 0:
            results[0].outputs[0].token_ids[-1] += 1
        return results

    monkeypatch.setattr(llm_module.LLM, "generate", spoilt)
    code = record_suite(small("ngram,suffix", ["code"]), tmp_path, Console(file=io.StringIO()))
    assert code == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["method"], row["equal"]) for row in rows] == [("none", 1.0), ("ngram", 0.5), ("suffix", 1.0)]
    assert 'class="bad">50%' in (tmp_path / "report.html").read_text()


def test_failed_cases_are_reported_and_the_others_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = "ngram,draft_model:model=/nowhere,tests.bench.faulty:Raises"
    said = io.StringIO()
    code = record_suite(small(methods, ["code"]), tmp_path, Console(file=said))
    assert code == 1
    rows = {row["method"]: row for row in read_rows(tmp_path / "results.jsonl")}
    assert rows["none"]["failed"] is rows["ngram"]["failed"] is None
    assert "/nowhere" in rows["draft_model:model=/nowhere"]["failed"]
    assert "planted" in rows["tests.bench.faulty:Raises"]["failed"]
    assert said.getvalue().count("failed: ") >= 4  # as they happen, and at the end
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["failed"] is None for row in shown] == [True, True, False, False]
    assert "planted" in (tmp_path / "report.html").read_text()


def test_prompts_that_do_not_fit_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x = 1\n" * 2000}) + "\n" + json.dumps({"prompt": "x = 1\n"}))
    rows = rows_of(small("ngram", [str(path)]))
    assert {(row["skipped"], row["requests"]) for row in rows} == {(1, 1)}
    assert all("no prompt leaves room" in row["failed"] for row in rows_of(small("ngram", ["random:2040"])))


def test_a_schema_constrains_with_and_without_speculation(tmp_path: Path) -> None:
    rows = rows_of(small("ngram,auto", ["constrained"], limit=2, max_tokens=100))
    assert [row["method"] for row in rows] == ["none", "ngram", "auto"]
    assert all(row["failed"] is None and row["equal"] == row["complete"] == row["valid"] == 1.0 for row in rows)
    assert all(row["speedup"] > 0 for row in rows)
    (path := tmp_path / "schema.json").write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    rows = rows_of(small("ngram", ["code"], schema=read_schema(path), limit=1))
    assert [(row["valid"], row["tokens"] <= 3) for row in rows] == [(1.0, True), (1.0, True)]
    assert all("valid" not in row for row in rows_of(small("none", ["code"], limit=1)))


def test_validity_is_of_the_outputs_that_ended() -> None:
    schema = {"type": "integer", "minimum": 10}
    assert [meets(text, schema) for text in ("12", "9", '"12"', "1 2", "")] == [True, False, False, False, False]


def test_a_schema_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, message in (("[1]", "an object"), ("{", "cannot be read")):
        (path := tmp_path / "schema.json").write_text(content)
        with pytest.raises(InvalidParameter, match=message):
            CliRunner().invoke(app, ["bench", "run", "--schema", str(path)], catch_exceptions=False)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(InvalidParameter, match=r"outrider\[bench\]"):
        record_suite(small("none", ["constrained"]), tmp_path / "out", Console(file=io.StringIO()))


SPEC_BENCH = (
    "multi-turn conversation", "translation", "summarization", "question answering", "mathematical reasoning",
    "retrieval-augmented generation",
)  # fmt: skip
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    """A file with the categories of Spec-Bench, whose retrieval prompts are longer than Pyrite's context."""
    lines = [{"category": name, "turns": [f"def {name}(x):\n", "# and back\n"]} for name in MT_BENCH]
    lines += [
        {"category": name, "turns": [f"def {name}(x):\n"]} for name in ("translation", "summarization", "qa", "math_reasoning")
    ]
    path = tmp_path / "spec_bench.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"category": "rag", "turns": ["x = 1\n" * 2000]}])))
    return path


def test_spec_bench_is_reported_by_its_published_categories_and_in_all(spec_bench: Path) -> None:
    assert tuple(load_prompts(str(spec_bench)).categories) == SPEC_BENCH
    rows = {
        row["category"]: row
        for row in rows_of(small("ngram", [str(spec_bench)], limit=2, max_tokens=6))
        if row["method"] != "none"
    }
    assert tuple(rows) == (*SPEC_BENCH, None)
    assert rows["multi-turn conversation"]["requests"] == 4, "both turns of two conversations"
    assert "no prompt leaves room" in rows["retrieval-augmented generation"]["failed"]
    assert rows[None]["failed"] is None
    assert rows[None]["left_out"] == ["retrieval-augmented generation"]
    assert rows[None]["requests"] == 8


def test_a_few_conversations_of_spec_bench_are_of_all_its_kinds(spec_bench: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in spec_bench.read_text().splitlines()]
    again = [line | {"turns": ["class Second:\n", *line["turns"][1:]]} for line in lines]
    both = sorted([*lines, *again], key=lambda line: lines.index(line) if line in lines else again.index(line))
    path = tmp_path / "sorted.jsonl"
    path.write_text("\n".join(map(json.dumps, both)))
    firsts = [item.turns[0] for item in load_prompts(str(path)).categories[SPEC_BENCH[0]] if isinstance(item, Conversation)]
    assert firsts == [f"def {name}(x):\n" for name in MT_BENCH] + ["class Second:\n"] * len(MT_BENCH)


def test_a_later_turn_follows_the_turns_and_answers_before_it() -> None:
    heard: list[tuple[int, ...]] = []

    def answer(ids: tuple[int, ...]) -> str:
        heard.append(ids)
        return "Z"

    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(map(ord, text))

    reader = TurnReader(Letters(), chat=False, answer=answer, room=8)  # type: ignore[arg-type]
    requests, skipped = reader.requests(Conversation(("a", "b", "ccccccc")))
    assert ["".join(map(chr, ids)) for ids in requests] == ["a", "a\n\nZ\n\nb"]
    assert skipped == 1
    assert heard == requests
    assert reader.requests((1, 2)) == ([(1, 2)], 0)
    assert reader.requests((1,) * 9) == ([], 1)


def test_the_bare_command_is_run_and_its_json_line_is_last(tmp_path: Path) -> None:
    options = ["--methods", "none,ngram", "--quick", "--limit", "1", "--max-tokens", "8", "--repeats", "1"]
    for number, form in enumerate(([], ["run"])):
        done = CliRunner().invoke(app, ["bench", *form, *options, "--output", str(tmp_path / str(number))])
        assert done.exit_code == 0, done.output
        result = json.loads(done.stdout.splitlines()[-1])
        assert [row["method"] for row in result["rows"]] == ["none", "ngram"]
        assert all(row.keys() >= REQUIRED and row["equal"] == 1.0 for row in result["rows"])
        kept = read_rows(tmp_path / str(number) / "results.jsonl")
        assert all({"device", "versions", "command", "model", "core", "suite"} <= row["conditions"].keys() for row in kept)
    again = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "0")])
    assert again.exit_code == 0
    assert again.stdout.strip().endswith("report.html")
    (tmp_path / "0" / "results.jsonl").write_text('{"method": "none"}\n')
    with pytest.raises(InvalidParameter, match=r"results\.jsonl:1 is not a row"):
        CliRunner().invoke(app, ["bench", "report", str(tmp_path / "0")], catch_exceptions=False)


def test_an_interrupted_bench_keeps_its_finished_rows(tmp_path: Path) -> None:
    temperatures = ",".join(str(i / 100) for i in range(1, 200))  # would take many minutes
    arguments = ["--methods", "ngram", "--workloads", "code", "--temperatures", temperatures, "--batches", "1", "--limit", "1"]
    command = [sys.executable, "-m", "outrider.cli", "bench", *arguments, "--max-tokens", "8", "--output", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stderr is not None
        for _ in range(4):
            assert "equal" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    rows = read_rows(tmp_path / "results.jsonl")
    assert len(rows) >= 4
    shown = json.loads(out.splitlines()[-1])["rows"]
    assert [(row["method"], row["temperature"]) for row in shown] == [(row["method"], row["temperature"]) for row in rows]
    assert f"{len(rows)} finished rows are kept" in err
    assert (tmp_path / "report.html").exists()
    assert "Traceback" not in err
