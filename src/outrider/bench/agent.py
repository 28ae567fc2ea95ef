"""`outrider bench agent`: recorded editing conversations, drafted for and decoded plainly in turns of a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from outrider.bench.interleaved import Contestant, run_in_turns
from outrider.bench.recordings import PlantedRunner, Recording, Turn, read_recordings
from outrider.config import EngineConfig, resolve_speculation
from outrider.control import Controller
from outrider.engine.build import Settings, build_engine, load_target
from outrider.engine.calibrate import calibrate
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.engine.intake import Intake, model_name
from outrider.errors import InvalidParameter
from outrider.model import Runner
from outrider.ops import one_torch_thread
from outrider.sampling import SamplingParams

__all__ = ["RECORDINGS", "Replay", "TurnSpeed", "replay", "show_turns", "summary"]

RECORDINGS = Path(__file__).with_name("workloads") / "agent.jsonl"
_FREE_TOKENS = 128  # of an answer that is not recorded
_CALIBRATION_S = 3.0
_FLOOR = 0.98


@dataclass(frozen=True, slots=True)
class TurnSpeed:
    """One turn: medians over the repeats."""

    name: str
    kind: str
    turn: int
    prompt: int  # tokens
    answer: int
    speedup: float  # decoding, from the first token on, over plain
    with_prompt: float  # the whole request over plain
    tokens_per_round: float
    plain_tok_s: float
    equal: bool  # in every repeat the tokens are those of plain decoding, and the recorded ones


class Replay:
    """A model that writes recorded answers, with a drafting engine and a plain one on the same weights and pages."""

    def __init__(self, model: str | None, method: str) -> None:
        wanted, device = resolve_speculation(method), Device.resolve("auto")
        target = load_target(Settings(model_name(model), wanted, EngineConfig(max_num_seqs=2, prefix_cache=False), device))
        if target.tokenizer is None:
            raise InvalidParameter("model", f"{target.directory} holds no tokenizer, and recordings are text")
        self.on_gpu = device.is_gpu
        self.runner = PlantedRunner(target.runner)
        planted = replace(target, runner=cast(Runner, self.runner))
        fast = build_engine(planted, wanted)
        plain = build_engine(planted, resolve_speculation("none"), fast.engine.pages)
        self.engines: tuple[Engine, Engine] = plain.engine, fast.engine
        self._intake = Intake(planted, fast.engine, fast.speculation)
        self.method = fast.speculation.method
        if isinstance(fast.engine.policy, Controller):
            with one_torch_thread(target.runner.ops):
                calibrate(fast.engine, [1], _CALIBRATION_S)

    def run(self, prompt: str, turn: Turn, tenant: str) -> tuple[Contestant, Contestant, int]:
        """Both engines on one turn, and the tokens of its prompt."""
        recorded = None if turn.answer is None else list(self._intake.tokenizer.encode_bare(turn.answer))
        ids = self._intake.tokenizer.encode(prompt)
        tokens = _FREE_TOKENS if recorded is None else len(recorded)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (request,), method = self._intake.prepare(ids, params, tenant=tenant)
        if recorded is not None:
            self.runner.recorded[request.id] = recorded
        plain, fast = (Contestant(engine, [(request, method)], self.on_gpu) for engine in self.engines)
        run_in_turns((plain, fast))
        self.runner.recorded.pop(request.id, None)
        return plain, fast, len(ids)


def replay(
    model: str | None, method: str, recordings: Path, repeats: int, limit: int | None, told: Callable[[str], None]
) -> Iterator[TurnSpeed]:
    """Every turn of every recording, after one turn to warm up. In each repeat the conversations are other tenants'."""
    conversations, engines = read_recordings(recordings)[:limit], Replay(model, method)
    prompt, turn = next(conversations[0].prompts())
    engines.run(prompt, turn, "warm-up")
    for recording in conversations:
        told(recording.name)
        runs = [list(_conversation(engines, recording, f"{recording.name} {repeat}")) for repeat in range(repeats)]
        for number, of_turn in enumerate(zip(*runs, strict=True), 1):
            yield _speed(recording, number, of_turn)


class _Seconds(NamedTuple):
    """What a turn took."""

    whole: float
    decoding: float  # from the first token on


def _seconds(contestant: Contestant) -> _Seconds:
    return _Seconds(contestant.seconds, contestant.seconds - contestant.first_token_s)


@dataclass(frozen=True, slots=True)
class _Run:
    """A turn as both engines ran it."""

    prompt: int
    answer: int
    rounds: int  # that could draft
    plain: _Seconds
    fast: _Seconds
    equal: bool


def _conversation(engines: Replay, recording: Recording, tenant: str) -> Iterator[_Run]:
    for prompt, turn in recording.prompts():
        plain, fast, size = engines.run(prompt, turn, tenant)
        (slow,), (quick,) = ([each.output() for each in contestant.processors] for contestant in (plain, fast))
        equal = slow.token_ids == quick.token_ids and (turn.answer is None or quick.text == turn.answer)
        yield _Run(size, len(quick.token_ids), max(fast.rounds - 1, 1), _seconds(plain), _seconds(fast), equal)


def _speed(recording: Recording, number: int, runs: Sequence[_Run]) -> TurnSpeed:
    def median(value: Callable[[_Run], float]) -> float:
        return statistics.median(map(value, runs))

    first = runs[0]
    return TurnSpeed(
        recording.name,
        recording.kind,
        number,
        first.prompt,
        first.answer,
        speedup=median(lambda run: run.plain.decoding / run.fast.decoding),
        with_prompt=median(lambda run: run.plain.whole / run.fast.whole),
        tokens_per_round=median(lambda run: (run.answer - 1) / run.rounds),
        plain_tok_s=median(lambda run: (run.answer - 1) / run.plain.decoding),
        equal=all(run.equal for run in runs),
    )


def summary(rows: Sequence[TurnSpeed]) -> dict[str, Any]:
    """Every turn, and the medians of each kind and of each turn."""
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in dict.fromkeys(row.kind for row in rows)}
    by_turn = {str(turn): [row for row in rows if row.turn == turn] for turn in sorted({row.turn for row in rows})}
    return {
        "by_kind": {kind: _medians(of_kind) for kind, of_kind in by_kind.items()},
        "by_turn": {turn: _medians(of_turn) for turn, of_turn in by_turn.items()},
        "slowest_with_prompt": round(min(row.with_prompt for row in rows), 3),
        "equal": all(row.equal for row in rows),
        "rows": [_rounded(asdict(row)) for row in rows],
    }


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def _medians(rows: Sequence[TurnSpeed]) -> dict[str, float]:
    names = ("speedup", "with_prompt", "tokens_per_round")
    medians = {name: round(statistics.median(getattr(row, name) for row in rows), 3) for name in names}
    return medians | {"least_tokens_per_round": round(min(row.tokens_per_round for row in rows), 3)}


def show_turns(rows: Sequence[TurnSpeed], console: Console) -> None:
    table = Table("conversation", "turn", "prompt", "answer", "plain tok/s", "÷ plain", "with prompt", "tokens/round", "equal")
    for row in rows:
        style = "red" if row.with_prompt < _FLOOR or not row.equal else ""
        table.add_row(
            row.name, str(row.turn), str(row.prompt), str(row.answer), f"{row.plain_tok_s:.0f}", f"{row.speedup:.2f}",
            f"{row.with_prompt:.2f}", f"{row.tokens_per_round:.2f}", "yes" if row.equal else "NO", style=style,
        )  # fmt: skip
    console.print(table)
