"""The start-up check: run a model in many ways, and see whether a row has the same bits in all of them.

What it finds decides how a model is served: over pages with the promise, over pages without it, or with its class's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from outrider.core import Guarantee
from outrider.errors import ModelError
from outrider.model.hf.attention import NAME, PROBE, Form, Pages, Probe, Unfit, interfaces, register
from outrider.model.hf.cached import CachedRunner, ClassCache, NoPages
from outrider.model.hf.facade import describe
from outrider.model.hf.paged import PagedRunner
from outrider.model.hf.rows import fix_rows, register_experts
from outrider.model.hf.view import base_of, view_of
from outrider.model.runner import Feed, Runner
from outrider.ops import Blocked

__all__ = ["build_runner"]

_log = logging.getLogger("outrider")
_TEXT = 76  # tokens of the check: more than a page
_CHUNKS = (1, 2, 3, 5, 7, 17, 33, 8)  # rows of its forwards, in turn
_BEGUN, _CONTINUED = 40, (43, 44, 51)  # tokens that a cache has read, one forward after the other
_NEAR = {torch.float32: 2e-3}  # relative distance of logits from the class's; see _far
_NEAR_NARROW = 6e-2

PageCount = Callable[[int], int]  # pages that fit, by the bytes of a slot


def build_runner(model: Any, pages: PageCount, page_size: int, sequences: int, pack: bool = True) -> Runner:
    """A runner for a model, by what the check says of it. The model itself is not changed."""
    register()
    register_experts()
    view, ids = view_of(model), _text(model.get_output_embeddings().weight.shape[0])
    try:
        if model.device.type != "cpu":
            raise Unfit("on a GPU a Transformers class multiplies with other bits for other row counts")
        for module in view.modules():
            module.__dict__["outrider_packs"] = pack
        forms = _forms(view, ids[:8])
        expected = _reference(view, ids)
        return _paged(view, forms, (ids, expected), pages, page_size, pack)
    except Unfit as error:
        reason = str(error)
    return _cached(view_of(model), reason, ids, NoPages(pages(0), page_size), sequences)


def _paged(
    view: Any, forms: tuple[Form, ...], wanted: tuple[list[int], Tensor], pages: PageCount, page_size: int, pack: bool
) -> PagedRunner:
    """A runner over pages, with the promise where the check finds it kept."""
    ops, reason = Blocked(), None
    ids, expected = wanted
    reason = fix_rows(view, ops, pack)
    if reason is not None:
        raise Unfit(reason)
    trial, intercept = Pages(forms, 4 * (_TEXT // page_size + 2), page_size), False
    for intercept in (False, True):
        runner = PagedRunner(view, describe(view, forms, Guarantee(True)), trial, ops, intercept)
        try:
            reason = _broken(runner, ids, expected)
        except Unfit:
            raise
        except Exception as error:  # whatever the class raises when its rows are one flat batch
            raise Unfit(f"it cannot read several texts as one row ({type(error).__name__}: {error})") from error
        if reason is None:
            break
    guarantee = Guarantee(reason is None, reason)
    if reason is not None:
        _log.warning("%s: tokens are not guaranteed to be the same with speculation off and on: %s", type(view).__name__, reason)
    per_slot = sum(8 * form.kv_heads * -(-form.width // 16) * 16 for form in forms)
    pool = Pages(forms, pages(per_slot) + 1, page_size)
    return PagedRunner(view, describe(view, forms, guarantee), pool, ops, intercept and reason is None)


def _cached(view: Any, reason: str, ids: list[int], pool: NoPages, sequences: int) -> CachedRunner:
    """A runner with the class's cache, after a look at how the class continues a text."""
    _log.warning("%s is run with its class's cache, one sequence at a time: %s", type(view).__name__, reason)
    facade = describe(view, (), Guarantee(False, reason))
    runner = CachedRunner(view, facade, pool, True, 2 * sequences)
    with torch.inference_mode():
        try:
            expected = view(input_ids=torch.tensor([ids], device=view.device), use_cache=False).logits[0].float().cpu()
            cache = ClassCache()
            begun = runner.read(cache, ids[:_BEGUN])
            continued = torch.cat([runner.read(cache, ids[:stop]) for stop in _CONTINUED])
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{type(view).__name__} cannot be run: {type(error).__name__}: {error}") from error
    if _far(begun, expected[:_BEGUN], view.dtype):
        raise ModelError(f"{type(view).__name__} writes other logits with its cache than without it; it cannot be served")
    if _far(continued, expected[_BEGUN : _CONTINUED[-1]], view.dtype):
        runner = CachedRunner(view, facade, pool, False, 2 * sequences)
        _log.warning("%s reads one token at a time after its prompt, so drafts cannot pay", type(view).__name__)
    return runner


@torch.inference_mode()
def _forms(view: Any, ids: list[int]) -> tuple[Form, ...]:
    """What the layers of a view ask of attention; Unfit where it is more than pages offer."""
    if getattr(view, "_is_stateful", False):
        raise Unfit("it keeps recurrent state, which cannot be cut back to an earlier token")
    probe = Probe()
    config = view.config.get_text_config(decoder=True)
    with interfaces(view, PROBE, NAME, probe):
        try:
            base_of(view)(input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], use_cache=False)
        except Exception as error:  # a class may stumble over the probe in any way
            raise error if isinstance(error, Unfit) else Unfit(f"its class bypasses AttentionInterface ({error})") from error
    if sorted(probe.forms) != list(range(config.num_hidden_layers)):
        raise Unfit(f"{len(probe.forms)} of its {config.num_hidden_layers} layers attend by way of AttentionInterface")
    return tuple(probe.forms[layer] for layer in range(config.num_hidden_layers))


@torch.inference_mode()
def _reference(view: Any, ids: list[int]) -> Tensor:
    """The class's logits of the text, (tokens, V)."""
    logits: Tensor = view(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def _broken(runner: PagedRunner, ids: list[int], expected: Tensor) -> str | None:
    """What breaks the promise in these forwards: None where every row has one value. Unfit where logits are not the class's."""
    span = len(ids) // runner.pool.page_size + 2
    pages = [list(range(n * span, (n + 1) * span)) for n in range(4)]
    whole = _logits(runner, [Feed(pages[0], 0, ids)])
    if _far(whole, expected, runner.dtype):
        raise Unfit("its logits over pages are not those of its class")
    for start, stop in _cuts(len(ids)):
        if not torch.equal(_logits(runner, [Feed(pages[1], start, ids[start:stop])]), whole[start:stop]):
            return f"a row's bits depend on how many rows are computed with it (seen at {stop - start} rows)"
    cut = runner.pool.page_size - 3  # of a tree that crosses a page's end; nodes 0, 2, 3 and 5 are the text
    tree = [ids[cut], ids[cut] ^ 1, ids[cut + 1], ids[cut + 2], ids[cut + 1] ^ 1, ids[cut + 3]]
    feeds = [
        Feed(pages[1], cut - 1, ids[cut - 1 : cut], tree, [-1, -1, 0, 2, 0, 3]),
        Feed(pages[0], 50, ids[50:51]),
        Feed(pages[2], 0, ids[:9]),
        Feed(pages[3], 0, ids[:3]),
    ]
    places = [cut - 1, cut, None, cut + 1, cut + 2, None, cut + 3, 50, *range(9), *range(3)]
    rows = _logits(runner, feeds)
    if any(not torch.equal(row, whole[place]) for row, place in zip(rows, places, strict=True) if place is not None):
        return "a row's bits depend on the sequences and drafts beside it"
    return None


def _cuts(length: int) -> Iterator[tuple[int, int]]:
    """Where the text of the check is cut into forwards."""
    start, sizes = 0, cycle(_CHUNKS)
    while start < length:
        stop = min(start + next(sizes), length)
        yield start, stop
        start = stop


def _logits(runner: PagedRunner, feeds: list[Feed]) -> Tensor:
    count = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
    logits = runner.forward(feeds, wanted=range(count)).logits
    assert logits is not None
    return logits


def _far(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether most rows differ by more than rounding; few may, where experts are nearly tied."""
    distance = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return not float(distance.median()) < _NEAR.get(dtype, _NEAR_NARROW)


def _text(vocab: int) -> list[int]:
    """Token ids of the check."""
    generator = torch.Generator().manual_seed(0)
    return [token & ~1 for token in torch.randint(2, max(vocab - 1, 3), (_TEXT,), generator=generator).tolist()]
