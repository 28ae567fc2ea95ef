"""Writes docs/results.md from the files in results/: every number on that page is copied by this script.

python recipes/results_page.py            # write the page
python recipes/results_page.py --check    # fail where the page is not what the files say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
Cell = Callable[[dict[str, Any]], str]
Body = Callable[[dict[str, Any]], Iterator[str]]

_HEAD = """# Results

Written by `python recipes/results_page.py` from the files in `results/`; each holds its device, versions and command, and more
rows than are shown here. What the numbers mean: [benchmarks](benchmarks.md). Compare times within one file only.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(part for section in _SECTIONS for part in _section(*section))]).rstrip() + "\n"


def _section(title: str, name: str, command: str, body: Body) -> Iterator[str]:
    path = ROOT / "results" / name
    yield f"## {title}\n"
    if not path.exists():
        yield f"**Not measured yet.** `{command}`, then this script.\n"
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    if "what" in data:
        yield f"{data['what'][0].upper()}{data['what'][1:].rstrip('.')}. [{name}](../results/{name})\n"
    else:
        yield f"[{name}](../results/{name})\n"
    yield from body(data)


_CASE: dict[str, Cell] = {
    "workload": lambda row: row["workload"],
    "temperature": lambda row: f"{row['temperature']:g}",
    "batch": lambda row: str(row["batch"]),
}


_METHOD: dict[str, Cell] = {"method": lambda row: f"`{row['method']}`"}
_PER_ROUND: dict[str, Cell] = {"tokens per round": lambda row: _number(row["tokens_per_round"])}


def _rows(columns: dict[str, Cell]) -> Body:
    """A section that is one table of the file's rows."""

    def body(data: dict[str, Any]) -> Iterator[str]:
        yield _environment(data)
        yield _table(data["rows"], columns)

    return body


_bench = _rows(
    _CASE
    | _METHOD
    | {"tok/s": lambda row: _number(row["tok_s"], 0), "speed-up": lambda row: _number(row["speedup"])}
    | _PER_ROUND
    | {
        "efficiency": lambda row: _number(row["efficiency"]),
        "equal": lambda row: "failed" if row["equal"] is None else f"{row['equal']:.0%}",
    }
)


def _serve(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    latencies = {
        f"{name.upper()} ms, median / p99": lambda row, name=name: (
            f"{_number(row[f'median_{name}_ms'], 1)} / {_number(row[f'p99_{name}_ms'], 1)}"
        )
        for name in ("ttft", "tpot", "itl")
    }
    rates: dict[str, Cell] = {
        "load": lambda row: row["load"],
        "done / failed": lambda row: f"{row['completed']} / {row['failed']}",
        "tok/s": lambda row: _number(row["output_throughput"], 0),
        "good requests/s": lambda row: _number(row.get("request_goodput")),
    }
    yield _table(data["rows"], rates | latencies)


def _plan(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    pairs = {
        "tokens a round": ("tokens_per_round", "tokens_per_round_measured"),
        "speed-up": ("predicted", "measured"),
        "decoding only": ("decode_predicted", "decode_measured"),
    }
    columns = dict(_METHOD)
    for title, names in pairs.items():
        for kind, name in zip(("predicted", "measured"), names, strict=True):
            columns[f"{title}, {kind}"] = lambda row, name=name: _number(row[name])
    yield _table(data["rows"], columns | {"error of the speed-up": lambda row: f"{row['error']:+.1%}"})


def _baselines(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    rows = [
        {"model": model, "ratio": name, "value": ratio}
        for model, ratios in data["ratios"].items()
        for name, ratio in ratios.items()
    ]
    columns: dict[str, Cell] = {name: lambda row, name=name: row[name] for name in ("model", "ratio")}
    yield _table(rows, columns | {"times": lambda row: _number(row["value"])})
    columns = {
        title: lambda row, name=name: row[name] for title, name in {"model": "model", "peer": "peer", "weights": "kind"}.items()
    }
    judged = any(row["steady"] is not None for row in data["rows"])
    steady: dict[str, Cell] = {
        "no loops": lambda row: _number(row["tok_s_steady"], 0),
        "of prompts": lambda row: f"{row['steady']} of {row['prompts']}",
    }
    yield _table(
        data["rows"],
        columns
        | {"mode": lambda row: f"`{row['mode']}`", "tok/s": lambda row: _number(row["tok_s"], 0)}
        | (steady if judged else {})
        | {
            "with prefill": lambda row: _number(row["wall_tok_s"], 0),
            "prefill, ms": lambda row: _number(row["prefill_s"] and row["prefill_s"] * 1e3, 0),
            "agrees": lambda row: _number(row["agrees"]),
            "parts at": lambda row: _number(row["parts_at"]),
        },
    )


_TEMPERATURE: dict[str, Cell] = {"temperature": lambda row: f"{row['temperature']:g}"}
_LOOPING: dict[str, Cell] = {"looping": lambda row: f"{row['looping']:.0%}"}


def _drafters(data: dict[str, Any]) -> Iterator[str]:
    batch: dict[str, Cell] = {"batch": lambda row: str(row["batch"])}
    costs: dict[str, Cell] = {
        "one proposal, ms": lambda row: _number(row["propose_ms"]),
        "equal": lambda row: f"{row['equal']:.0%} of {row['compared']}" if "equal" in row else "not compared",
    }
    for run in data["runs"]:
        yield f"{run['what'][0].upper()}{run['what'][1:]}:\n"
        yield from _rows(_METHOD | _TEMPERATURE | batch | _PER_ROUND | _LOOPING | costs)(run)


def _pyrite(data: dict[str, Any]) -> Iterator[str]:
    equal: dict[str, Cell] = {"equal": lambda row: f"{row['equal']:.0%} of {row['outputs']}"}
    for run in data["runs"]:
        yield from _rows(_METHOD | _TEMPERATURE | _PER_ROUND | _LOOPING | equal)(run)


_never_slower = _rows(
    _CASE
    | {
        "plain tok/s": lambda row: _number(row["plain_tok_s"], 0),
        "auto over plain": lambda row: _number(row["ratio"]),
        "95 %": lambda row: f"{row['low']:.2f} to {row['high']:.2f}",
    }
)


_agent = _rows(
    {
        "conversation": lambda row: row["name"],
        "turn": lambda row: str(row["turn"]),
        "prompt": lambda row: str(row["prompt"]),
        "answer": lambda row: str(row["answer"]),
        "decoding over plain": lambda row: _number(row["speedup"]),
        "whole request over plain": lambda row: _number(row["with_prompt"]),
    }
    | _PER_ROUND
    | {"tokens equal": lambda row: "yes" if row["equal"] else "no"}
)


def _cold_start(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    yield _table(
        [{"temperature": temperature} | row for temperature, row in data["speedups"].items()],
        {
            "temperature": lambda row: row["temperature"],
            "starts": lambda row: str(len(row["each"])),
            "median": lambda row: _number(row["median"]),
            "goal": lambda row: _number(row["goal"]),
            "lowest": lambda row: _number(row["lowest"]),
        },
    )
    yield f"No start shall give less than {data['floor']}.\n"


def _forward(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    counts = list(data["results"][0]["ms"])
    columns: dict[str, Cell] = {"model": lambda row: row["model"], "dtype": lambda row: row["dtype"]}
    times: dict[str, Cell] = {f"{n} rows, ms": lambda row, n=n: _number(row["ms"][n]) for n in counts}
    floors: dict[str, Cell] = {f"floor of {n}": lambda row, n=n: _number(row["floor_ms"][n]) for n in ("1", "8", "16")}
    yield _table(data["results"], columns | times | floors)
    yield (
        "A floor is the larger of two times measured between the forwards: reading as many bytes as the weights have, and as "
        "many multiply-adds from registers as the products need.\n"
    )


def _round(data: dict[str, Any]) -> Iterator[str]:
    yield _environment(data)
    names = {"total_us": "round, µs", "forward_us": "forward", "choice_us": "choice", "outside_us": "the rest"}
    names |= {"bookkeeping_us": "of it bookkeeping", "bookkeeping_us_per_sequence": "for each sequence"}
    columns: dict[str, Cell] = {"temperature": lambda row: f"{row['temperature']:g}"}
    columns |= {name: lambda row, name=name: str(row[name]) for name in ("batch", "queued")}
    yield _table(data["rounds"], columns | {title: lambda row, name=name: _number(row[name], 0) for name, title in names.items()})


_proposal = _rows(
    _METHOD
    | {
        "context": lambda row: str(row["context"]),
        "propose, µs": lambda row: _number(row["propose_us"], 0),
        "commit, µs": lambda row: _number(row["commit_us"], 0),
    }
)

_loss = _rows(
    {
        "dtype": lambda row: row["dtype"],
        "loss": lambda row: _number(row["loss"], 4),
        "change": lambda row: f"{row['change']:+.2%}",
        "tokens": lambda row: str(row["tokens"]),
    }
)


def _environment(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    note = f" {data['note']}" if "note" in data else ""
    return f"`{data['command']}`; {data['device']}; {versions}.{note}\n"


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, Cell]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


_INT8 = "outrider bench run --dtype int8 --methods auto,draft_model:4 --workloads code --temperatures 0,0.8 --batches 1"
_SIZES = "python -m benchmarks.baselines --models 40m,150m,1.1b > results/peers_sizes.json"
_SECTIONS: tuple[tuple[str, str, str, Body], ...] = (  # title, file, command, body
    ("Speed", "bench.json", "outrider bench > results/bench.json", _bench),
    ("Speed in int8", "bench_int8.json", f"{_INT8} > results/bench_int8.json", _bench),
    ("Served", "bench_serve.json", "outrider bench serve --output results/bench_serve.json", _serve),
    ("Predicted and measured", "plan_check.json", "python -m benchmarks.plan_check > results/plan_check.json", _plan),
    ("Beside other engines", "peers.json", "python -m benchmarks.baselines > results/peers.json", _baselines),
    ("Beside other engines, by size", "peers_sizes.json", _SIZES, _baselines),
    ("Acceptance", "drafters.json", "", _drafters),
    ("Acceptance on all HumanEval stubs", "pyrite_acceptance.json", "", _pyrite),
    ("Never slower", "never_slower.json", "", _never_slower),
    ("Editing conversations", "agent.json", "outrider bench agent > results/agent.json", _agent),
    ("A first start", "cold_start.json", "python benchmarks/cold_start.py --out results/cold_start.json", _cold_start),
    ("A forward by its rows", "cpu_forward.json", "", _forward),
    ("A plain round", "round_cost.json", "", _round),
    ("A lookup's proposal", "proposal_cost.json", "", _proposal),
    ("Weights in int8", "int8_loss.json", "", _loss),
)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0 if PAGE.read_text(encoding="utf-8") == page() else "docs/results.md is not what results/ says; run this script"
        )
    PAGE.write_text(page(), encoding="utf-8")
