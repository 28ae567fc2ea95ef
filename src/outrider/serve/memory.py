"""Whose earlier texts may draft for a request, and what became of the text that a client predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.engine.outputs import CompletionOutput

__all__ = ["memory_of", "prediction_details"]

_RUN = 4  # tokens of a prediction that must stand in the output side by side


def memory_of(client: str, salt: str | None) -> str:
    """The owner of a client's texts: an API key with the request's `cache_salt`; "" for nobody.

    An address may be several people's, so without keys only a salt says whose a text is.
    """
    if client.startswith("key "):
        return f"{client}\n{salt or ''}"
    return f"salt\n{salt}" if salt else ""


def prediction_details(prediction: Sequence[int], outputs: Sequence[CompletionOutput]) -> dict[str, int]:
    """The usage of a prediction under OpenAI's names; nothing where there was none.

    Accepted are the prediction's tokens that the output holds in runs of four or more. That depends on the two texts alone, so it
    is the same with speculation off.
    """
    if not prediction:
        return {}
    accepted = sum(_accepted(prediction, output.token_ids) for output in outputs)
    rejected = len(prediction) * len(outputs) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def _accepted(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Tokens of the prediction inside a run that the output holds, too."""
    run = min(_RUN, len(prediction))
    written = set(_runs(output, run))
    covered = accepted = 0  # tokens up to `covered` are counted
    for start, tokens in enumerate(_runs(prediction, run)):
        if tokens in written:
            accepted += start + run - max(covered, start)
            covered = start + run
    return accepted


def _runs(tokens: Sequence[int], run: int) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(run)), strict=False)
