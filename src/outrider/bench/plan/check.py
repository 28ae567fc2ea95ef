"""`outrider plan --check`: acceptance learnt on one half of the prompts, the speed-up predicted and measured on the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

from outrider.bench.acceptance import EVERY_METHOD
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Prompt, RequestRun, Subject
from outrider.sampling import SamplingParams

__all__ = ["CHECKED", "Prediction", "check", "halves", "markdown"]

CHECKED = EVERY_METHOD.removesuffix(",auto")


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
    for subject, i in product(subjects, learnt):
        subject.learn(_middle(runs[subject.profile.method, i]))

    def of(profile: Profile) -> _Half:
        return _Half(profile, [_middle(runs[profile.method, i]) for i in predicted])

    base = of(plain.profile)
    return [_compare(base, of(subject.profile)) for subject in others]


def halves(scores: Sequence[float]) -> tuple[list[int], list[int]]:
    """Numbers of two alike halves: neighbours by score are parted, and which half gets the lower one alternates."""
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

    profile: Profile
    runs: list[RequestRun]

    def measured_s(self, decode: bool) -> float:
        times = [run.output.timings for run in self.runs]
        return sum(profile.total_s - decode * profile.first_token_s for profile in times)

    def predicted_s(self, decode: bool) -> float:
        profile = self.profile
        each = [profile.request_s(len(run.prompt), len(run.output.token_ids), profile.max_length) for run in self.runs]
        return sum(total - decode * first for first, total in each)

    def rounds(self) -> tuple[float, int]:
        """After the first tokens: expected, and counted."""
        profile = self.profile
        expected = sum(profile.decoding(len(run.output.token_ids), profile.max_length)[1] for run in self.runs)
        return expected, sum(run.output.speculation["rounds"] - 1 for run in self.runs)


def _compare(plain: _Half, half: _Half) -> Prediction:
    predicted = [plain.predicted_s(decode) / half.predicted_s(decode) for decode in (False, True)]
    measured = [plain.measured_s(decode) / half.measured_s(decode) for decode in (False, True)]
    tokens = sum(len(run.output.token_ids) - 1 for run in half.runs)
    rates = [tokens / rounds for rounds in half.rounds()]
    return Prediction(half.profile.method, predicted[0], measured[0], predicted[1], measured[1], *rates)


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
