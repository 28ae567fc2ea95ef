"""The native CPU core: ctypes over the shared library that was built at installation.

`find_core` picks the library that this processor can run, or says why there is none. `PackedLinear` and `Stack` hold
weights in the core's layout. ops/cpu documents the layouts and why rows keep their bits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cores import NEEDED, digest_of_sources
from outrider.cores import built as _built
from outrider.errors import InvalidParameter, RankDied
from outrider.ops.blocks import StoredBlocks
from outrider.ops.groups import Grouped
from outrider.ops.packing import KINDS, PANEL, Arena, pack, pack_groups
from outrider.platform import cpu_flags

if TYPE_CHECKING:
    from outrider.ops.experts import PackedExperts

__all__ = [
    "BESIDE",
    "BLOCK_ROWS",
    "JOINED",
    "KEY_ROWS",
    "TEXT_ROWS",
    "TOKENS",
    "AdapterTable",
    "Addressed",
    "BlockGuesses",
    "BlockParams",
    "ChainParams",
    "Core",
    "Epilogue",
    "GrownTree",
    "GrowthParams",
    "LayerWeights",
    "NormWeights",
    "PackedLinear",
    "RotaryRows",
    "Stack",
    "StackRows",
    "StackSpan",
    "StackWeights",
    "Threads",
    "find_core",
    "load_build",
    "usable_builds",
]

_MACHINES = ("x86_64", "AMD64", "aarch64")
_REFUSALS = {1: "the kernel does not grant AMX", 2: "a trial of AMX faulted", 3: "a trial of AMX gave wrong results"}
TOKENS, JOINED, BESIDE = 0, 1, 2  # how rows enter a stack; see Form in core.cpp
TEXT_ROWS, KEY_ROWS, BLOCK_ROWS = 0, 1, 2  # what a forward does with its rows; see Mode in core.cpp
_FUNCTIONS = ("none", "scale", "cap", "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped")  # Function of elementwise.h

_MIN_THREADED_LOGITS = 1 << 18  # choices over fewer logits run on one thread

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Tokens = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]
Shape = tuple[float, float, float, float]  # temperature (0 is greedy), top_k, top_p, min_p
_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

_SIGNATURES = {
    "outrider_linear": [_pointer, _pointer, _int, _pointer, _pointer, _int],
    "outrider_read": [_pointer, _int, _int],
    "outrider_multiply_add": [_int, _int, _int],
    "outrider_forward": [_pointer, _pointer],
    "outrider_draft": [_pointer, _pointer, _pointer],
    "outrider_grow": [_pointer, _pointer, _pointer],
    "outrider_guess": [_pointer, _pointer, _pointer],
    "outrider_choose": [_pointer, _int],
    "outrider_pack": [_pointer, _int],
    "outrider_pack_groups": [_pointer, _int],
    "outrider_scan": [_pointer, _int],
}


class Core:
    """A loaded library. Calls use the number of threads that was fastest lately, or all of them where it is `steady`."""

    def __init__(self, path: Path, steady: bool = False) -> None:
        self.steady = steady
        self.name = path.name.removeprefix("_core_").split(".")[0]
        library = ctypes.CDLL(str(path))
        library.outrider_sources.restype = ctypes.c_char_p
        self.sources: str = library.outrider_sources().decode()  # the digest of what it was built from
        if self.sources != _digest():
            raise OSError(f"{path.name} was built from other sources; install outrider again")
        refused = library.outrider_try()
        if refused:
            raise OSError(_REFUSALS[refused])
        self.threads = torch.get_num_threads()
        self.packs_12bit = not library.outrider_tiles()  # AMX tiles are loaded straight from memory
        self.isolates_matrices = self.name == "sanitized"  # one allocation each, so that the sanitizer sees overruns
        for name, types in _SIGNATURES.items():
            getattr(library, name).argtypes = types
        self.linear, self.read = library.outrider_linear, library.outrider_read
        self.pack, self.pack_groups = library.outrider_pack, library.outrider_pack_groups
        self.forward, self.draft, self.grow = library.outrider_forward, library.outrider_draft, library.outrider_grow
        self.guess = library.outrider_guess
        self.scan = library.outrider_scan
        self._choose, self._multiply_add = library.outrider_choose, library.outrider_multiply_add
        self._multiply_add.restype = _float

    def take_threads(self) -> None:
        """Use as many threads as torch has on the calling thread."""
        self.threads = torch.get_num_threads()

    def draw(self, logits: Tensor, shapes: Sequence[Shape], keys: Sequence[int], words: int) -> list[int]:
        """The choice in each row of logits (N, V), -1 where there is none.

        `shapes` are temperature (0 is greedy), top_k, top_p and min_p of each row, `keys` two words of each row, side by
        side, and `words` is the address of the tokens' words.
        """
        chosen = array("q", bytes(8 * logits.shape[0]))
        row_arrays = array("d", chain.from_iterable(shapes)), array("f"), array("I", keys)
        self._pick(logits, row_arrays, words, 0, chosen.buffer_info()[0], 0)
        return chosen.tolist()

    def rank(
        self,
        logits: Tensor,
        shapes: Sequence[Shape],
        draft_temperatures: Sequence[float],
        keys: Sequence[int],
        words: int,
        best: int,
    ) -> tuple[Tokens, Chances]:
        """The most probable choices in each row (N, best) and their chances, to a few digits. The draft temperature of a row
        divides its logits.
        """
        tokens, chances = np.empty((len(logits), best), np.int64), np.empty((len(logits), best))
        row_arrays = array("d", chain.from_iterable(shapes)), array("f", draft_temperatures), array("I", keys)
        self._pick(logits, row_arrays, words, best, tokens.ctypes.data, chances.ctypes.data)
        return tokens, chances

    def _pick(self, logits: Tensor, row_arrays: Sequence[array[Any]], words: int, best: int, tokens: int, chances: int) -> None:
        """A call with a ChoiceSpec of core.cpp."""
        logits, (rows, vocab) = logits.contiguous(), logits.shape
        if [len(values) for values in row_arrays] != [4 * rows, rows if best else 0, 2 * rows] or logits.dtype != torch.float32:
            raise ValueError(
                f"{rows} rows of logits came with {len(row_arrays[0]) // 4} shapes and {len(row_arrays[2]) // 2} keys"
            )
        addresses = [values.buffer_info()[0] for values in row_arrays]
        spec = array("q", (logits.data_ptr(), rows, vocab, *addresses, words, best, tokens, chances))
        threads = min(self.threads, rows) if rows * vocab > _MIN_THREADED_LOGITS else 1
        self._choose(spec.buffer_info()[0], threads)

    def multiply_add(self, kind: str, steps: int) -> float:
        """Run `steps` multiply-add steps, to measure the peak rate. Returns their multiply-adds, 0 where AMX tiles are used."""
        return float(self._multiply_add(KINDS[kind], steps, self.threads))


@lru_cache(maxsize=2)
def find_core(steady: bool = False) -> tuple[Core | None, str]:
    """The best library built for this processor, and the reason for the choice.

    OUTRIDER_CORE names a library to load instead: one built with sanitizers, or for fewer instructions.
    """
    chosen = os.environ.get("OUTRIDER_CORE")
    if chosen:
        if not Path(chosen).exists():
            raise InvalidParameter("OUTRIDER_CORE", f"{chosen} does not exist")
        return Core(Path(chosen), steady), f"{chosen}, from OUTRIDER_CORE"
    if not _built():
        if platform.machine() not in _MACHINES:
            return None, f"it is written for x86-64 and ARM (aarch64) processors, and this one is {platform.machine()}"
        return None, "not built: no C++ compiler was found when outrider was installed"
    problems: list[str] = []
    for name in usable_builds():
        try:
            return load_build(name, steady), "; ".join([f"built for {name}", *problems])
        except OSError as error:
            problems.append(f"not {name}: {error}")
    return None, "; ".join(problems) or f"the processor can run none of: {', '.join(_built())}"


@lru_cache(maxsize=1)
def _digest() -> str:
    return digest_of_sources()


def usable_builds() -> list[str]:
    """Libraries for instructions this processor has, best first."""
    return [name for name in _built() if NEEDED[name] <= cpu_flags()]


def load_build(name: str, steady: bool = False) -> Core:
    """One of the usable builds; OSError says why it cannot run here after all."""
    return Core(_built()[name], steady)


class Threads:
    """Picks one thread or all of the core's, whichever was faster lately for that many rows.

    A tiny model gains less from a second thread than its barriers cost, and beside a busy process every barrier waits. The
    bits do not depend on the choice. The fastest of a few calls counts, because noise only adds. Where all threads clearly
    win at some row count, they are used at larger ones without a comparison.
    """

    _TRIES = 4  # timings remembered of each
    _RETRY_EVERY = 256  # calls after which the slower one is tried once more
    _CLEARLY = 1.05

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seconds: dict[tuple[int, int], list[float]] = {}  # (rows, threads) -> latest seconds
        self._calls: dict[int, int] = {}
        self._clear: int | None = None  # the fewest rows at which all threads clearly win

    def run(self, rows: int, call: Callable[[int], int | None]) -> None:
        """Make the call with a number of threads and remember its time. The call may return its number of equal steps."""
        max_threads = self._core.threads
        if max_threads == 1 or self._core.steady:
            call(max_threads)
            return
        threads = self._pick(rows, max_threads)
        start = time.perf_counter()
        steps = call(threads) or 1
        seconds = self._seconds.setdefault((rows, threads), [])
        seconds.append((time.perf_counter() - start) / steps)
        del seconds[: -self._TRIES]

    def _pick(self, rows: int, max_threads: int) -> int:
        many, one = self._seconds.get((rows, max_threads), ()), self._seconds.get((rows, 1), ())
        if len(many) < self._TRIES:
            return max_threads
        settled = self._clear is not None and rows > self._clear
        if len(one) < self._TRIES and not settled:
            return 1
        quicker, other = (1, max_threads) if one and min(one) < min(many) else (max_threads, 1)
        if len(one) == self._TRIES:
            self._note(rows, min(one) > self._CLEARLY * min(many))
        calls = self._calls[rows] = self._calls.get(rows, 0) + 1
        return other if calls % self._RETRY_EVERY == 0 else quicker

    def _note(self, rows: int, clear: bool) -> None:
        if clear and (self._clear is None or rows < self._clear):
            self._clear = rows
        elif not clear and rows == self._clear:
            self._clear = None


class Epilogue(NamedTuple):
    """What is done with the results of a product."""

    activation: str | None = None  # "clamped": that of `Clamp`, with alpha as scale and its limit as cap
    paired: bool = False  # the first half of the columns is a gate: the product is activation(gate) * the other half
    scale: float = 1.0
    cap: float | None = None  # y becomes cap * tanh(y / cap), after the scale

    @property
    def function(self) -> int:
        """Its number in the core."""
        without = "cap" if self.cap is not None else "none" if self.scale == 1.0 else "scale"
        return _FUNCTIONS.index(self.activation or without)


class NormWeights(NamedTuple):
    """A norm over rows. Without weights there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    layer: bool = False  # the mean is subtracted first
    eps: float = 0.0


class RotaryRows(NamedTuple):
    """A rotary table; without one nothing is rotated."""

    cos: Tensor | None = None  # (rows, head_dim / 2)
    sin: Tensor | None = None
    growth: Tensor | None = None  # (rows,) of queries


_STORED, _NO_NORM = Epilogue(), NormWeights()


class Addressed:
    """What the core reads by its address."""

    handle: int


class PackedLinear(Addressed):
    """A weight matrix (columns, inner) in the core's layout, with its bias and its epilogue.

    `kind` is the dtype that products read; a matrix in groups of integers keeps them, whatever the kind is.
    bf16 weights are packed to 12 bits (lossless) where nearly all fit, unless `pack_12bit` is False. The bits of a product do
    not depend on it. `order` is the weight's row of each column, where they are not in order.
    """

    def __init__(
        self,
        core: Core,
        kind: str,
        weight: Tensor | Grouped | StoredBlocks,
        bias: Tensor | None = None,
        then: Epilogue = _STORED,
        pack_12bit: bool = True,
        order: Tensor | None = None,
        arena: Arena | None = None,
    ) -> None:
        columns, self.inner = weight.shape
        self._order, self._halves = order, 2 if then.paired else 1
        self.columns = columns // 2 if then.paired else columns  # of a product
        self._core = core
        self._threads = Threads(core)
        self.is_grouped = not isinstance(weight, Tensor)
        if isinstance(weight, Tensor):
            number = KINDS[kind]
            self._packed = pack(core, kind, weight.detach(), bias, then.paired, pack_12bit, order, arena)
        else:
            number, self._packed = pack_groups(core, weight, bias, self.columns_in_panels(), arena)
        panels, steps, *parts = self._packed
        sizes = (number, self.columns, self.inner, panels, steps, then.paired)
        self._spec = array("q", _words((*sizes, *parts, then.function, float(then.scale), float(then.cap or 0.0))))
        self.handle = self._spec.buffer_info()[0]

    @property
    def bytes(self) -> int:
        """Bytes that a product reads."""
        return self._packed.weights.nbytes + self._packed.raw_blocks.nbytes

    @property
    def escaped_blocks(self) -> Tensor:
        """Numbers of the blocks of a single panel that 12-bit packing stores whole, int32, in order."""
        return self._packed.escaped[:-1].int()

    def columns_in_panels(self) -> Tensor:
        """The weight's row of each column by panel (panels, 16), -1 past the end of a panel's half."""
        rows = torch.arange(self.columns * self._halves) if self._order is None else self._order
        rows = F.pad(rows.view(self._halves, -1), (0, -self.columns % PANEL), value=-1)
        return rows.view(self._halves, -1, PANEL).transpose(0, 1).flatten(0, 1)

    def __call__(self, x: Tensor, norm: NormWeights = _NO_NORM) -> Tensor:
        """(rows, columns) float32 of rows (rows, inner) float32, which `norm` norms first."""
        if x.dtype != torch.float32 or x.shape[1:] != (self.inner,):
            raise ValueError(f"rows of {self.inner} float32 values were expected, not {tuple(x.shape)} {x.dtype}")
        x = x.contiguous()
        rows, out, norm_spec = x.shape[0], torch.empty(x.shape[0], self.columns), array("q", _words(norm))
        if rows:
            source, weights, target = x.data_ptr(), norm_spec.buffer_info()[0], out.data_ptr()
            self._threads.run(rows, lambda n: self._core.linear(self.handle, source, rows, weights, target, n))
        return out


class ChainParams(NamedTuple):
    """The chains that a model is to draft, the longest first."""

    wanted: array[int]  # (sequences,) tokens of each chain, int32
    shapes: array[float]  # (sequences, 4); see Core.draw
    draft_temperatures: array[float]  # (sequences,) float32
    keys: array[int]  # (steps, sequences, 2) of the noise, unsigned
    words: int  # address of the tokens' words
    floor: float = 0.0  # drafting ends where the survival of every chain is below it


class GrowthParams(NamedTuple):
    """The trees that a network is to draft."""

    levels: int
    beam: int  # nodes of a level that are run
    branch: int  # children of each of them
    rooms: array[int]  # (sequences,) nodes that are kept, int32
    shapes: array[float]  # (sequences, 4); see Core.draw
    draft_temperatures: array[float]  # (sequences,) float32
    keys: array[int]  # (levels, sequences, 2) of the noise, unsigned
    words: int  # address of the words of every output
    ids: Tensor | None = None  # (outputs,) int32: the token of each output, where it is not its number
    feeds_back_normed: bool = False  # a node's row after the last norm, not before it, is the feature of its children
    floor: float = 0.0  # growth ends where the survival of every node to run is below it


class BlockParams(NamedTuple):
    """The trees over blocks that a network is to draft."""

    slots: int  # the last rows of every block guess
    candidates: int  # of each slot
    rooms: array[int]  # (sequences,) nodes that are kept, int32
    shapes: array[float]  # (sequences * slots, 4); see Core.draw
    draft_temperatures: array[float]  # (sequences * slots,) float32
    divisors: array[float]  # (sequences * slots,) float32, of the scores of pairs
    keys: array[int]  # (sequences * slots, 2) of the noise, unsigned
    words: int  # address of the words of every output
    left: Tensor | None = None  # (tokens, rank) float32: with `right` the scores of neighbouring tokens
    right: Tensor | None = None  # (rank, outputs) float32
    ids: Tensor | None = None  # (outputs,) int32: the token of each output, where it is not its number


class BlockGuesses(NamedTuple):
    """Trees over blocks, as (tokens, parents, survival) of each sequence, and what they are made of."""

    trees: list[tuple[list[int], list[int], list[float]]]  # empty where logits leave no choice
    logits: Tensor  # (sequences * slots, outputs)


class GrownTree(NamedTuple):
    """The nodes kept of one sequence's tree, parents before children."""

    tokens: list[int]
    parents: list[int]  # -1: the root
    survival: list[float]
    places: list[int]  # of the logits after each node; -1 where it was not run. Those after the root come first, by sequence


class LayerWeights(NamedTuple):
    """One decoder layer, in the order of LayerSpec in core.cpp. Matrices are (out, in)."""

    qkv: PackedLinear  # columns by head of keys: its queries, key and value
    out: PackedLinear
    gate_up: PackedLinear | None  # None where there are experts
    down: PackedLinear | None
    norm_in: NormWeights
    norm_mlp: NormWeights
    norm_attn_out: NormWeights
    norm_mlp_out: NormWeights
    q_norm: NormWeights  # of all heads, side by side
    k_norm: NormWeights
    qk_over_width: bool  # q_norm and k_norm norm all heads of a row together
    parallel: bool  # attention and MLP read the same rows
    rotary: RotaryRows
    scale: float  # of scores
    window: int  # 0: none
    soft_cap: float  # 0: none
    residual_scale: float  # of what a norm after a part or a mixture leaves
    sinks: Tensor | None = None  # (heads,) scores of keys without a value
    experts: PackedExperts | None = None


class StackWeights(NamedTuple):
    """A stack of layers and what is around it, in the order of StackSpec in core.cpp."""

    layer: list[LayerWeights]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of the widest layer
    vocab: int
    rotary_rows: int  # of the shortest rotary table
    embedding: PackedLinear | None  # a column for each token; None: rows come as features
    learned: Tensor | None = None  # of positions
    learned_rows: int = 0
    embedding_scale: float = 1.0
    form: int = TOKENS
    residual_normed: bool = False
    joined: PackedLinear | None = None  # of JOINED
    output: PackedLinear | None = None  # to logits
    norm: NormWeights = _NO_NORM  # the last one
    norm_hidden: NormWeights = _NO_NORM  # of BESIDE and of JOINED with norms: the feature's
    norm_embedding: NormWeights = _NO_NORM  # of JOINED with norms
    ranks: int = 1  # that share every layer
    gather: int = 0  # address of the function that gathers their parts; see ops/group.py


class StackSpan(NamedTuple):
    """Which part of a stack runs, and how its rows are placed."""

    first_layer: int = 0
    last_layer: int | None = None
    rotary_lag: int = 0  # rotary position = position - lag
    mode: int = TEXT_ROWS  # or KEY_ROWS or BLOCK_ROWS


_WHOLE = StackSpan()


class StackRows(NamedTuple):
    """The outputs of a forward for every row, float32."""

    stream: Tensor | None  # (N, hidden) leaving the last layer of the span
    last: Tensor | None  # after the last norm
    taps: Tensor | None  # (N, taps, hidden)
    logits: Tensor | None = None  # (wanted rows, V)


class AdapterTable(NamedTuple):
    """The LoRA adapters that rows may have, by number from 1 on; ops/adapters.py packs them."""

    addresses: array[int] = array("q")  # of the LayerLoras in lora.h, 0 where there is no adapter of that number
    rank_words: int = 0  # words of a row's ranks in the widest product of any adapter
    held: tuple[object, ...] = ()  # what must live as long as the table

    @property
    def words(self) -> tuple[int, int, int]:
        """Fields of ForwardSpec in core.cpp."""
        return self.addresses.buffer_info()[0], len(self.addresses), self.rank_words


class Stack:
    """Layers over paged KV, run in one call."""

    def __init__(self, core: Core, weights: StackWeights, keys: Tensor, values: Tensor, page_size: int) -> None:
        """Keys and values are (layers, pages, KV heads, ...) in the layout of ops/cpu/attention.h, float32, bf16 or int8."""
        _check_stack(weights, keys, page_size)
        self._core = core
        self._weights = weights
        self._pool = (keys, values)
        self._threads = Threads(core)
        self._chain_threads = Threads(core)
        self._layers = array("q", _words(tuple(weights.layer)))
        self._spec = array("q", (self._layers.buffer_info()[0], *_words(weights[1:])))
        self._place = self._spec.buffer_info()[0]
        self.touched = array("q", (0,))  # experts whose weights were read so far, over all layers
        self.adapters = AdapterTable()  # another thread may replace it; a forward uses the one it began with
        self._memory = (keys.data_ptr(), values.data_ptr(), keys.shape[1], page_size, 4 // keys.element_size())

    def forward(
        self,
        layout: array[int],
        taps: Tensor | None = None,
        span: StackSpan = _WHOLE,
        features: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> StackRows:
        """Run rows through a span of layers and write their KV. `layout` is made by `lay_out_rows`.

        `features` (N, hidden) are the stream entering the span, or the features that a head joins with the embedding.
        `taps` are layer numbers, int32. With `wanted` rows it returns their logits instead of the stream.
        """
        rows, w = layout[1], self._weights
        stream = torch.empty(rows, w.hidden) if wanted is None else None
        last = None if w.norm.weight is None else torch.empty(rows, w.hidden)
        tapped = None if taps is None else torch.empty(rows, len(taps), w.hidden)
        if features is not None:
            width = w.joined.inner if span.mode == KEY_ROWS and w.joined is not None else w.hidden
            if features.dtype != torch.float32 or features.shape != (rows, width):
                raise ValueError(f"features are {tuple(features.shape)} {features.dtype}, not {(rows, width)} float32")
            features = features.contiguous()
        logits, chosen = None, array("i", wanted or ())
        if wanted is not None:
            assert w.output is not None
            logits = torch.empty(len(wanted), w.output.columns)
        first, end, *placed = span
        adapters = self.adapters
        spec = array("q", (layout.buffer_info()[0], *self._memory, first, self._weights.layers if end is None else end, *placed,
            _address(features), _address(taps), 0 if taps is None else len(taps), _address(tapped),
            _address(stream), _address(last), chosen.buffer_info()[0], len(chosen), _address(logits),
            *adapters.words, self.touched.buffer_info()[0], 0))  # fmt: skip
        self._threads.run(rows, lambda threads: self._call(self._core.forward, threads, spec))
        return StackRows(stream, last, tapped, logits)

    def draft(self, layout: array[int], chains: ChainParams) -> tuple[list[list[int]], list[list[float]], Tensor]:
        """Draft a chain after each of the layout's feeds. Returns tokens, their chances and the logits (steps, sequences, V).

        The feeds' pages must have room for all but the last token of a chain.
        """
        assert self._weights.output is not None
        wanted = chains.wanted
        sequences, steps = len(wanted), max(wanted, default=0)
        sizes = {"shapes": 4 * sequences, "draft_temperatures": sequences, "keys": 2 * steps * sequences}
        if not steps or any(len(getattr(chains, name)) != size for name, size in sizes.items()):
            raise ValueError(f"chains of {list(wanted)} tokens need {sizes}")
        tokens, chances = array("q", bytes(8 * sequences * steps)), array("d", bytes(8 * sequences * steps))
        logits = torch.empty(steps, sequences, self._weights.output.columns)
        spec = array("q", (layout.buffer_info()[0], *self._memory, 0, self._weights.layers, *[0] * 16))
        inputs = [values.buffer_info()[0] for values in (chains.shapes, chains.draft_temperatures, chains.keys)]
        outputs = [values.buffer_info()[0] for values in (tokens, chances)]
        drawn = array("q", (steps,))
        first = (logits.data_ptr(), sequences, logits.shape[2], *inputs, chains.words, 1, *outputs)
        chain_spec = array("q", _words((steps, wanted.buffer_info()[0], float(chains.floor), drawn.buffer_info()[0], *first)))

        def draft(threads: int) -> int:
            self._call(self._core.draft, threads, spec, chain_spec)
            return drawn[0]

        self._chain_threads.run(sequences, draft)
        columns = [slice(s, min(length, drawn[0]) * sequences, sequences) for s, length in enumerate(wanted)]
        return [tokens[column].tolist() for column in columns], [chances[column].tolist() for column in columns], logits

    def grow(self, layout: array[int], growth: GrowthParams, features: Tensor, span: StackSpan) -> tuple[list[GrownTree], Tensor]:
        """Grow a tree after each of the layout's feeds; see GrowthSpec in core.cpp. Returns them and the logits (places, V).

        `features` (N, hidden) are those of the feeds' rows; of nodes they are the rows of their parents. The feeds' pages must
        have room for the nodes that are kept. No trees are returned where a row of logits leaves no choice.
        """
        assert self._weights.output is not None
        rooms, (levels, beam, branch) = growth.rooms, growth[:3]
        sequences, capacity, outputs = len(rooms), max(rooms, default=0), self._weights.output.columns
        sizes = {"shapes": 4 * sequences, "draft_temperatures": sequences, "keys": 2 * levels * sequences}
        if min(rooms, default=0) < 1 or any(len(getattr(growth, name)) != size for name, size in sizes.items()):
            raise ValueError(f"trees of {list(rooms)} nodes need {sizes}")
        if features.dtype != torch.float32 or features.shape != (layout[1], self._weights.hidden):
            raise ValueError(f"features are {tuple(features.shape)} {features.dtype} for {layout[1]} rows")
        features = features.contiguous()
        logits = torch.empty(sequences + min(sum(rooms), levels * beam * sequences), outputs)
        counts, done, survival = array("i", bytes(4 * sequences)), array("q", (0,)), array("d", bytes(8 * sequences * capacity))
        tokens, parents, places = (array("i", bytes(4 * sequences * capacity)) for _ in range(3))
        first, end, *placed = span
        spec = array("q", (layout.buffer_info()[0], *self._memory, first, self._weights.layers if end is None else end, *placed,
            _address(features), *[0] * 13))  # fmt: skip
        addresses = [values.buffer_info()[0] for values in (growth.shapes, growth.draft_temperatures, growth.keys)]
        results = [values.buffer_info()[0] for values in (counts, tokens, parents, places)]
        growth_spec = array("q", _words((
            levels, beam, branch, rooms.buffer_info()[0], float(growth.floor), growth.feeds_back_normed, growth.ids, *addresses,
            growth.words, logits, capacity, *results, survival.buffer_info()[0], done.buffer_info()[0],
        )))  # fmt: skip

        def grow(threads: int) -> int:
            self._call(self._core.grow, threads, spec, growth_spec)
            return done[0]

        self._chain_threads.run(sequences * beam, grow)
        if min(counts) < 0:
            return [], logits
        parts = (tokens, parents, survival, places)
        kept = [slice(s * capacity, s * capacity + count) for s, count in enumerate(counts)]
        return [GrownTree._make(part[rows].tolist() for part in parts) for rows in kept], logits

    def guess(self, layout: array[int], block: BlockParams, span: StackSpan) -> BlockGuesses:
        """Run the layout's feeds as blocks and find the best tree over each; see BlockSpec in core.cpp."""
        assert self._weights.output is not None
        rooms, slots, left, right = block.rooms, block.slots, block.left, block.right
        sequences, capacity, rows = len(rooms), max(rooms, default=0), len(rooms) * slots
        sizes = {"shapes": 4 * rows, "draft_temperatures": rows, "divisors": rows, "keys": 2 * rows}
        if min(rooms, default=0) < 1 or any(len(getattr(block, name)) != size for name, size in sizes.items()):
            raise ValueError(f"trees over {slots} slots of {list(rooms)} nodes need {sizes}")
        if (left is None) != (right is None) or (left is not None and right is not None and left.shape[1] != right.shape[0]):
            raise ValueError("scores of pairs have two matrices of one rank")
        logits, last = torch.empty(rows, self._weights.output.columns), torch.empty(layout[1], self._weights.hidden)
        counts, survival = array("i", bytes(4 * sequences)), array("d", bytes(8 * sequences * capacity))
        tokens, parents = (array("i", bytes(4 * sequences * capacity)) for _ in range(2))
        first, end, *placed = span
        spec = array("q", (layout.buffer_info()[0], *self._memory, first, self._weights.layers if end is None else end, *placed,
            *[0] * 14))  # fmt: skip
        arrays = (block.shapes, block.draft_temperatures, block.divisors, block.keys)
        results = [values.buffer_info()[0] for values in (counts, tokens, parents, survival)]
        block_spec = array("q", _words((
            slots, block.candidates, rooms.buffer_info()[0], left, right, *((0, 0) if right is None else right.shape), block.ids,
            *(values.buffer_info()[0] for values in arrays), block.words, logits, last, capacity, *results,
        )))  # fmt: skip
        self._threads.run(layout[1], lambda threads: self._call(self._core.guess, threads, spec, block_spec))
        if min(counts) < 0:
            return BlockGuesses([], logits)
        kept = [slice(s * capacity, s * capacity + count) for s, count in enumerate(counts)]
        return BlockGuesses([(tokens[rows].tolist(), parents[rows].tolist(), survival[rows].tolist()) for rows in kept], logits)

    def _call(self, call: Callable[..., int], threads: int, spec: array[int], *more: array[int]) -> int:
        """Call the core with a ForwardSpec of core.cpp and further specs, whose fields all have 64 bits. It is one step."""
        spec[-1] = threads
        status = call(self._place, spec.buffer_info()[0], *(values.buffer_info()[0] for values in more))
        if status == 3:
            raise RankDied("a rank of the model is gone; load the model again")
        if status == 1:
            raise IndexError("a row's token, position, page, parent or layer is out of range")
        if status:
            raise MemoryError("the native core has too little memory for the paths of a draft tree")
        return 1

    @property
    def layers(self) -> Sequence[LayerWeights]:
        return self._weights.layer

    @property
    def core(self) -> Core:
        return self._core

    @property
    def embedding(self) -> PackedLinear | None:
        return self._weights.embedding

    def logits(self, x: Tensor) -> Tensor:
        """The logits (rows, V) of rows after the last norm."""
        assert self._weights.output is not None
        return self._weights.output(x)

    @property
    def bytes(self) -> int:
        """Bytes of all weights, with the output matrix where the stack has one. A forward reads them but for experts."""
        output = self._weights.output
        layers = self._weights.layer
        parts = (part for w in layers for part in (w.qkv, w.out, w.gate_up, w.down, w.experts) if part is not None)
        return sum(part.bytes for part in parts) + (0 if output is None else output.bytes)


def _check_stack(w: StackWeights, keys: Tensor, page_size: int) -> None:
    """Refuse weights and memory that do not fit each other: the core takes every size from `w` and checks rows alone."""
    if min(w.hidden, w.heads, w.kv_heads, w.head_dim, w.ffn) < 1 or w.heads % w.kv_heads or w.head_dim % 2:
        raise ValueError(f"{w.heads} heads of {w.head_dim} values cannot share {w.kv_heads} heads of keys")
    q, kv = w.heads * w.head_dim, w.kv_heads * w.head_dim
    inner = 2 * w.hidden if w.form == BESIDE else w.hidden
    norms = dict.fromkeys(("norm_in", "norm_mlp", "norm_attn_out", "norm_mlp_out"), w.hidden) | {"q_norm": q, "k_norm": kv}
    for layer in w.layer:
        products = {"qkv": (q + 2 * kv, inner), "out": (w.hidden, q)}
        if layer.experts is not None:
            layer.experts.check(w.hidden, w.ffn)
        elif layer.down is None or layer.down.inner > w.ffn:
            raise ValueError(f"the stack has room for {w.ffn} values between gate_up and down, and more are needed")
        else:
            products |= {"gate_up": (layer.down.inner, w.hidden), "down": (w.hidden, layer.down.inner)}
        _check_rows("the sinks", (layer.sinks,), (w.heads,))
        for name, shape in products.items():
            part: PackedLinear = getattr(layer, name)
            if (part.columns, part.inner) != shape:
                raise ValueError(f"{name} is {(part.columns, part.inner)} where the stack needs {shape}")
        for name, width in norms.items():
            _check_rows(name, getattr(layer, name)[:2], (width,))
        _check_rows("a rotary table", layer.rotary[:2], (w.rotary_rows, w.head_dim // 2))
        _check_rows("a rotary table", layer.rotary[2:], (w.rotary_rows,))
    if w.output is not None and w.output.inner != w.hidden:
        raise ValueError(f"the output matrix does not have rows of {w.hidden} values")
    if w.embedding is not None and (w.embedding.columns, w.embedding.inner) != (w.vocab, w.hidden):
        raise ValueError(
            f"the embedding is {(w.embedding.columns, w.embedding.inner)} where the stack needs {(w.vocab, w.hidden)}"
        )
    if w.ranks > 1 and not w.gather:
        raise ValueError(f"{w.ranks} ranks need a function that gathers their parts")
    _check_rows("the table of positions", (w.learned,), (w.learned_rows, w.hidden))
    _check_rows("a norm", (*w.norm[:2], *w.norm_hidden[:2], *w.norm_embedding[:2]), (w.hidden,))
    width = -(-w.head_dim // 16) * 16
    scales = 4 if keys.dtype == torch.int8 else 0  # bytes of a slot's
    if keys.shape[0] < w.layers or keys.shape[2] != w.kv_heads or keys[0, 0, 0].numel() != page_size * (width + scales):
        raise ValueError(f"KV memory of {tuple(keys.shape)} does not hold {w.layers} layers of {w.kv_heads} heads")


def _check_rows(name: str, tensors: Sequence[Tensor | None], shape: tuple[int, ...]) -> None:
    for x in tensors:
        if x is not None and (x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous()):
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype} where the stack needs {shape} float32, contiguous")


def _words(record: tuple[Any, ...]) -> list[int]:
    """A record as 64-bit words: its fields in order, records inside it in place, tensors and matrices by address."""
    words: list[int] = []
    for value in record:
        if isinstance(value, tuple):
            words += _words(value)
        elif isinstance(value, Addressed):
            words.append(value.handle)
        elif isinstance(value, float):
            words += array("q", struct.pack("d", value))
        else:
            words.append(_address(value) if value is None or isinstance(value, Tensor) else value)
    return words


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()
