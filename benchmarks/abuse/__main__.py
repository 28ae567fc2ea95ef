"""`python -m benchmarks.abuse`: attack a server that it starts, and measure whether other clients notice.

Every scenario of `scenarios.py` runs against `outrider serve` in a separate process, on this machine's loopback. The
attacker, the other client and the prober each have their address, as three clients would. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.abuse.measure import Bars, measure, wait_until_ready
from benchmarks.abuse.scenarios import SCENARIOS
from benchmarks.server import ServerProcess
from outrider.bench.environment import environment
from outrider.errors import OutriderError

_console = Console(stderr=True)
_WIDTH = 170  # of the table where no terminal says how wide it is


def main() -> None:
    options = _options()
    bars, rows = Bars(), {}
    server: ServerProcess | None = None
    try:
        for name in options.scenario or SCENARIOS:
            if server is None or not server.alive:
                server = _start(options.serve)
            with _console.status(f"{name}: {SCENARIOS[name].about}"):
                rows[name] = asyncio.run(measure(server, SCENARIOS[name], options.seconds, bars))
            _console.print(f"{name}: {'held' if rows[name]['passed'] else 'NOT HELD'}", highlight=False)
            if not server.alive or not rows[name]["idle_afterwards"]:
                rows[name]["passed"] = False
                _stop(server)
                server = None
    except KeyboardInterrupt:
        _console.print("interrupted; what was measured so far follows")
    finally:
        if server is not None:
            _stop(server)
    (_console if _console.is_terminal else Console(stderr=True, width=_WIDTH)).print(_table(rows))
    report = _report(rows, bars, options.seconds)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if report["passed"] else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--scenario", action="append", choices=list(SCENARIOS), help="run this one; may be repeated; default: all"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long an attack goes on (default: 10)")
    parser.add_argument("--out", type=Path, help="keep the report as JSON here, such as results/abuse.json")
    parser.add_argument("--serve", default="", help='further flags of the server, such as "--max-num-seqs 8"')
    return parser.parse_args()


def _start(flags: str) -> ServerProcess:
    with _console.status("the server loads"):
        server = ServerProcess(shlex.split(flags))
        asyncio.run(wait_until_ready(server.port))
        return server


def _stop(server: ServerProcess) -> None:
    if server.alive:
        try:
            server.stop()
        except (OSError, OutriderError, subprocess.TimeoutExpired) as error:
            _console.print(f"the server did not stop: {error}")
            server.kill()


def _report(rows: dict[str, Any], bars: Bars, seconds: float) -> dict[str, Any]:
    return environment() | {
        "command": shlex.join(["python", "-m", "benchmarks.abuse", *sys.argv[1:]]),
        "bars": {"health_p99_ms": bars.health_p99_ms, "health_max_ms": bars.health_max_ms},
        "seconds": seconds,
        "scenarios": rows,
        "passed": bool(rows) and all(row["passed"] for row in rows.values()),
    }


def _table(rows: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("scenario", "health p99", "max", "request alone", "attacked", "worst", "ratio", "MiB", "answers", "held"):
        table.add_column(name, justify="left" if name in ("scenario", "answers") else "right", no_wrap=name != "answers")
    for name, row in rows.items():
        health, times, memory = row["health_ms"], row["request_ms"], row["memory_mib"]
        table.add_row(
            name,
            f"{health['p99']:.0f} ms",
            f"{health['max']:.0f} ms",
            f"{times['alone']:.0f} ms",
            f"{times['attacked']:.0f} ms",
            f"{times['attacked_max']:.0f} ms",
            "-" if times["ratio"] is None else f"{times['ratio']:.2f}",
            f"{memory['before']:.0f} to {memory['peak']:.0f}",
            ", ".join(f"{count} x {status}" for status, count in row["statuses"].items()),
            "yes" if row["passed"] else "no: " + ", ".join(bar for bar, held in row["held"].items() if not held),
        )
    return table


if __name__ == "__main__":
    main()
