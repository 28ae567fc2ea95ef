"""Drafters: one small protocol, one file each."""

from outrider.draft.context import DraftContext
from outrider.draft.protocol import Drafter, check_drafts
from outrider.draft.registry import build_drafter, check_speculation, check_weights, method_names, register_drafter
from outrider.draft.shared_texts import Kept

__all__ = [
    "DraftContext",
    "Drafter",
    "Kept",
    "build_drafter",
    "check_drafts",
    "check_speculation",
    "check_weights",
    "method_names",
    "register_drafter",
]
