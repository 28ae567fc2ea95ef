"""A target or draft model whose layers are a Transformers class: the model a user holds, run under the engine's contract.

`view` copies the modules and shares their tensors, `attention` serves their attention over paged KV, `rows` makes their
products independent of the row count, `paged` and `cached` run them, and `check` proves what a model keeps of the promise.
"""

from outrider.model.hf.cached import CachedRunner
from outrider.model.hf.check import build_runner
from outrider.model.hf.facade import context_of
from outrider.model.hf.native import native_decoder
from outrider.model.hf.paged import PagedRunner
from outrider.model.hf.refuse import check_causal
from outrider.model.hf.view import view_of

__all__ = ["CachedRunner", "PagedRunner", "build_runner", "check_causal", "context_of", "native_decoder", "view_of"]
