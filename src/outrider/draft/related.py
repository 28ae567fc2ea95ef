"""Loading a draft model beside its target, and saying how the two relate."""

from __future__ import annotations

import logging
from typing import NamedTuple

from outrider.draft.context import DraftContext, LoadedDraft
from outrider.draft.vocabulary import SameTokens, Side, Vocabulary, relate, shared_tokens
from outrider.draft.window import log_context
from outrider.model import Runner
from outrider.text import Tokenizer

__all__ = ["Related", "describe", "load_related"]

_log = logging.getLogger("outrider")
_LARGE_DRAFT = 1 / 3  # of the target's weights


class Related(NamedTuple):
    """A draft model that was loaded, and how its tokens become the target's (None: by way of text)."""

    runner: Runner
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary | None


def load_related(context: DraftContext, way: str = "auto") -> Related:
    """The draft model that the settings name."""
    name, runner, tokenizer = _loaded_draft(context)
    target = Side(str(context.directory), context.tokenizer, context.target.decoder.spec.vocab)
    draft = Side(name, tokenizer, runner.decoder.spec.vocab)
    vocabulary = relate(target, draft, way)
    _log.info("draft %s: %s", name, describe(target, draft, vocabulary))
    log_context(f"draft {name}", runner.decoder.spec.context, runner.decoder.reach, context.max_length)
    share = runner.decoder.spec.parameters / context.target.decoder.spec.parameters
    if share > _LARGE_DRAFT:
        _log.warning(
            "draft %s has %.0f %% of the target's weights, and every token it drafts costs about as much of a target pass; "
            "`outrider plan --target` lists smaller ones",
            name, 100 * share,
        )  # fmt: skip
    return Related(runner, tokenizer, vocabulary)


def _loaded_draft(context: DraftContext) -> LoadedDraft:
    if context.loaded is not None and context.config.model is None:
        return context.loaded
    directory = context.weights("draft")
    return LoadedDraft(str(directory), context.load_model(directory), Tokenizer.load(directory))


def describe(target: Side, draft: Side, vocabulary: Vocabulary | None) -> str:
    """How the draft's tokens relate to the target's: the table, the special tokens, and the end of text."""
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        return "tokens taken to be the same, by the size of the vocabulary: a tokenizer is missing"
    table = ours.table()
    if isinstance(vocabulary, SameTokens):
        tokens = f"same tokens ({len(table)})"
    else:
        how = "by text" if vocabulary is None else "shared tokens"
        tokens = f"{how}: {len(shared_tokens(ours, theirs))} of the target's {len(table)} tokens are shared"
    special, others = ({(text, i) for text, i in side.table().items() if i in side.special_ids} for side in (ours, theirs))
    odd = sorted({text for text, _ in special ^ others})
    differ = f"differ ({len(odd)}: {', '.join(odd[:4])}{', ...' if len(odd) > 4 else ''})" if odd else "same"
    ends = [_end(side) for side in (ours, theirs)]
    end = f"same ({ends[0]})" if ends[0] == ends[1] else f"{ends[0]}, of the draft {ends[1]}"
    return f"{tokens}; special tokens: {differ}; EOS: {end}"


def _end(tokenizer: Tokenizer) -> str:
    end = tokenizer.eos_id
    return "none" if end is None else f"{tokenizer.decode([end], skip_special_tokens=False)} {end}"
