"""`python -m benchmarks.fleet_server`: `outrider serve` whose rounds are recorded, for `benchmarks.fleet_check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import errors, run
from outrider.bench.plan.fleet.measure import RoundTimes
from outrider.control import Controller
from outrider.engine.llm import LLM
from outrider.serve.address import listen
from outrider.serve.app import create_app
from outrider.serve.server import serve
from outrider.serve.settings import ServerSettings

__all__ = ["main"]


def main(
    output: Annotated[Path, typer.Option(help="File for what was recorded, as JSON, when the server ends.")],
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
) -> None:
    """Serve Pyrite with `auto`, and write at the end what every round took."""
    recorded: dict[str, Any] = {}

    def load() -> LLM:
        torch.set_num_threads(threads)
        llm = LLM(speculation="auto", max_num_seqs=slots)
        assert isinstance(llm.engine.policy, Controller)
        recorded["times"] = RoundTimes(llm.engine.policy)
        recorded["policy"] = llm.engine.policy
        llm.engine.listen(recorded["times"])
        return llm

    settings = ServerSettings(port=port)
    with listen(settings.host, settings.port) as listener:
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        errors.print(f"listening on {url}", soft_wrap=True)
        serve(create_app(settings, load, None, lambda _: errors.print(f"ready on {url}", soft_wrap=True)), settings, listener)
    costs = recorded["policy"].costs.as_dict() | {"accepted": recorded["policy"].accepted}
    output.write_text(json.dumps({"costs": costs, "samples": recorded["times"].samples}), encoding="utf-8")


if __name__ == "__main__":
    run(main)
