"""The progress bar of a batch, by tqdm or by whatever the caller brings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from outrider.checks import shown
from outrider.errors import InvalidParameter

__all__ = ["UseTqdm", "progress_bar"]

UseTqdm = bool | Callable[..., Any] | None


def progress_bar(use_tqdm: UseTqdm, outputs: int) -> AbstractContextManager[Any]:
    """A bar to `update(1)` for each output that is complete, or None where none is shown.

    True is tqdm's; a callable is called as tqdm is and returns something with `update` and `close`. By default several
    outputs on a terminal have a bar.
    """
    if use_tqdm is None:
        use_tqdm = outputs > 1 and sys.stderr is not None and sys.stderr.isatty()
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise InvalidParameter("use_tqdm", f"must be True, False or a callable like tqdm, got {shown(use_tqdm)}")
    if not use_tqdm:
        return nullcontext()
    make = tqdm if use_tqdm is True else use_tqdm
    return closing(make(total=outputs, desc="Processed prompts", dynamic_ncols=True))
