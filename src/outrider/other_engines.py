"""Speculative flags of other engines: each is refused with what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.errors import InvalidParameter

__all__ = ["EQUIVALENTS", "refuse_foreign_flags"]

_DRAFT_MODEL, _DRAFT_TOKENS = "--draft-model DIR", "--draft-tokens N"
_CONTROLLER = "not needed: a controller chooses how far to draft from what is accepted and what it costs"
EQUIVALENTS: Mapping[str, Mapping[str, str]] = {  # engine -> its flag -> ours
    "SGLang": {
        "--speculative-algorithm": "--method eagle (EAGLE, EAGLE3), --method ngram (NGRAM) or --draft-model DIR (STANDALONE)",
        "--speculative-draft-model-path": _DRAFT_MODEL,
        "--speculative-draft-model": _DRAFT_MODEL,
        "--speculative-num-steps": "--draft-tokens N; of a tree, --method 'eagle:24:branch=6:depth=N'",
        "--speculative-eagle-topk": "--method 'eagle:24:beam=3:branch=N'",
        "--speculative-num-draft-tokens": "--draft-tokens N, which does not count the token before the draft: one less",
        "--speculative-accept-threshold-single": "outrider generate --rule lossy_typical; the default keeps the tokens the same",
        "--speculative-accept-threshold-acc": "outrider generate --rule lossy_typical; the default keeps the tokens the same",
        "--speculative-ngram-max-trie-depth": "--method 'ngram:ngram_max=N'",
        "--speculative-adaptive": _CONTROLLER,
    },
    "llama.cpp": {
        "-md": _DRAFT_MODEL,
        "--model-draft": _DRAFT_MODEL,
        "--spec-draft-model": _DRAFT_MODEL,
        "-hfd": _DRAFT_MODEL,
        "--hf-repo-draft": _DRAFT_MODEL,
        "--spec-draft-hf": _DRAFT_MODEL,
        "--draft": _DRAFT_TOKENS,
        "--draft-n": _DRAFT_TOKENS,
        "--draft-max": _DRAFT_TOKENS,
        "--spec-draft-n-max": _DRAFT_TOKENS,
        "--draft-min": "--method 'NAME:min_draft_tokens=N'",
        "--spec-draft-n-min": "--method 'NAME:min_draft_tokens=N'",
        "--draft-p-min": _CONTROLLER,
        "--spec-draft-p-min": _CONTROLLER,
        "--spec-type": "--method ngram, --method suffix, --method eagle or --draft-model DIR",
        "--spec-default": "--method auto, which is the default",
    },
    "TGI": {"--speculate": "--method ngram:N, or --method medusa:N with Medusa heads"},
    "mlx-lm": {"--num-draft-tokens": _DRAFT_TOKENS},
    "vLLM": {
        "--ngram-prompt-lookup-max": "--method 'ngram:ngram_max=N'",
        "--ngram-prompt-lookup-min": "--method 'ngram:ngram_min=N'",
        "--spec-decoding-acceptance-method": "outrider generate --rule rejection; the default keeps the tokens the same",
        "--speculative-disable-by-batch-size": "--method 'NAME:disable_by_batch_size=N'",
    },
}  # fmt: skip
_FLAGS = {flag: (engine, ours) for engine, flags in EQUIVALENTS.items() for flag, ours in flags.items()}


def refuse_foreign_flags(arguments: Iterable[str]) -> None:
    """Raise InvalidParameter at the first flag of another engine. What follows "--" is no flag."""
    for word in arguments:
        if word == "--":
            return
        flag = word.partition("=")[0]
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _FLAGS:
            engine, ours = _FLAGS[flag]
            raise InvalidParameter(flag, f"is a flag of {engine}; here: {ours}")
