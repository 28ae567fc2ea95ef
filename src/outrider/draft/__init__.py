"""Drafters: one small protocol, one file each."""

from outrider.draft.protocol import Drafter, check_drafts
from outrider.draft.registry import DraftContext, build_drafter, check_method, method_names, register_drafter

__all__ = ["DraftContext", "Drafter", "build_drafter", "check_drafts", "check_method", "method_names", "register_drafter"]
