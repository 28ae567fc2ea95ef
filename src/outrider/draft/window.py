"""Drafters whose context is shorter than a text: how far back they see then, and what is said about it."""

from __future__ import annotations

import logging

__all__ = ["AHEAD", "limit_reason", "log_context"]

_log = logging.getLogger("outrider")
AHEAD = 64  # drafted tokens that a window leaves room for, or a quarter of a shorter context


def log_context(what: str, context: int, positions: int, max_length: int) -> None:
    """Say at start-up that requests may be longer than a drafter's context, and what happens then."""
    short = "%s: its context of %d tokens is shorter than requests may be (%d); beyond it, it drafts "
    if positions > context:
        _log.info(short + "from a window of the last ones", what, context, max_length)
    elif max_length > positions:
        _log.warning(short + "nothing", what, context, max_length)


def limit_reason(what: str, context: int) -> str:
    """Why drafting ended, for `off_reason`."""
    return f"the text is longer than the context of the {what} ({context} tokens)"
