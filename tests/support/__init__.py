"""What several test modules use: one file per noun. The names most of them need can be imported from here."""

from outrider.draft.none import NoDrafter
from tests.support.engines import make_engine, make_request, random_params, renamed, run, solo_answers
from tests.support.models import (
    BASE,
    FAMILIES,
    HYBRIDS,
    VOCAB,
    family_config,
    make_pool,
    random_decoder,
    write_family,
    write_tokenizer,
)
from tests.support.oracle import Oracle

__all__ = [
    "BASE",
    "FAMILIES",
    "HYBRIDS",
    "VOCAB",
    "NoDrafter",
    "Oracle",
    "family_config",
    "make_engine",
    "make_pool",
    "make_request",
    "random_decoder",
    "random_params",
    "renamed",
    "run",
    "solo_answers",
    "write_family",
    "write_tokenizer",
]
