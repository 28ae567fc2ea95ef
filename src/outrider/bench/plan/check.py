"""`outrider plan --check`: acceptance learnt on one half of the prompts, the speed-up predicted and measured on the other."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Prompt, Subject
from outrider.engine.outputs import CompletionOutput
from outrider.sampling import SamplingParams

__all__ = ["CHECKED", "Prediction", "check", "markdown"]

_TREE = "beam=3:branch=6:depth=9"
CHECKED = (
    "ngram:8,suffix:8,recycle:24,lookahead:31,draft_model:5,eagle:5,"
    f"eagle:24:{_TREE},medusa:24,cascade:8:levels=ngram+draft_model,mixture:24:members=suffix+(eagle:{_TREE})"
)


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
    """The first subject decodes plainly. Even prompts are learnt from, odd ones predicted; all interleaved, repeat by repeat."""
    runs: dict[tuple[str, int], list[CompletionOutput]] = defaultdict(list)
    lengths: dict[int, int] = {}
    for subject in subjects:
        subject.run(prompts[0], params, learn=False)  # warm-up
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            say(f"repeat {repeat + 1} of {repeats}: prompt {i + 1} of {len(prompts)}")
            for subject in subjects if (i + repeat) % 2 else subjects[::-1]:
                result = subject.run(prompt, params, learn=i % 2 == 0)
                runs[subject.profile.method, i].append(result.outputs[0])
                lengths[i] = len(result.prompt_token_ids)
    odd = range(1, len(prompts), 2)

    def measured(method: str, decode: bool) -> float:
        timings = [[output.timings for output in runs[method, i]] for i in odd]
        return sum(statistics.median(t.total_s - decode * t.first_token_s for t in own) for own in timings)

    def predicted(profile: Profile, decode: bool) -> float:
        each = [profile.request_s(lengths[i], len(runs[profile.method, i][0].token_ids), profile.most) for i in odd]
        return sum(total - decode * first for first, total in each)

    plain = subjects[0].profile
    out = []
    for subject in subjects[1:]:
        own = subject.profile
        ratios = [predicted(plain, decode) / predicted(own, decode) for decode in (False, True)]
        seen = [measured(plain.method, decode) / measured(own.method, decode) for decode in (False, True)]
        outputs = [output for i in odd for output in runs[own.method, i]]
        sizes = [len(runs[own.method, i][0].token_ids) for i in odd]
        expected = sum(size - 1 for size in sizes) / sum(own.decoding(size, own.most)[1] for size in sizes)
        rate = sum(len(o.token_ids) - 1 for o in outputs) / sum(o.speculation["rounds"] - 1 for o in outputs)
        out.append(Prediction(own.method, ratios[0], seen[0], ratios[1], seen[1], expected, rate))
    return out


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
