"""Drafters: one small protocol, one file each."""

from outrider.draft.protocol import Drafter, check_drafts
from outrider.draft.registry import DraftContext, build_drafter, method_names

__all__ = ["DraftContext", "Drafter", "build_drafter", "check_drafts", "method_names"]
