"""Drafters: one small protocol, one file each."""

from outrider.draft.context import DraftContext
from outrider.draft.protocol import Drafter, check_drafts
from outrider.draft.registry import build_drafter, check_speculation, check_weights, method_names, register_drafter

__all__ = [
    "DraftContext",
    "Drafter",
    "build_drafter",
    "check_drafts",
    "check_speculation",
    "check_weights",
    "method_names",
    "register_drafter",
]
