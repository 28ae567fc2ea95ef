"""`outrider plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.errors import InvalidParameter
from outrider.options import Dtype, Model, Threads, set_threads

if TYPE_CHECKING:
    from outrider.bench.plan.prices import Prices
    from outrider.bench.plan.subject import Subject

__all__ = ["plan"]

_errors = Console(stderr=True)


def plan(
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(help='Comma-separated drafters, as in "ngram:8,eagle:5". Default: all the model has weights for.'),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL of prompts, or `editing`. Default: bundled code.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts. Default: 8; all with --check.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of each request.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Dtype = "auto",
    threads: Threads = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once, for --acceptance and --simulate.")] = 1,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Plan for this chance that a guess is right (or chances by position: 0.8,0.75,0.7) instead."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="With --acceptance: chances of a node's first, second, ... candidate, to plan a tree.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Costs from --save-costs, or the controller's own file.")] = None,
    draft_cost: Annotated[float, typer.Option(help="Without --costs: a draft token, in plain forwards.")] = 0.05,
    row_cost: Annotated[float, typer.Option(help="Without --costs: a further row of the forward, likewise.")] = 0.02,
    host_cost: Annotated[float, typer.Option(help="Without --costs: the rest of a round, likewise.")] = 0.05,
    target: Annotated[Path | None, typer.Option(help="Advise on draft models for this directory or config.json.")] = None,
    candidates: Annotated[
        list[Path] | None, typer.Option(help="With --target: a draft model's directory; may be given several times.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="With --target: GB/s of memory. Default: measured.")] = None,
    simulate: Annotated[
        Path | None, typer.Option(help="Replay traces of --record through the controller; needs --costs.")
    ] = None,
    arrival: Annotated[float | None, typer.Option(help="With --simulate: requests per second. Default: all at once.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="With --simulate: how many.")] = 64,
    record: Annotated[Path | None, typer.Option(help="Write what was guessed and accepted, a request per line.")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the measured costs.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Predict one half of the prompts from the other, and measure it.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="With --check: runs of every prompt, of which the one of median time counts.")
    ] = 1,
    html: Annotated[Path | None, typer.Option(help="Write the what-if plots as a page.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Expect: speed-up, best draft length and tree, break-even batch and memory, for each drafter, before relying on it.

    Measures costs and acceptance on prompts, or takes them as given (--acceptance, --costs). --target advises on draft
    models, --simulate replays recorded drafts through the controller, --check compares predictions with measurements.
    """
    given = dict(locals())
    from outrider.bench.conditions import conditions
    from outrider.bench.plan.formulas import FORMULAS

    set_threads(threads)
    console = _errors if as_json else Console(width=max(Console().width, 130))
    if explain:
        console.print(FORMULAS, markup=False, highlight=False)
    if target is not None:
        found = _advise(given, console)
    elif simulate is not None:
        found = _simulate(given, console)
    elif acceptance is not None:
        found = _given(given, console)
    elif check:
        found = _check(given, console)
    else:
        found = _measured(given, console)
    if as_json or check:
        print(json.dumps(found | conditions()))
    if check and any(abs(row["error"]) > 0.1 for row in found["rows"]):
        raise typer.Exit(1)


def _subjects(given: dict[str, Any], methods: str, batch: int) -> list[Subject]:
    from outrider.bench.plan.subject import Subject

    names = ["none", *(method for method in methods.split(",") if method != "none")]
    return [Subject(given["model"], name, given["dtype"], batch) for name in names]


def _prompts(given: dict[str, Any], default: int | None) -> list[str]:
    from outrider.bench.workloads import find_prompts
    from outrider.engine.acceptance import read_prompts

    path = find_prompts(given["prompts"]) if given["prompts"] else find_prompts("editing").with_name("code.jsonl")
    return read_prompts(path, given["limit"] or default)


def _params(given: dict[str, Any]) -> Any:
    from outrider.sampling import SamplingParams

    return SamplingParams(temperature=given["temperature"], seed=0, max_tokens=given["tokens"], ignore_eos=True)


def _available(model: str | None) -> str:
    """Every drafter the model has weights for."""
    from outrider.bench.plan.check import CHECKED
    from outrider.model import locate
    from outrider.model.bundled import bundled_model

    directory = locate(str(model or bundled_model()))
    needs = {"draft_model": "draft", "cascade": "draft", "eagle": "eagle", "mixture": "eagle", "medusa": "medusa"}
    have = [
        m for m in CHECKED.split(",") if (n := needs.get(m.split(":")[0])) is None or (directory / n / "config.json").exists()
    ]
    return ",".join(have)


def _measured(given: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import planner, show
    from outrider.bench.plan.trace import write_traces

    with _errors.status("loading") as status:
        subjects = _subjects(given, given["methods"] or _available(given["model"]), 16)
        planner.measure(subjects, _prompts(given, 8), _params(given), batches=True, say=status.update)
    plain, *profiles = (subject.profile for subject in subjects)
    rows = planner.plan_rows(plain, profiles)
    best = max(profiles, key=lambda own: own.speedup(plain, own.best_length()))
    table = planner.what_if(best.prices, plain.prices, best.most)
    show.rows(rows, subjects[0].llm.max_model_len, console)
    show.what_if(table, f"chains at the costs of {best.method}", console)
    if given["record"]:
        write_traces(given["record"], [trace for own in profiles for trace in own.traces])
    if given["save_costs"]:
        given["save_costs"].write_text(json.dumps(planner.prices_of(subjects)), encoding="utf-8")
    found = {"rows": [row.as_dict() for row in rows], "what_if": {"method": best.method, "speedup": table}}
    if given["html"]:
        given["html"].write_text(show.page_of(rows, table, best.method), encoding="utf-8")
    return found


def _given(given: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import planner, show
    from outrider.bench.plan.formulas import best_tree

    chances = _chances("--acceptance", given["acceptance"])
    own, plain, name = _prices(given)
    one = chances[0] if len(chances) == 1 else chances
    found = planner.plan_chain(own, plain, one, most=32, batch=given["batch"])
    table = planner.what_if(own, plain, most=32, batch=given["batch"])
    if given["ranks"]:
        trees: list[dict[str, Any]] = []
        for size in planner.LENGTHS:
            tokens, parents = best_tree(_chances("--ranks", given["ranks"]), size)
            base = plain.round_s(0, 0, given["batch"])
            trees.append(
                {
                    "nodes": size,
                    "tokens": tokens,
                    "parents": parents,
                    "speedup": tokens * base / own.round_s(size, size, given["batch"]),
                }
            )
        found["tree"] = max(trees, key=lambda tree: tree["speedup"])
    show.chain(found, name, console)
    show.what_if(table, f"chains at the costs of {name}", console)
    if given["html"]:
        given["html"].write_text(show.page_of([], table, name), encoding="utf-8")
    return found | {"what_if": {"method": name, "speedup": table}}


def _prices(given: dict[str, Any]) -> tuple[Prices, Prices, str]:
    from outrider.bench.plan.planner import given_costs, read_costs

    if given["costs"] is None:
        return *given_costs(given["draft_cost"], given["row_cost"], given["host_cost"]), "the draft given"
    table = read_costs(given["costs"])
    names = [name for name in table if name != "none"]
    wanted = given["methods"] or (names[0] if len(names) == 1 else None)
    if wanted not in names or "none" not in table:
        raise InvalidParameter("--methods", f"must be one of those in {given['costs']}: {', '.join(names)}")
    return table[wanted], table["none"], wanted


def _chances(option: str, text: str) -> list[float]:
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError:
        chances = [-1.0]
    if not all(0.0 <= chance <= 1.0 for chance in chances):
        raise InvalidParameter(option, f"must be chances between 0 and 1 separated by commas, got {text!r}")
    return chances


def _advise(given: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import show
    from outrider.bench.plan.adviser import advise, rank_candidates

    path: Path = given["target"]
    beside = [path / "draft"] if (path / "draft" / "config.json").exists() else []
    candidates = given["candidates"] or beside
    advice = advise(path, candidates, given["bandwidth"] and given["bandwidth"] * 1e9)
    show.advice(advice, console)
    ranked: list[dict[str, Any]] = []
    if candidates and path.is_dir() and any(path.glob("*.safetensors")):
        with _errors.status("measuring") as status:
            ranked = rank_candidates(path, advice.fits, _prompts(given, 6), given["tokens"], status.update)
        show.ranking(ranked, console)
    return advice.as_dict() | {"ranking": ranked}


def _simulate(given: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import show
    from outrider.bench.plan.planner import read_costs
    from outrider.bench.plan.simulate import Traffic, simulate
    from outrider.bench.plan.trace import read_traces

    if given["costs"] is None:
        raise InvalidParameter("--simulate", "needs --costs FILE, as `outrider plan --record TRACE --save-costs FILE` writes it")
    traces, prices = read_traces(given["simulate"]), read_costs(given["costs"])
    traffic = Traffic(given["requests"], given["tokens"], given["batch"], given["arrival"])
    policies = ["none", *dict.fromkeys(trace.method for trace in traces), "auto"]
    outcomes = [simulate(traces, prices, traffic, policy) for policy in policies]
    show.outcomes(outcomes, console)
    return {"outcomes": [outcome.as_dict() for outcome in outcomes]}


def _check(given: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan.check import CHECKED, check, markdown

    with _errors.status("loading") as status:
        prompts = _prompts(given, None)
        if len(prompts) < 2:
            raise InvalidParameter("--prompts", "--check needs two at least: one to learn from, one to predict")
        subjects = _subjects(given, given["methods"] or CHECKED, 16)
        rows = check(subjects, prompts, _params(given), given["repeats"], status.update)
    print(markdown(rows), file=sys.stderr if given["as_json"] else sys.stdout)
    worst = max(rows, key=lambda row: abs(row.error))
    console.print(f"worst: {worst.method}, {worst.error:+.1%}", highlight=False)
    return {
        "rows": [row.as_dict() for row in rows],
        "prompts": len(prompts),
        "tokens": given["tokens"],
        "repeats": given["repeats"],
    }
