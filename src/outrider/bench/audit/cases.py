"""The requests of an audit: prompts times kinds, alone and at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from outrider import checks
from outrider.bench.audit.records import AuditRequest

__all__ = ["KINDS", "QUICK", "SCHEMA", "STANDARD", "AuditSize", "Case", "build_cases"]

KINDS = {
    "greedy": "temperature 0, long answers, one request at a time",
    "short": "temperature 0, a few tokens",
    "concurrent": "temperature 0, many requests at once",
    "stop": "temperature 0 with stop strings",
    "logprobs": "temperature 0 with log probabilities",
    "json": "temperature 0 under a JSON schema",
    "repetition": "temperature 0 with a repetition penalty",
    "penalties": "temperature 0 with frequency and presence penalties",
    "seeded": "temperature 0.8 with a seed",
    "seeded concurrent": "temperature 0.8 with a seed, many requests at once",
    "n": "several samples of one request",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "count": {"type": "integer"},
        "kind": {"enum": ["file", "folder", "link"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_JSON_PROMPT = "# A JSON object with a name, a count and a kind, on one line:\n"
_WARM = 0.8  # temperature of seeded requests


@dataclass(frozen=True, slots=True)
class AuditSize:
    """How much is sent: prompts of the kinds, their answers' length, requests at once, and samples of first tokens."""

    prompts: int = 12
    few: int = 6  # prompts of the kinds beyond plain greedy and seeded decoding
    tokens: int = 128
    concurrent: int = 56  # requests that are sent several at a time
    at_once: int = 8
    sampled_prompts: int = 4
    samples: int = 400  # of each sampled prompt, from each side

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.integer(field.name, getattr(self, field.name), 0 if field.name in ("concurrent", "samples") else 1, 100_000)


STANDARD = AuditSize()
QUICK = AuditSize(prompts=4, few=2, tokens=64, concurrent=16, samples=60)


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a kind."""

    kind: str
    request: AuditRequest

    @property
    def concurrent(self) -> bool:
        return self.kind.endswith("concurrent")

    @property
    def greedy(self) -> bool:
        """Whether a token is the most probable one by the log probabilities that engines return."""
        r = self.request
        return r.temperature == 0 and r.repetition_penalty == 1 and not (r.frequency_penalty or r.presence_penalty or r.schema)


def build_cases(prompts: Sequence[str], size: AuditSize, seed: int, parallel: bool = True) -> list[Case]:
    """Every case, those that are sent alone first. Prompts come again where there are too few.

    Where requests cannot overlap, the greedy ones that would are sent alone: it takes their tokens to see rare faults.
    """

    def prompt(i: int) -> str:
        return prompts[i % len(prompts)]

    cases: list[Case] = []
    for i in range(size.prompts):
        greedy = AuditRequest(prompt(i), size.tokens)
        cases.append(Case("greedy", greedy))
        cases.append(Case("seeded", replace(greedy, temperature=_WARM, seed=seed + i + 1)))
    for i in range(size.few):
        long, half = AuditRequest(prompt(i), size.tokens), AuditRequest(prompt(i), size.tokens // 2)
        cases += [
            Case("short", replace(long, max_tokens=4 + i % 8)),
            Case("stop", replace(long, stop=("\n\n", "return"))),
            Case("logprobs", replace(half, logprobs=5)),
            Case("repetition", replace(half, repetition_penalty=1.2)),
            Case("penalties", replace(half, frequency_penalty=1.0, presence_penalty=1.0)),
            Case("n", replace(half, temperature=_WARM, seed=seed + i + 1, n=3)),
            Case("json", AuditRequest(_JSON_PROMPT + prompt(i)[:80] + "\n", 96, schema=SCHEMA)),
        ]
    for i in range(size.concurrent):
        request = AuditRequest(prompt(size.prompts + i), size.tokens)
        cases.append(Case("concurrent" if parallel else "greedy", request))
    for i in range(size.concurrent // 4 if parallel else 0):
        request = AuditRequest(prompt(i), size.tokens // 2, temperature=_WARM, seed=seed + 1000 + i)
        cases.append(Case("seeded concurrent", request))
    return sorted(cases, key=lambda case: list(KINDS).index(case.kind))
