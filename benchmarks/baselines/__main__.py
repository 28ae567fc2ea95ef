"""`python -m benchmarks.baselines`: the same weights and prompts through other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from benchmarks.command import run
from outrider.errors import InvalidParameter
from outrider.terminal import PlainConsole

__all__ = ["left_out", "main", "show"]

_METHODS = "none,auto,suffix:24,draft_model:4,cascade:6:levels=suffix+draft_model"


def main(
    models: Annotated[
        str,
        typer.Option(help="Comma-separated: pyrite, model directories, or random models 40m, 150m, 1.1b (plain decoding only)."),
    ] = "pyrite",
    prompts: Annotated[Path | None, typer.Option(help="JSONL of prompts (turns, prompt or text). Default: bundled code.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts. Default: 16; 3 with random models.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="New tokens of each prompt. Default: 128; 32 with 1.1b.")] = None,
    prefill: Annotated[int, typer.Option(min=2, help="Length of the prompt whose reading is timed.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Times everything runs, interleaved, after one to warm up.")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine. Default: torch's choice.")] = None,
    engines: Annotated[
        str, typer.Option("--engines", "--peers", help="Comma-separated: outrider, transformers, llama.cpp, openvino.")
    ] = "outrider,transformers,llama.cpp,openvino",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Outrider's methods, comma-separated; `none` is plain decoding. Default: a few with pyrite, else none,auto."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(help="Where an engine is installed, as ENGINE=PYTHON; repeatable. Default: the Python that runs this."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: Transformers eager, compiled and assisted beside Outrider.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Three prompts, 32 tokens, one repeat.")] = False,
) -> None:
    """The same weights and prompts through Transformers, llama.cpp, OpenVINO GenAI and Outrider, in one run.

    Each engine runs in a separate process, as installed and as its documentation shows it, with the same number of
    threads; greedy, token ids in and out, interleaved. Small models loop when greedy, and loops favour lookup: speeds
    and ratios are given over all prompts, and ("no loops") over those whose plain output by Outrider has no 8-gram more than
    three times. No ratio is given from fewer than three prompts. Ends in one JSON object with rows, ratios, versions and
    environment. With Pyrite about ten minutes on two cores, five with --limit 12 --repeats 1.
    """
    from benchmarks.baselines.run import BaselineSetting, compare_baselines
    from benchmarks.baselines.weights import find_model
    from outrider.bench.environment import environment
    from outrider.bench.workloads import find_prompts
    from outrider.engine.acceptance import read_prompts
    from outrider.ops import threads_used

    _check_device(device)
    console = PlainConsole(stderr=True, width=max(PlainConsole().width, 150))
    path = prompts or find_prompts("editing").with_name("code.jsonl")
    results: list[dict[str, Any]] = []
    for model in models.split(","):
        chosen = methods or (_METHODS if model == "pyrite" else "none,auto")
        count = limit or (16 if find_model(model) else 3)
        length = tokens or (32 if model == "1.1b" else 128)
        setting = BaselineSetting(
            engines=engines.split(","),
            methods=chosen.split(","),
            prompts=read_prompts(path, 3 if quick else count),
            tokens=32 if quick else length,
            prefill=prefill,
            repeats=1 if quick else repeats,
            threads=threads or threads_used(),
            device=device,
            pythons=_pythons(python or []),
        )
        with console.status(model) as status:
            measured = compare_baselines(model, setting, status.update)
        show(measured, console)
        results.append(measured)
    merged: dict[str, Any] = {"rows": [row for result in results for row in result["rows"]]}
    for name in ("ratios", "missing", "versions"):
        merged[name] = {key: value for result in results for key, value in result[name].items()}
    about = _on_gpu() if device == "cuda" else environment()
    settings = {"prefill": prefill, "repeats": setting.repeats}
    print(json.dumps(merged | settings | about | {"versions": about["versions"] | merged["versions"]}))
    if any(row["failure"] for row in merged["rows"]):
        raise typer.Exit(1)


def show(comparison: dict[str, Any], console: Console) -> None:
    """A table of speeds, then the ratios, what was left out of them, and who was missing."""
    titles = ("tok/s", "min to max", "no loops", "with prefill", "prefill ms", "loops", "agrees", "parts at")
    table = Table("model", "engine", "weights", Column("mode", overflow="fold"), *titles)
    for row in comparison["rows"]:
        spread = "-" if row["spread"] is None else "{:.1f} to {:.1f}".format(*row["spread"])
        cells = [row["model"], row["peer"], row["kind"], row["mode"], _cell(row["tok_s"]), spread, _cell(row["tok_s_steady"])]
        cells += [_cell(row["wall_tok_s"]), _cell(row["prefill_s"] and row["prefill_s"] * 1e3), str(len(row["looping"]))]
        cells += ["-" if row["agrees"] is None else f"{row['agrees']:.0%}", _cell(row["parts_at"], 2)]
        table.add_row(*cells)
        if row["failure"]:
            table.add_row("", "", "", Text(f"failed: {row['failure']}", style="red"))
    console.print(table)
    for model, ratios in comparison["ratios"].items():
        for name, ratio in ratios.items():
            console.print(f"{model}: {name}: {'not measured' if ratio is None else f'{ratio:.2f} x'}", highlight=False)
    for line in left_out(comparison["rows"]):
        console.print(line, highlight=False)
    for engine, why in comparison["missing"].items():
        console.print(Text.assemble((f"{engine} did not run:", "yellow"), " ", why))


def left_out(rows: list[dict[str, Any]]) -> list[str]:
    """How many prompts "no loops" is over, for every kind of weights; and where there are too few for a ratio."""
    from benchmarks.baselines.figures import MIN_PROMPTS

    out = []
    counts = {(row["model"], row["kind"]): (row["prompts"], row["steady"]) for row in rows if row["prompts"]}
    for (model, kind), (prompts, steady) in counts.items():
        few = prompts if steady is None else steady
        line = f"{model}, {kind}: {prompts} prompts"
        line += "" if steady is None else f", {prompts - steady} of which loop; no loops: the other {steady}"
        out.append(
            line + (f"; no ratio from fewer than {MIN_PROMPTS}, raise --limit or lower --tokens" if few < MIN_PROMPTS else "")
        )
    return out


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _on_gpu() -> dict[str, Any]:
    from benchmarks.gpu import gpu_environment  # needs Triton

    return gpu_environment()


def _check_device(device: str) -> None:
    from outrider.engine.device import missing_gpu

    if device not in ("cpu", "cuda"):
        raise InvalidParameter("--device", f"must be cpu or cuda, got {device!r}")
    if device == "cuda" and (missing := missing_gpu()):
        raise InvalidParameter("--device", f"cuda cannot be used: {missing}")


def _pythons(named: list[str]) -> dict[str, str]:
    out = {}
    for item in named:
        engine, separator, python = item.partition("=")
        if not separator or not Path(python).exists():
            raise InvalidParameter("--python", f"must be ENGINE=PATH of a Python, got {item!r}")
        out[engine] = python
    return out


if __name__ == "__main__":
    run(main)
