"""Speculative flags of other engines: each is refused with what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.errors import InvalidParameter

__all__ = ["EQUIVALENTS", "refuse_foreign_flags"]

_DRAFT_MODEL, _DRAFT_TOKENS = "--draft-model DIR", "--draft-tokens N"
_CONTROLLER = "not needed: a controller chooses how far to draft from what is accepted and what it costs"
_SHARED_DEVICE = "--device DEVICE, for the model and its drafter"
_SHARED_CONTEXT = "--max-model-len N, for the model and its drafter"
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
        "--speculative-ngram-max-match-window-size": "--method 'ngram:ngram_max=N'",
        "--speculative-ngram-min-match-window-size": "--method 'ngram:ngram_min=N'",
        "--speculative-draft-model-revision": "--draft-model OWNER/NAME of the commit that you want, downloaded to a folder",
        "--speculative-draft-model-quantization": "not needed: weights are read as their files are quantised",
        "--speculative-token-map": "not needed: the vocabulary of a head is read from its file",
        "--speculative-attention-mode": "not needed: drafts are verified in one forward with exact attention",
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
        "--draft-p-split": _CONTROLLER,
        "--ctx-size-draft": _SHARED_CONTEXT,
        "-cd": _SHARED_CONTEXT,
        "--device-draft": _SHARED_DEVICE,
        "-devd": _SHARED_DEVICE,
        "--gpu-layers-draft": _SHARED_DEVICE,
        "--n-gpu-layers-draft": _SHARED_DEVICE,
        "-ngld": _SHARED_DEVICE,
        "--threads-draft": "--threads N, for the model and its drafter",
        "-td": "--threads N, for the model and its drafter",
        "--lookup-cache-static": "--method suffix, which keeps earlier texts itself",
        "--lookup-cache-dynamic": "--method suffix, which keeps earlier texts itself",
        "--spec-type": "--method ngram, --method suffix, --method eagle or --draft-model DIR",
        "--spec-default": "--method auto, which is the default",
    },
    "TGI": {"--speculate": "--method ngram:N, or --method medusa:N with Medusa heads"},
    "mlx-lm": {"--num-draft-tokens": _DRAFT_TOKENS},
    "vLLM": {
        "--disable-by-batch-size": "--method 'NAME:disable_by_batch_size=N'",
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
