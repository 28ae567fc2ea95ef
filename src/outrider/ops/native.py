"""The native CPU core: ctypes over the shared library that was built at install.

`find_core` picks the library this processor can run, and says why where there is none. `PackedLinear`
and `Stack` hold weights in the core's layout; ops/cpu has the layouts and why rows keep their bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.ops.packing import KINDS, pack
from outrider.platform import cpu_flags

__all__ = [
    "BESIDE",
    "JOINED",
    "TOKENS",
    "Chains",
    "Core",
    "LayerWeights",
    "PackedLinear",
    "Span",
    "Stack",
    "StackRows",
    "StackWeights",
    "find_core",
    "load_build",
    "usable_builds",
]

# Builds, best first, and the processor flags each needs; setup.py has the compiler's side of it.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_BUILDS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma"}),
}
_REFUSALS = {1: "the kernel does not grant AMX", 2: "a trial of AMX faulted", 3: "a trial of AMX gave wrong results"}
TOKENS, JOINED, BESIDE = 0, 1, 2  # how rows enter a stack; see Form in core.cpp

_WORTH_THREADS = 1 << 18  # logits to choose among

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Tokens = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]
Shape = tuple[float, float, float, float]  # temperature (0 is greedy), top_k, top_p, min_p
_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _LayerSpec(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm")),
        ("window", _int),
    )


_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "layers", "vocab", "positions", "form", "residual_normed")


class _StackSpec(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in _SIZES),
        ("eps", _float),
        *((name, _pointer) for name in ("layer", "joined", "output", "norm", "norm_hidden", "embedding", "cos", "sin")),
    )


class Core:
    """A loaded library. Unless it is `steady`, calls take as many threads as were quickest lately."""

    def __init__(self, path: Path, steady: bool = False) -> None:
        self.steady = steady
        self.name = path.name.removeprefix("_core_").split(".")[0]
        library = ctypes.CDLL(str(path))
        library.outrider_sources.restype = ctypes.c_char_p
        if library.outrider_sources().decode() != _digest():
            raise OSError(f"{path.name} was built from other sources; install outrider again")
        refused = library.outrider_try()
        if refused:
            raise OSError(_REFUSALS[refused])
        self.threads = torch.get_num_threads()
        self.thin = not library.outrider_tiles()  # tiles are loaded as they lie
        self.apart = self.name == "sanitized"  # matrices lie each by itself, so that overruns are noticed
        self.linear = library.outrider_linear
        self.linear.argtypes = [_pointer, _pointer, _int, _pointer, _float, _pointer, _int]
        self.read = library.outrider_read
        self.read.argtypes = [_pointer, _int, _int]
        self._multiply_add = library.outrider_multiply_add
        self._multiply_add.restype, self._multiply_add.argtypes = _float, [_int, _int, _int]
        self.forward = library.outrider_forward
        self.forward.argtypes = [_pointer, _pointer]
        self.draft = library.outrider_draft
        self.draft.argtypes = [_pointer, _pointer, _pointer]
        self._choose = library.outrider_choose
        self._choose.argtypes = [_pointer, _int]

    def take_threads(self) -> None:
        """Use as many threads as torch was given, and leave torch one.

        Torch's threads spin after every operation, on the processors the core's threads need: a round with a
        few small torch operations in it took seven times as long.
        """
        if (given := torch.get_num_threads()) > 1:
            self.threads = given
            torch.set_num_threads(1)

    def draw(self, logits: Tensor, shapes: Sequence[Shape], keys: Sequence[int], words: int) -> list[int]:
        """The choice in each row of logits (N, V), -1 where there is none.

        `shapes` are temperature (0 is greedy), top_k, top_p and min_p of each row, `keys` two words for each, side by side,
        and `words` is where those of the tokens lie.
        """
        chosen = array("q", bytes(8 * logits.shape[0]))
        given = array("d", chain.from_iterable(shapes)), array("f"), array("I", keys)
        self._pick(logits, given, words, 0, chosen.buffer_info()[0], 0)
        return chosen.tolist()

    def rank(
        self, logits: Tensor, shapes: Sequence[Shape], sharpness: Sequence[float], keys: Sequence[int], words: int, best: int
    ) -> tuple[Tokens, Chances]:
        """The likeliest choices in each row (N, best) and their chances, to a few digits; `sharpness` divides the law of each."""
        tokens, chances = np.empty((len(logits), best), np.int64), np.empty((len(logits), best))
        given = array("d", chain.from_iterable(shapes)), array("f", sharpness), array("I", keys)
        self._pick(logits, given, words, best, tokens.ctypes.data, chances.ctypes.data)
        return tokens, chances

    def _pick(self, logits: Tensor, given: Sequence[array[Any]], words: int, best: int, tokens: int, chances: int) -> None:
        """A call with a ChoiceSpec of core.cpp."""
        logits, (rows, vocab) = logits.contiguous(), logits.shape
        places = [own.buffer_info()[0] for own in given]
        spec = array("q", (logits.data_ptr(), rows, vocab, *places, words, best, tokens, chances))
        threads = min(self.threads, rows) if rows * vocab > _WORTH_THREADS else 1
        self._choose(spec.buffer_info()[0], threads)

    def multiply_add(self, kind: str, steps: int) -> float:
        """Do nothing but multiply and add, from registers; how often. 0 where the core uses tiles."""
        return float(self._multiply_add(KINDS[kind], steps, self.threads))


@lru_cache(maxsize=2)
def find_core(steady: bool = False) -> tuple[Core | None, str]:
    """The best library built for this processor, and what was found.

    OUTRIDER_CORE names a library to load instead: one built with sanitizers, or for fewer instructions.
    """
    chosen = os.environ.get("OUTRIDER_CORE")
    if chosen:
        if not Path(chosen).exists():
            raise InvalidParameter("OUTRIDER_CORE", f"{chosen} does not exist")
        return Core(Path(chosen), steady), f"{chosen}, from OUTRIDER_CORE"
    if not _built():
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
    """Of the C++ sources installed beside the libraries; setup.py computes the same."""
    folder = Path(__file__).parent / "cpu"
    sources = sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def usable_builds() -> list[str]:
    """Libraries for instructions this processor has, best first."""
    return [name for name in _built() if _BUILDS[name] <= cpu_flags()]


def load_build(name: str, steady: bool = False) -> Core:
    """One of the usable builds; OSError says why it cannot run here after all."""
    return Core(_built()[name], steady)


def _built() -> dict[str, Path]:
    folder = Path(__file__).parent / "cpu"
    return {name: path for name in _BUILDS for path in sorted(folder.glob(f"_core_{name}.*so"))}


class Threads:
    """One thread or all of the core's, whichever was quicker lately for that many rows.

    A tiny model gains less from a second thread than meeting it costs, and beside a busy process every
    meeting waits for a turn. The bits do not depend on the choice. The quickest of a few calls counts: noise only
    adds. Where all threads clearly win at some rows, they are not doubted at more.
    """

    _TRIES = 4  # of each that are remembered
    _AGAIN = 256  # calls after which the slower one is tried again, once
    _CLEARLY = 1.05

    def __init__(self, core: Core) -> None:
        self._core = core
        self._took: dict[tuple[int, int], list[float]] = {}  # (rows, threads) -> latest seconds
        self._calls: dict[int, int] = {}
        self._clear: int | None = None  # the fewest rows at which all threads clearly win

    def run(self, rows: int, call: Callable[[int], int | None]) -> None:
        """Make the call, which may say how many equal steps it made, with a number of threads; remember what a step took."""
        most = self._core.threads
        if most == 1 or self._core.steady:
            call(most)
            return
        threads = self._pick(rows, most)
        start = time.perf_counter()
        steps = call(threads) or 1
        took = self._took.setdefault((rows, threads), [])
        took.append((time.perf_counter() - start) / steps)
        del took[: -self._TRIES]

    def _pick(self, rows: int, most: int) -> int:
        many, one = self._took.get((rows, most), ()), self._took.get((rows, 1), ())
        if len(many) < self._TRIES:
            return most
        undoubted = self._clear is not None and rows > self._clear
        if len(one) < self._TRIES and not undoubted:
            return 1
        quicker, other = (1, most) if one and min(one) < min(many) else (most, 1)
        if len(one) == self._TRIES:
            self._note(rows, min(one) > self._CLEARLY * min(many))
        calls = self._calls[rows] = self._calls.get(rows, 0) + 1
        return other if calls % self._AGAIN == 0 else quicker

    def _note(self, rows: int, clear: bool) -> None:
        if clear and (self._clear is None or rows < self._clear):
            self._clear = rows
        elif not clear and rows == self._clear:
            self._clear = None


class PackedLinear:
    """A weight matrix (columns, inner) in the core's layout, with its bias. Of a paired one the first half of the columns is
    a gate: a product is silu(gate) * the other half.

    bf16 weights are stored in 12 bits each where nearly all fit, unless `thin` is False. The bits of a product are the same.
    """

    def __init__(
        self, core: Core, kind: str, weight: Tensor, bias: Tensor | None = None, paired: bool = False, thin: bool = True
    ) -> None:
        columns, self.inner = weight.shape
        self.columns = columns // 2 if paired else columns  # of a product
        self._core = core
        self._threads = Threads(core)
        self._packed = pack(kind, weight.detach(), bias, paired, thin and core.thin, core.apart)
        panels, steps, *parts = self._packed
        self._spec = array("q", (KINDS[kind], self.columns, self.inner, panels, steps, paired, *map(_address, parts)))
        self.handle = self._spec.buffer_info()[0]

    @property
    def bytes(self) -> int:
        """What a product reads of it."""
        return self._packed.weights.nbytes + self._packed.whole.nbytes

    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """(rows, columns) float32 of rows (rows, inner) float32, normed first where weights for it are given."""
        x = x.contiguous()
        rows, out = x.shape[0], torch.empty(x.shape[0], self.columns)
        if rows:
            source, weights, target = x.data_ptr(), _address(norm), out.data_ptr()
            self._threads.run(rows, lambda n: self._core.linear(self.handle, source, rows, weights, eps, target, n))
        return out


class Chains(NamedTuple):
    """What a model is to draft, sequence by sequence, the longest chain first."""

    wanted: array[int]  # (sequences,) tokens, int32
    shapes: array[float]  # (sequences, 4); see Core.draw
    sharpness: array[float]  # (sequences,) float32
    keys: array[int]  # (steps, sequences, 2) of the noise, unsigned
    words: int  # where those of the tokens lie
    floor: float = 0.0  # where no chain is as likely to have come this far, drafting ends


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in); norms that are None are left out."""

    qkv: PackedLinear  # of each head of keys its queries, key and value
    out: PackedLinear
    gate_up: PackedLinear  # paired
    down: PackedLinear
    norm_in: Tensor | None
    norm_mlp: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StackWeights:
    """A stack of layers and what surrounds it."""

    layers: Sequence[LayerWeights]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    embedding: Tensor  # (V, hidden) float32
    cos: Tensor  # (positions, head_dim / 2)
    sin: Tensor
    norm: Tensor | None  # the last one
    form: int = TOKENS
    joined: PackedLinear | None = None  # of JOINED
    output: PackedLinear | None = None  # to logits
    norm_hidden: Tensor | None = None  # of BESIDE: the feature's
    residual_normed: bool = False


class Span(NamedTuple):
    """Which part of a stack runs, and how its rows are placed."""

    first_layer: int = 0
    last_layer: int | None = None
    rotary_lag: int = 0  # rotary position = position - lag


_WHOLE = Span()


class StackRows(NamedTuple):
    """What a forward gives for every row, float32."""

    stream: Tensor | None  # (N, hidden) leaving the last layer of the span
    last: Tensor | None  # after the last norm
    taps: Tensor | None  # (N, taps, hidden)
    logits: Tensor | None = None  # (wanted rows, V)


class Stack:
    """Layers over paged KV, run in one call."""

    def __init__(self, core: Core, weights: StackWeights, keys: Tensor, values: Tensor, page_size: int) -> None:
        """Keys and values are (layers, pages, KV heads, ...) in the layout of ops/cpu/attention.h, float32 or bf16."""
        self._core = core
        self._weights = weights
        self._pool = (keys, values)
        self._threads = Threads(core)
        self._chain_threads = Threads(core)
        self._kept: list[Tensor] = []  # what the specifications point to
        specs = [self._layer(layer) for layer in weights.layers]
        self._layers = (_LayerSpec * len(specs))(*specs)
        self._spec = self._stack(weights)
        self._place = ctypes.addressof(self._spec)
        self._memory = (keys.data_ptr(), values.data_ptr(), keys.shape[1], page_size, 4 // keys.element_size())

    def forward(
        self,
        layout: array[int],
        taps: Tensor | None = None,
        span: Span = _WHOLE,
        features: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> StackRows:
        """Run rows through a span of layers; their KV is written. `layout` is that of `lay_out_rows`.

        `features` (N, hidden) replace the embedding: the stream entering the span, or what a head joins with it.
        `taps` are layer numbers, int32. Of the `wanted` rows the logits are given, and then the stream is not.
        """
        rows, w = layout[1], self._weights
        stream = torch.empty(rows, w.hidden) if wanted is None else None
        last = None if w.norm is None else torch.empty(rows, w.hidden)
        tapped = None if taps is None else torch.empty(rows, len(taps), w.hidden)
        features = None if features is None else features.contiguous()
        logits, chosen = None, array("i", wanted or ())
        if wanted is not None:
            assert w.output is not None
            logits = torch.empty(len(wanted), w.output.columns)
        first, end, lag = span
        spec = array("q", (layout.buffer_info()[0], *self._memory, first, len(self._layers) if end is None else end, lag,
            _address(features), _address(taps), 0 if taps is None else len(taps), _address(tapped),
            _address(stream), _address(last), chosen.buffer_info()[0], len(chosen), _address(logits), 0))  # fmt: skip
        self._threads.run(rows, lambda threads: self._call(self._core.forward, threads, spec))
        return StackRows(stream, last, tapped, logits)

    def draft(self, layout: array[int], chains: Chains) -> tuple[list[list[int]], list[list[float]], Tensor]:
        """Guesses that follow the layout's feeds, of each sequence at most as many as it wants, their chances, and the logits
        (steps, sequences, V) behind them. The feeds' pages have room for all but the last guess.
        """
        assert self._weights.output is not None
        wanted = chains.wanted
        sequences, steps = len(wanted), wanted[0]
        tokens, chances = array("q", bytes(8 * sequences * steps)), array("d", bytes(8 * sequences * steps))
        logits = torch.empty(steps, sequences, self._weights.output.columns)
        spec = array("q", (layout.buffer_info()[0], *self._memory, 0, len(self._layers), *[0] * 11))
        given = [own.buffer_info()[0] for own in (chains.shapes, chains.sharpness, chains.keys)]
        found = [own.buffer_info()[0] for own in (tokens, chances)]
        floor, drawn = array("d", (chains.floor,)), array("q", (steps,))
        floor_bits = int.from_bytes(floor.tobytes(), sys.byteorder)
        first = (logits.data_ptr(), sequences, logits.shape[2], *given, chains.words, 1, *found)
        chain_spec = array("q", (steps, wanted.buffer_info()[0], floor_bits, drawn.buffer_info()[0], *first))

        def draft(threads: int) -> int:
            self._call(self._core.draft, threads, spec, chain_spec)
            return drawn[0]

        self._chain_threads.run(sequences, draft)
        own = [slice(s, min(most, drawn[0]) * sequences, sequences) for s, most in enumerate(wanted)]
        return [tokens[part].tolist() for part in own], [chances[part].tolist() for part in own], logits

    def _call(self, call: Callable[..., int], threads: int, spec: array[int], *more: array[int]) -> int:
        """A call with a ForwardSpec of core.cpp and what follows it: all their fields have 64 bits. One step."""
        spec[-1] = threads
        if call(self._place, spec.buffer_info()[0], *(own.buffer_info()[0] for own in more)):
            raise IndexError("a row's token, position, page or parent is out of range")
        return 1

    def logits(self, x: Tensor) -> Tensor:
        """(rows, V) of rows as they are after the last norm."""
        assert self._weights.output is not None
        return self._weights.output(x)

    @property
    def bytes(self) -> int:
        """What one forward reads of the weights, with logits where the stack has an output matrix."""
        output = self._weights.output
        parts = (part.bytes for w in self._weights.layers for part in (w.qkv, w.out, w.gate_up, w.down))
        return sum(parts) + (0 if output is None else output.bytes)

    def _layer(self, layer: LayerWeights) -> _LayerSpec:
        norms = {name: self._keep(getattr(layer, name)) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm")}
        products = {name: getattr(layer, name).handle for name in ("qkv", "out", "gate_up", "down")}
        return _LayerSpec(**products, **norms, window=layer.window or 0)

    def _stack(self, w: StackWeights) -> _StackSpec:
        sizes = {name: getattr(w, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "form", "residual_normed")}
        tables = {name: self._keep(getattr(w, name)) for name in ("norm", "norm_hidden", "embedding", "cos", "sin")}
        joined, output = (None if own is None else own.handle for own in (w.joined, w.output))
        sizes |= {"layers": len(w.layers), "vocab": len(w.embedding), "positions": len(w.cos)}
        return _StackSpec(**sizes, **tables, eps=w.eps, joined=joined, output=output, layer=ctypes.addressof(self._layers))

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()
