"""`outrider plan`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.errors import InvalidParameter
from outrider.options import Dtype, Model, Threads, set_threads
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from outrider.bench.plan.costs import RoundCosts
    from outrider.bench.plan.subject import Subject

__all__ = ["plan"]

_errors = PlainConsole(stderr=True)
_fleet = partial(typer.Option, rich_help_panel="With --fleet")


def plan(
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated drafters, as in "ngram:8,eagle:5". Default: all the model has weights for; '
            "with --fleet: auto,none."
        ),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL of prompts, or `editing`. Default: bundled code.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts. Default: 8.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of each request.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Dtype = "auto",
    threads: Threads = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once, for --acceptance and --simulate (default 1) and --fleet.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Plan for this chance that a guess is right (or chances by position: 0.8,0.75,0.7) instead."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="With --acceptance: chances of a node's first, second, ... candidate, to plan a tree.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Costs from --save-costs, or the controller's file.")] = None,
    draft_cost: Annotated[float, typer.Option(help="Without --costs: a draft token, in plain forwards.")] = 0.05,
    row_cost: Annotated[float, typer.Option(help="Without --costs: a further row of the forward, likewise.")] = 0.02,
    host_cost: Annotated[float, typer.Option(help="Without --costs: the rest of a round, likewise.")] = 0.05,
    target: Annotated[
        str | None,
        typer.Option(help="Advise on draft models for this directory, config.json, hub id, or size (70B, 8x7B)."),
    ] = None,
    candidates: Annotated[
        list[Path] | None, typer.Option(help="With --target: a draft model's directory; may be options several times.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="With --target: GB/s of memory. Default: measured.")] = None,
    device_memory: Annotated[
        float | None, typer.Option(help="With --target: GB for weights and KV. Default: the GPU's, or the machine's.")
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(help="With --target: rows whose arithmetic takes as long as reading the weights. Default: 295 on a GPU, 8."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Show which weights of --model would stay on a GPU within this limit (8GiB, or a share such as 0.9), which "
            "would be streamed from host memory, and how fast that is. Nothing is loaded."
        ),
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="With --memory: the draft model beside it, which stays on the GPU.")
    ] = None,
    bus: Annotated[
        float | None, typer.Option(help="With --memory: GB/s from host memory. Default: measured; 25 without a GPU.")
    ] = None,
    simulate: Annotated[
        Path | None, typer.Option(help="Replay traces of --record through the controller; needs --costs.")
    ] = None,
    arrival: Annotated[
        float | None, typer.Option(help="Requests per second. Default: all at once with --simulate, 1 with --fleet.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="With --simulate: how many.")] = 64,
    record: Annotated[Path | None, typer.Option(help="Write what was guessed and accepted, a request per line.")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the measured costs.")] = None,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
    fleet: Annotated[
        bool, _fleet("--fleet", help="Plan replicas for a load: how many, which batch, what drafting is worth.")
    ] = False,
    trace: Annotated[
        Path | None,
        _fleet(help="JSONL of requests: timestamp (ms), input_length, output_length; hash_ids, conversation, tenant if known."),
    ] = None,
    seconds: Annotated[float, _fleet(help="Seconds of load.")] = 60.0,
    prompt_tokens: Annotated[int, _fleet(min=1, help="Prompt tokens that a request adds to its conversation.")] = 128,
    spread: Annotated[
        float, _fleet(min=0, max=3, help="Of the lengths: standard deviation of the logarithm; 0: all alike.")
    ] = 0.5,
    burstiness: Annotated[float, _fleet(help="1: Poisson arrivals; below 1 they come in bursts (gamma, as in vLLM).")] = 1.0,
    shared_prefix: Annotated[int, _fleet(min=0, help="Tokens with which all prompts of a tenant begin.")] = 0,
    tenants: Annotated[int, _fleet(min=1, help="How many share the fleet.")] = 1,
    turns: Annotated[float, _fleet(min=1, help="Requests of a conversation, on average.")] = 1.0,
    swing: Annotated[float, _fleet(min=0, max=0.99, help="Share by which the rate rises and falls over 24 hours.")] = 0.0,
    seed: Annotated[int, _fleet(help="Of the load.")] = 0,
    ttft: Annotated[float, _fleet(help="SLO: milliseconds to the first token, for 99 % of the requests.")] = 1000.0,
    tpot: Annotated[float, _fleet(help="SLO: milliseconds for each further token, likewise.")] = 50.0,
    replicas: Annotated[
        int | None, _fleet(min=1, help="Simulate so many. Default: find the smallest fleet that meets the SLO.")
    ] = None,
    replica_cost: Annotated[
        float | None, _fleet(min=0, help="Price of a replica for an hour, for the cost of a million tokens.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the what-if plots as a page.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Expect: speed-up, best draft length and tree, break-even batch and memory, for each drafter, before relying on it.

    Measures costs and acceptance on prompts, or takes them from --acceptance and --costs. --target recommends draft
    models, --memory shows what would be streamed to a GPU, --simulate replays recorded drafts through the controller. --fleet
    simulates many replicas under a load; with --save-costs it measures a replica of --model first, with --costs it reads what was
    saved, or the controller's own file.
    """
    options = dict(locals())
    options["fleet_batch"], options["batch"] = batch, batch or 1
    from outrider.bench.environment import environment
    from outrider.bench.plan.formulas import FORMULAS

    if check:
        place = "run `python -m benchmarks.plan_check` in a checkout of the repository"
        raise InvalidParameter("--check", f"has moved out of the package: {place}")
    set_threads(threads)
    console = _errors if as_json else PlainConsole(width=max(PlainConsole().width, 130))
    if explain:
        console.print(FORMULAS, markup=False, highlight=False)
    if fleet:
        result = _plan_fleet(options, console)
    elif memory is not None:
        result = _plan_memory(options, console)
    elif target is not None:
        result = _recommend(options, console)
    elif simulate is not None:
        result = _simulate(options, console)
    elif acceptance is not None:
        result = _from_acceptance(options, console)
    else:
        result = _measured(options, console)
    if as_json:
        print(json.dumps(result | environment()))


def _subjects(options: dict[str, Any], methods: str, batch: int) -> list[Subject]:
    from outrider.bench.plan.subject import Subject

    names = ["none", *(method for method in methods.split(",") if method != "none")]
    return [Subject(options["model"], name, options["dtype"], batch) for name in names]


def _prompts(options: dict[str, Any], default: int | None) -> list[str]:
    from outrider.bench.workloads import find_prompts
    from outrider.engine.acceptance import read_prompts

    path = find_prompts(options["prompts"]) if options["prompts"] else find_prompts("editing").with_name("code.jsonl")
    return read_prompts(path, options["limit"] or default)


def _params(options: dict[str, Any]) -> Any:
    from outrider.sampling import SamplingParams

    return SamplingParams(temperature=options["temperature"], seed=0, max_tokens=options["tokens"], ignore_eos=True)


def _measured(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.acceptance import available_methods
    from outrider.bench.plan import planner, show
    from outrider.bench.plan.trace import write_traces
    from outrider.model.listing import loaded_line

    with _errors.status("loading") as status:
        subjects = _subjects(options, options["methods"] or available_methods(options["model"]), 16)
        planner.measure(subjects, _prompts(options, 8), _params(options), batches=True, say=status.update)
    plain, *profiles = (subject.profile for subject in subjects)
    rows = planner.plan_rows(plain, profiles)
    best = max(profiles, key=lambda profile: profile.speedup(plain, profile.best_length()))
    table = planner.what_if(best.costs, plain.costs, best.max_length)
    console.print(loaded_line(subjects[0].llm.engine.runner))
    show.rows(rows, subjects[0].llm.max_model_len, console)
    show.what_if(table, f"chains at the costs of {best.method}", console)
    if options["record"]:
        write_traces(options["record"], [trace for profile in profiles for trace in profile.traces])
    if options["save_costs"]:
        options["save_costs"].write_text(json.dumps(planner.costs_of(subjects)), encoding="utf-8")
    result = {"rows": [row.as_dict() for row in rows], "what_if": {"method": best.method, "speedup": table}}
    if options["html"]:
        options["html"].write_text(show.page_of(rows, table, best.method), encoding="utf-8")
    return result


def _plan_fleet(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan.fleet.cli import plan_fleet

    with _errors.status("simulating") as status:
        return plan_fleet(options | {"batch": options["fleet_batch"]}, lambda: _prompts(options, 8), console, status.update)


def _from_acceptance(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import planner, show

    chances = _chances("--acceptance", options["acceptance"])
    costs, plain, name = _costs(options)
    one = chances[0] if len(chances) == 1 else chances
    chain = planner.plan_chain(costs, plain, one, max_length=32, batch=options["batch"])
    table = planner.what_if(costs, plain, max_length=32, batch=options["batch"])
    if options["ranks"]:
        ranks = _chances("--ranks", options["ranks"])
        chain["tree"] = planner.plan_tree(costs, plain, ranks, max_nodes=32, batch=options["batch"])
    show.chain(chain, name, console)
    show.what_if(table, f"chains at the costs of {name}", console)
    if options["html"]:
        options["html"].write_text(show.page_of([], table, name), encoding="utf-8")
    return chain | {"what_if": {"method": name, "speedup": table}}


def _costs(options: dict[str, Any]) -> tuple[RoundCosts, RoundCosts, str]:
    from outrider.bench.plan.planner import assumed_costs, read_costs

    if options["costs"] is None:
        return *assumed_costs(options["draft_cost"], options["row_cost"], options["host_cost"]), "the costs passed"
    table = read_costs(options["costs"])
    names = [name for name in table if name != "none"]
    wanted = options["methods"] or (names[0] if len(names) == 1 else None)
    if wanted not in names or "none" not in table:
        raise InvalidParameter("--methods", f"must be one of those in {options['costs']}: {', '.join(names)}")
    return table[wanted], table["none"], wanted


def _chances(option: str, text: str) -> list[float]:
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError:
        chances = [-1.0]
    if not all(0.0 <= chance <= 1.0 for chance in chances):
        raise InvalidParameter(option, f"must be chances between 0 and 1 separated by commas, got {text!r}")
    return chances


def _recommend(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import show
    from outrider.bench.plan.recommend import Machine, rank_candidates, recommend

    path = Path(options["target"])
    beside = [path / "draft"] if (path / "draft" / "config.json").exists() else []
    candidates = options["candidates"] or beside
    gigabytes = {name: options[name] and options[name] * 1e9 for name in ("bandwidth", "device_memory")}
    machine = Machine(gigabytes["bandwidth"], gigabytes["device_memory"], options["ridge"])
    advice = recommend(options["target"], candidates, machine)
    for recommendation in advice:
        show.recommendation(recommendation, console)
    ranked: list[dict[str, Any]] = []
    if candidates and path.is_dir() and any(path.glob("*.safetensors")):
        with _errors.status("measuring") as status:
            ranked = rank_candidates(path, advice[0].fits, _prompts(options, 6), options["tokens"], status.update)
        show.ranking(ranked, console)
    return {"targets": [recommendation.as_dict() for recommendation in advice], "ranking": ranked}


def _plan_memory(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan.placing import plan_memory_of, show_memory
    from outrider.engine.intake import model_name
    from outrider.model import locate

    bus = options["bus"] and options["bus"] * 1e9
    planned = plan_memory_of(locate(model_name(options["model"])), options["draft_model"], options["memory"], bus)
    show_memory(planned, console)
    return planned.as_dict()


def _simulate(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from outrider.bench.plan import show
    from outrider.bench.plan.planner import read_costs
    from outrider.bench.plan.simulate import Traffic, simulate
    from outrider.bench.plan.trace import read_traces

    if options["costs"] is None:
        raise InvalidParameter("--simulate", "needs --costs FILE, as `outrider plan --record TRACE --save-costs FILE` writes it")
    traces, costs = read_traces(options["simulate"]), read_costs(options["costs"])
    traffic = Traffic(options["requests"], options["tokens"], options["batch"], options["arrival"])
    policies = ["none", *dict.fromkeys(trace.method for trace in traces), "auto"]
    outcomes = [simulate(traces, costs, traffic, policy) for policy in policies]
    show.outcomes(outcomes, console)
    return {"outcomes": [outcome.as_dict() for outcome in outcomes]}
