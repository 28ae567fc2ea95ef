"""`python -m benchmarks.plan_check`: does `outrider plan` predict? Learnt on one half of the prompts, measured on the other.

A request is predicted position by position: t(r) = R + sum over k of P(k accepted) * t(r - 1 - k), where r tokens are left,
R is the time of a round, and drafts are cut to the r - 1 tokens that still fit.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import errors, run
from outrider.bench.acceptance import available_methods
from outrider.bench.environment import environment
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Prompt, RequestRun, Subject
from outrider.bench.plan.trace import DraftRecord
from outrider.bench.workloads import find_prompts
from outrider.control.curve import steady_mean
from outrider.engine.acceptance import read_prompts
from outrider.errors import InvalidParameter
from outrider.options import Dtype, Model, Threads, set_threads
from outrider.sampling import SamplingParams

__all__ = ["Prediction", "RequestProfile", "check", "expected_time", "halves", "main"]

_NEAR = 128  # recorded drafts that are used for a place in the text
_SLACK = 8  # nodes by which the room of such a draft may be smaller
_TOLERANCE = 0.1  # of a predicted speed-up
Outcomes = Mapping[tuple[int, int], float]  # how often each (nodes verified, nodes accepted) occurs


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speed-ups over whole requests and over their decoding alone."""

    method: str
    predicted: float
    measured: float
    decode_predicted: float
    decode_measured: float
    tokens_per_round: float  # predicted
    tokens_per_round_measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    def as_dict(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()} | {
            "error": round(self.error, 4)
        }


@dataclass(slots=True)
class RequestProfile:
    """Whole requests of one drafter, predicted from its profile and from the requests it was learnt from."""

    profile: Profile
    firsts: list[tuple[int, float]] = field(default_factory=list)  # tokens of a prompt, seconds to its first token
    entries: list[tuple[int, float]] = field(default_factory=list)  # likewise, what its first proposal takes beyond others
    _spans: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def learn(self, run: RequestRun) -> None:
        """Learn the time to the first token and the time of the first proposal."""
        prompt, length = len(run.prompt), self.profile.max_length
        self.firsts.append((prompt, run.output.timings.first_token_s))
        full = [r.propose_s for r in run.rounds if not r.prefill and r.length == length]
        if len(full) > 2:  # the first proposal may have a prompt to read
            self.entries.append((prompt, full[0] - steady_mean(full[1:])))

    def request_s(self, prompt: int, tokens: int, length: int) -> tuple[float, float]:
        """Seconds until the first token and in all, for a request with this many output tokens."""
        first = _line(self.firsts, prompt)
        spent, _ = self.decoding(tokens, length)
        return first, first + spent + (_line(self.entries, prompt) if length else 0.0)

    def decoding(self, tokens: int, length: int) -> tuple[float, float]:
        """Seconds and rounds after the first token, the first proposal's extra time left out."""
        if (tokens, length) not in self._spans:
            self._spans[tokens, length] = expected_time(
                tokens - 1,
                lambda room: self.outcomes_at(tokens - 1 - room, min(length, room)),
                lambda room, nodes: self.profile.costs.round_s(min(length, room), nodes),
            )
        return self._spans[tokens, length]

    def outcomes_at(self, place: int, max_length: int) -> Outcomes:
        """The outcomes near a position in the text: lookups draft better the more they have read."""
        eligible = [draft for draft in self.profile.drafts if max_length and draft.room >= max(max_length - _SLACK, 1)]
        near = sorted(eligible, key=lambda draft: abs(draft.at - place))[:_NEAR]
        return Counter(_with_room(draft, max_length) for draft in near) or Counter({(0, 0): 1})


def check(
    subjects: Sequence[Subject], prompts: Sequence[Prompt], params: SamplingParams, repeats: int, say: Callable[[str], None]
) -> list[Prediction]:
    """The first subject decodes plainly. Of every prompt the run of median time counts, to learn from or to be predicted."""
    plain, *others = subjects
    runs: dict[tuple[str, int], list[RequestRun]] = defaultdict(list)
    say("plain decoding of every prompt")
    learnt, predicted = halves([_fresh_pairs(run) for run in plain.run_batch(prompts, params)])
    for subject in subjects:
        subject.run(prompts[0], params)  # warm-up
    for repeat, (place, pair) in product(range(repeats), enumerate(zip(learnt, predicted, strict=True))):
        say(f"repeat {repeat + 1} of {repeats}: pair {place + 1} of {len(learnt)}")
        turn = subjects if (place + repeat) % 2 else subjects[::-1]
        for i, subject in product(pair if place % 2 else pair[::-1], turn):
            runs[subject.profile.method, i].append(subject.run(prompts[i], params))

    def predict(subject: Subject) -> _Half:
        requests = RequestProfile(subject.profile)
        for i in learnt:
            middle = _middle(runs[subject.profile.method, i])
            subject.learn(middle)
            requests.learn(middle)
        return _Half(requests, [_middle(runs[subject.profile.method, i]) for i in predicted])

    base = predict(plain)
    return [_compare(base, predict(subject)) for subject in others]


def halves(scores: Sequence[float]) -> tuple[list[int], list[int]]:
    """The indices of two similar halves. Neighbours by score go to different halves; each half gets the lower one in turn."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    pairs = [order[i : i + 2][:: -1 if i % 4 else 1] for i in range(0, len(order) - 1, 2)]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _fresh_pairs(run: RequestRun) -> int:
    """Pairs of neighbouring tokens in an output that its text did not have before: the fewer, the easier it is to guess."""
    seen: set[tuple[int, int]] = set()
    fresh = 0
    for i, pair in enumerate(pairwise([*run.prompt, *run.output.token_ids]), 1):
        fresh += i >= len(run.prompt) and pair not in seen
        seen.add(pair)
    return fresh


def _middle(runs: Sequence[RequestRun]) -> RequestRun:
    return sorted(runs, key=lambda run: run.output.timings.total_s)[(len(runs) - 1) // 2]


@dataclass(frozen=True, slots=True)
class _Half:
    """The prompts to be predicted, as one drafter ran them."""

    requests: RequestProfile
    runs: list[RequestRun]

    def measured_s(self, decode: bool) -> float:
        times = [run.output.timings for run in self.runs]
        return sum(time.total_s - decode * time.first_token_s for time in times)

    def predicted_s(self, decode: bool) -> float:
        length = self.requests.profile.max_length
        each = [self.requests.request_s(len(run.prompt), len(run.output.token_ids), length) for run in self.runs]
        return sum(total - decode * first for first, total in each)

    def rounds(self) -> tuple[float, int]:
        """After the first tokens: expected, and counted."""
        length = self.requests.profile.max_length
        expected = sum(self.requests.decoding(len(run.output.token_ids), length)[1] for run in self.runs)
        return expected, sum(run.output.speculation["rounds"] - 1 for run in self.runs)


def _compare(plain: _Half, half: _Half) -> Prediction:
    predicted = [plain.predicted_s(decode) / half.predicted_s(decode) for decode in (False, True)]
    measured = [plain.measured_s(decode) / half.measured_s(decode) for decode in (False, True)]
    tokens = sum(len(run.output.token_ids) - 1 for run in half.runs)
    rates = [tokens / rounds for rounds in half.rounds()]
    return Prediction(half.requests.profile.method, predicted[0], measured[0], predicted[1], measured[1], *rates)


def expected_time(tokens: int, outcomes: Callable[[int], Outcomes], round_s: Callable[[int, int], float]) -> tuple[float, float]:
    """Seconds and rounds a request needs to emit `tokens`, if every round is drawn alike.

    `outcomes(room)` is how often each (nodes verified, nodes accepted) occurs in a round with that much room;
    `round_s(room, nodes)` is its time.
    """
    seconds, rounds = [0.0], [0.0]
    for left in range(1, tokens + 1):
        chances = outcomes(left - 1)
        total = sum(chances.values())
        time = count = 0.0
        for (nodes, accepted), weight in chances.items():
            after = left - 1 - accepted
            time += weight * (round_s(left - 1, nodes) + seconds[after])
            count += weight * (1.0 + rounds[after])
        seconds.append(time / total)
        rounds.append(count / total)
    return seconds[-1], rounds[-1]


def _with_room(draft: DraftRecord, max_length: int) -> tuple[int, int]:
    """Nodes and accepted ones, if one that filled all the room it had would have filled a little more as well."""
    nodes, accepted = draft.best(max_length)
    return (max_length if nodes >= draft.room else nodes), accepted


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of a Theil-Sen line through the points, which outliers do not move."""
    if not points:
        return 0.0
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[:n] if i != j]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope * x + statistics.median(y - slope * at for at, y in points)


def markdown(rows: Sequence[Prediction]) -> str:
    """The table for the documentation."""
    lines = [
        "| drafter | tokens a round, predicted | measured | speed-up, predicted | measured | error | decoding only | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = f"{row.tokens_per_round:.2f} | {row.tokens_per_round_measured:.2f}"
        whole = f"{row.predicted:.2f} | {row.measured:.2f} | {row.error:+.1%}"
        lines.append(f"| `{row.method}` | {rates} | {whole} | {row.decode_predicted:.2f} | {row.decode_measured:.2f} |")
    return "\n".join(lines)


def main(
    model: Model = None,
    methods: Annotated[str, typer.Option(help="Comma-separated drafters. Default: all the model has weights for.")] = "",
    prompts: Annotated[str, typer.Option(help="JSONL of prompts, or a bundled workload.")] = "code",
    limit: Annotated[int | None, typer.Option(min=2, help="Use this many prompts. Default: all.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of each request.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every prompt, of which the one of median time counts.")] = 1,
    dtype: Dtype = "auto",
    threads: Threads = None,
    output: Annotated[Path | None, typer.Option(help="File for the result, as JSON.")] = None,
) -> None:
    """Predict one half of the prompts from the other, and measure it; ends with 1 where a prediction is over 10 % off."""
    set_threads(threads)
    with errors.status("loading") as status:
        texts = read_prompts(find_prompts(prompts), limit)
        if len(texts) < 2:
            raise InvalidParameter("--prompts", "two are needed at least: one to learn from, one to predict")
        names = ["none", *(method for method in (methods or available_methods(model)).split(",") if method != "none")]
        subjects = [Subject(model, name, dtype, 16) for name in names]
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=tokens, ignore_eos=True)
        rows = check(subjects, texts, params, repeats, status.update)
    print(markdown(rows), file=sys.stderr)
    worst = max(rows, key=lambda row: abs(row.error))
    errors.print(f"worst: {worst.method}, {worst.error:+.1%}")
    result = {"rows": [row.as_dict() for row in rows], "prompts": len(texts), "tokens": tokens, "repeats": repeats}
    text = json.dumps(result | environment())
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if abs(worst.error) > _TOLERANCE:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
