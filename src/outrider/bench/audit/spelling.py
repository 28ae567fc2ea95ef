"""OpenAI's API as engines speak it: bodies of requests, and the fields of answers under the names that each engine has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.audit.records import AuditRequest, Choice, Drafting, TokenLogprob

__all__ = ["NEUTRAL", "body_of", "choices_of", "counters_of", "drafting_of"]

# Fields that OpenAI does not have. They add ids, and switch off what an engine has on by default or a model's folder asks for:
# truncation (llama.cpp: 40, 0.95 and 0.05), and penalties (llama-cpp-python: 1.1), which returned log probabilities do not show.
NEUTRAL = {
    "top_p": 1.0, "top_k": 1_000_000, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0, "return_token_ids": True,
}  # fmt: skip
_COUNTER = re.compile(
    r"^[\w:]*spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{[^}]*\})? ([\d.e+]+)", re.MULTILINE
)


def body_of(request: AuditRequest, chat: bool) -> dict[str, Any]:
    """The body of a request, without the model's name. Fields at their defaults are left out."""
    prompt = {"messages": [{"role": "user", "content": request.prompt}]} if chat else {"prompt": request.prompt}
    body: dict[str, Any] = prompt | {"max_tokens": request.max_tokens, "temperature": request.temperature}
    for name in ("seed", "frequency_penalty", "presence_penalty"):
        if value := getattr(request, name):
            body[name] = value
    if request.repetition_penalty != 1.0:
        body |= dict.fromkeys(("repetition_penalty", "repeat_penalty"), request.repetition_penalty)
    if request.stop:
        body["stop"] = list(request.stop)
    if request.n > 1:
        body["n"] = request.n
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs} if chat else {"logprobs": request.logprobs}
    if request.schema is not None:
        schema = {"name": "answer", "schema": dict(request.schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def choices_of(data: Mapping[str, Any]) -> tuple[Choice, ...]:
    """The choices of an answer, in the order of their indices."""
    ordered = sorted(data.get("choices") or (), key=lambda choice: choice.get("index") or 0)
    return tuple(map(_choice, ordered))


def _choice(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message") or {}
    text = choice.get("text") or message.get("content") or message.get("reasoning_content") or ""
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    tokens = _of_chat(logprobs["content"]) if logprobs.get("content") else _of_completion(logprobs)
    return Choice(str(text), choice.get("finish_reason"), None if ids is None else tuple(ids), tokens or None)


def _of_chat(content: Sequence[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["token"],
            float(entry["logprob"]),
            {top["token"]: float(top["logprob"]) for top in entry.get("top_logprobs") or ()},
        )
        for entry in content
    )


def _of_completion(logprobs: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, float(value), {text: float(p) for text, p in (top or {}).items()})
        for token, value, top in zip(tokens, values, tops, strict=False)
        if value is not None
    )


def drafting_of(data: Mapping[str, Any]) -> Drafting | None:
    """What an answer says of its drafts: vLLM's and Outrider's metrics, llama.cpp's timings, SGLang's details."""
    spec = (data.get("metrics") or {}).get("speculative_decoding") or {}
    if spec.get("num_draft_tokens") is not None:
        return Drafting(spec["num_draft_tokens"], spec.get("num_accepted_draft_tokens") or 0, spec.get("num_spec_steps") or 0)
    timings = data.get("timings") or {}
    if timings.get("draft_n") is not None:
        return Drafting(timings["draft_n"], timings.get("draft_n_accepted") or 0)
    details = (data.get("sglext") or {}).get("spec_tokens_details") or {}
    rounds, length, rate = (details.get(f"spec_{name}") for name in ("verify_ct", "accept_length", "accept_rate"))
    if rounds and length and rate:
        accepted = round(rounds * (length - 1))
        return Drafting(round(accepted / rate), accepted, rounds)
    return None


def counters_of(metrics: str) -> Drafting | None:
    """Draft counters in the text of /metrics, under the names that vLLM and those who follow it have."""
    sums: dict[str, int] = {}
    for name, value in _COUNTER.findall(metrics):
        sums[name] = sums.get(name, 0) + int(float(value))
    if "draft_tokens" not in sums:
        return None
    return Drafting(sums["draft_tokens"], sums.get("accepted_tokens", 0), sums.get("drafts", 0))
