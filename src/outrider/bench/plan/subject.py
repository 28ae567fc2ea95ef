"""An engine with one drafter, whose rounds are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from outrider.bench.plan.profile import Memory, Profile
from outrider.bench.plan.trace import RecordedRound, Recorder, Trace
from outrider.config import WITH_WEIGHTS, SpeculationConfig
from outrider.control import FixedLength
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.model import locate, read_spec
from outrider.model.bundled import bundled_model
from outrider.model.memory import token_bytes
from outrider.sampling import SamplingParams

__all__ = ["Prompt", "RequestRun", "Subject", "learn_from", "memory_of"]

_LONG = 640  # tokens that a sequence of a batch may have on average
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.6}
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request and its rounds."""

    prompt: list[int]
    output: CompletionOutput
    rounds: list[RecordedRound]


class Subject:
    """An engine with one drafter, whose rounds are recorded."""

    def __init__(self, model: str | None, method: str | Mapping[str, Any], dtype: str = "auto", batch: int = 1) -> None:
        config = SpeculationConfig.parse(method)
        config = replace(config, adaptive=config.method == "auto")  # every length is set here
        kv = batch * _LONG * _kv_bytes(model) if batch > 1 else None  # several engines stand side by side
        self.llm = LLM(model, speculation=config, dtype=dtype, max_num_seqs=batch, prefix_cache=False, kv_bytes=kv, share=False)
        name = method if isinstance(method, str) else config.method
        self.profile = Profile(name, config.draft_tokens if config.method != "none" else 0, memory=memory_of(self.llm))
        self._rule = config.rule
        self._recorder = Recorder()
        self.llm.engine.listen(self._recorder)
        self._set_length(self.profile.max_length)

    def _set_length(self, length: int) -> None:
        self.llm.engine.policy = FixedLength(length, self._rule)

    def run(self, prompt: Prompt, params: SamplingParams) -> RequestRun:
        """Generate for one prompt."""
        return self.run_batch([prompt], params)[0]

    def run_batch(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestRun]:
        """Generate for several; the rounds are those of all together."""
        results = self.llm.generate(list(prompts), params)
        rounds = self._recorder.take()
        return [RequestRun(result.prompt_token_ids, result.outputs[0], rounds) for result in results]

    def learn_costs(self, prompts: Sequence[Prompt], params: SamplingParams, length: int) -> None:
        """What rounds of this length cost for these prompts at once; acceptance is not learnt from it."""
        self._set_length(min(length, self.profile.max_length))
        self.llm.generate(list(prompts), params)
        self.profile.costs.learn(round_ for round_ in self._recorder.take() if round_.batch == len(prompts))
        self._set_length(self.profile.max_length)

    def learn(self, run: RequestRun) -> None:
        """What the drafts of one request came to, and what its rounds cost."""
        profile, rounds = self.profile, run.rounds
        for name in ("drafts", "_outcomes"):
            profile.__dict__.pop(name, None)
        decoding = [r for r in rounds if not r.prefill]
        drafts = [r.drafts[0] for r in decoding if r.drafts[0].room]
        profile.traces.append(Trace(profile.method, len(run.prompt), profile.max_length, drafts))
        full = [r for r in decoding if r.length == profile.max_length]
        if len(full) > 2:  # the first proposal may have a prompt to read
            profile.costs.add("forward", 1, full[0].rows, full[0].forward_s)
            profile.costs.add("host", 1, full[0].rows, full[0].host_s)
        profile.costs.learn(r for r in rounds if not full[2:] or r is not full[0])


def learn_from(
    subjects: Sequence[Subject], prompts: Sequence[Prompt], params: SamplingParams, say: Callable[[str], None]
) -> None:
    """Fill every subject's profile, one prompt after another, after one to warm up."""
    for i, prompt in enumerate([prompts[0], *prompts]):
        say(f"prompt {i} of {len(prompts)}")
        for subject in subjects:
            run = subject.run(prompt, params)
            if i:
                subject.learn(run)


def _kv_bytes(model: str | None) -> int:
    config = read_spec(locate(str(model or bundled_model())))
    return token_bytes(config)


def memory_of(llm: LLM) -> Memory:
    """Weights and KV of the drafter that came with an engine."""
    folders = {path for config in _parts(llm.speculation) if (path := _folder(config, llm.directory)) is not None}
    dtype = str(llm.speculation.options.get("dtype", llm.config.dtype))
    size = _BYTES.get(dtype, 2.0)
    return Memory(int(sum(_parameters(path) * size for path in folders)), llm.engine.drafter.needs.kv_bytes_per_token)


def _parts(config: SpeculationConfig) -> Iterable[SpeculationConfig]:
    yield config
    for nested in config.nested():
        yield from _parts(nested)


def _folder(config: SpeculationConfig, target: Path) -> Path | None:
    if config.method not in WITH_WEIGHTS:
        return None
    return Path(config.model) if config.model else target / WITH_WEIGHTS[config.method]


def _parameters(folder: Path) -> int:
    """Weights in a folder's safetensors, scales left out."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys() if not name.endswith(".scale"))  # noqa: SIM118
    return count
