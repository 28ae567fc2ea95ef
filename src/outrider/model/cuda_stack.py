"""A decoder as the GPU runs it: layers between embedding and output matrix, and the pool of their KV."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model.backends import CUDA
from outrider.model.cuda_layer import CudaLayer, CudaRows, norm_on, turns_of
from outrider.model.cuda_streaming import WeightStream
from outrider.model.cuda_weights import Upload
from outrider.model.decoder import Decoder, RopeTable, finished_logits
from outrider.model.placement import Placement
from outrider.model.spec import ModelSpec
from outrider.ops.cuda.experts_launch import ExpertKernels
from outrider.ops.cuda.launch import Kernels, Shape
from outrider.ops.cuda.matrix import Matrix, Rows, matrix_of

__all__ = ["EXTRA_POSITIONS", "CudaPool", "CudaStack", "Forward", "kernel_shape"]

EXTRA_POSITIONS = 320  # positions past the context that padding and the longest draft may use
ROUNDED = ("int8", "int4", "fp8")  # what weights may be rounded to at load
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ROUNDED_OUTPUT = {"int4": "int8"}
_FP8_ROWS = ("fp8", "fp8_blocks")
_log = logging.getLogger("outrider")
_MAX_HEAD = 256


class CudaPool(KVPool):
    """Keys and values of every layer on the device, (layers, pages, KV heads, page_size, head_dim).

    Keys keep each pair of rotated dimensions side by side.
    """

    def __init__(self, kernels: Kernels, layers: int, pages: int, device: torch.device) -> None:
        s = kernels.shape
        self.page_size = s.page
        self.pages = pages
        self.head_dim = s.head
        self._kernels = kernels
        shape = (layers, pages, s.kv_heads, s.page, s.head)
        self.keys, self.values = (torch.zeros(shape, dtype=kernels.dtype, device=device) for _ in range(2))

    def move(self, source, target) -> None:  # type: ignore[no-untyped-def]
        """Copy slots to slots in every layer; sources are read before any target is written."""
        if source:
            moves = torch.tensor([list(source), list(target)], dtype=torch.int32).to(self.keys.device)
            for pool in (self.keys, self.values):
                self._kernels.move(pool, moves)


@dataclass(slots=True)
class Forward:
    """The outputs of a forward for every row."""

    last: Tensor  # (N, hidden) after the last norm, in the weights' dtype
    taps: Tensor | None  # (N, taps, hidden) float32


class CudaStack:
    """Layers over paged KV. With `exact` all products use the row-invariant kernels, otherwise cuBLAS."""

    def __init__(
        self,
        decoder: Decoder,
        page_size: int,
        device: torch.device,
        exact: bool = True,
        future_tokens: Tensor | None = None,
        placement: Placement | None = None,  # of weights that are streamed; None: all lie on the device
        fp8_rows: bool = True,
    ) -> None:
        s = self.spec = decoder.spec
        rounds = s.dtype if s.dtype in ROUNDED else ""
        self.kernels = Kernels(kernel_shape(s, page_size), _DTYPES.get(s.dtype, torch.bfloat16), future_tokens, exact)
        self.device, self.dtype = device, self.kernels.dtype
        self.experts = ExpertKernels(self.dtype, device, s.expert_layers) if s.expert_layers else None
        self._no_experts = torch.empty(0, dtype=torch.int32, device=device)
        self._upload = Upload(device, self.dtype, rounds, fp8_rows)
        self.streaming = None if placement is None else WeightStream(placement, device)
        try:
            self._load(decoder)
        except BaseException:  # Ctrl-C too leaves no pinned memory behind
            self.close()
            raise

    def _load(self, decoder: Decoder) -> None:
        s, device = self.spec, self.device
        tables = {rope: turns_of(RopeTable(rope, s.head_dim, s.context + EXTRA_POSITIONS), device) for rope in s.ropes}
        ropes = [layer.attention.rope for layer in s.layers]
        self.layers: list[CudaLayer] = []
        for i, (layer, rope) in enumerate(zip(decoder.read_layers(packed=True), ropes, strict=True)):
            turns = None if rope is None else tables[rope]
            self.layers.append(CudaLayer(layer, self.kernels, device, turns, self._upload, self.experts))
            if self.streaming is not None:
                self.streaming.take(i, self.layers[i])
        self.embedding = self._embedding(decoder.weight("embedding"))
        self.output = self._output_matrix(decoder)
        _say_how_served(self)
        self._output_bias = None if decoder.output_bias is None else self._take(decoder.output_bias)
        norm = norm_on(device, s.norm, decoder.norm, decoder.norm_bias)
        self._kv_place = {layer: place for place, layer in enumerate(s.kv_layers)}  # of each layer with attention
        self._afters = [*(layer.norm_in for layer in self.layers[1:]), norm]  # what follows each layer
        table = decoder.positions
        self._learned = None if s.positions is None or table is None else (self._take(table), s.positions.offset)
        if self.streaming is not None:
            self.streaming.open()

    def close(self) -> None:
        """Give pinned host memory back."""
        if self.streaming is not None:
            self.streaming.close()

    @property
    def streams(self) -> bool:
        """Whether layers wait for weights: then a forward costs much more than its rows."""
        return self.pass_bytes > 0

    @property
    def pass_bytes(self) -> int:
        """Bytes that cross the bus in a forward."""
        return 0 if self.streaming is None else self.streaming.placement.pass_bytes

    @property
    def passes(self) -> int:
        """Forwards over streamed weights so far, launched or captured."""
        return 0 if self.streaming is None else self.streaming.passes

    def around(self, replay: Callable[[], None], passes: int) -> Callable[[], None]:
        """A replay of a graph in which so many forwards were captured."""
        return replay if self.streaming is None else self.streaming.around(replay, passes)

    def _embedding(self, weight: Tensor) -> Tensor:
        if self.streaming is None or not self.streaming.placement.embedding_on_host:
            return self._take(weight)
        return self.streaming.take_embedding(weight.detach().to(self.dtype))

    def _take(self, weight: Tensor) -> Tensor:
        return self._upload.tensor(weight)

    def _output_matrix(self, decoder: Decoder) -> Tensor | Matrix:
        """The output matrix as it is stored; that of a model in int4 is rounded to int8."""
        name, rounds = "embedding" if decoder.output is None else "output", self._upload.rounds
        stored = decoder.packed(name)
        if stored is None and not rounds:
            return self.embedding if decoder.output is None else self._take(decoder.weight(name))
        upload = Upload(self.device, self.dtype, _ROUNDED_OUTPUT.get(rounds, rounds))
        return upload.matrix(decoder.weight(name) if stored is None else stored)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those that a forward with logits reads."""
        return (*(matrix for layer in self.layers for matrix in layer.matrices), matrix_of(self.output))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a forward with logits reads."""
        return sum(tensor.nbytes for matrix in self.matrices for tensor in matrix.tensors)

    @property
    def touched(self) -> Tensor:
        """Distinct experts that the last forward read in each layer that has some, on the device."""
        return self._no_experts if self.experts is None else self.experts.touched

    @property
    def experts_read(self) -> float:
        """The mean of `touched` on the host, for which it waits; 0 where no layer has experts."""
        return 0.0 if self.experts is None else float(self.touched.float().mean())

    def forward(self, rows: CudaRows, pool: KVPool, taps: tuple[int, ...] = ()) -> Forward:
        """Run rows through all layers and write their KV."""
        rows = rows.for_forward(pool)
        scale, norm = self.spec.embedding_scale, self.layers[0].norm_in
        read: Rows
        stream, read = self.kernels.embed(rows.meta, self.embedding, norm, scale, self._learned)
        kept: dict[int, Tensor] = {}
        layers = self.layers if self.streaming is None else self.streaming.run(self.layers)
        for i, (layer, after) in enumerate(zip(layers, self._afters, strict=True)):
            if i in taps:
                kept[i] = stream.clone()
            place = self._kv_place.get(i)
            kv = None if place is None else (pool.keys[place], pool.values[place])
            form = self.layers[i + 1].reads if i + 1 < len(self.layers) else None
            read = layer.forward_to(form, read, stream, after, rows, kv)
        kept[len(self.layers)] = stream
        assert isinstance(read, Tensor)
        return Forward(read, torch.stack([kept[i] for i in taps], 1) if taps else None)

    def logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """Float32 logits (N, V) of rows after the last norm."""
        s = self.spec
        out = torch.empty(len(last), s.vocab, device=self.device) if out is None else out
        fast = None if self.kernels.exact else matrix_of(self.output).by_library(last, self._output_bias)
        if fast is None:
            self.kernels.linear(last, self.output, self._output_bias, out, scale=s.logit_scale, cap=s.logit_cap)
        else:
            out.copy_(finished_logits(fast.float(), s))
        return out


def _say_how_served(stack: CudaStack) -> None:
    """One line about quantised matrices: which there are, and what is multiplied with FP8."""
    kinds = sorted({matrix.kind for matrix in stack.matrices if matrix.kind})
    if any(kind in _FP8_ROWS for kind in kinds):
        _log.info("products of FP8 round activations to FP8 too, by row; fp8_activations=off decodes the weights instead")
    elif any(kind.startswith("fp8") for kind in kinds):
        _log.info("FP8 weights are decoded in products; activations stay in bfloat16")


def kernel_shape(spec: ModelSpec, page_size: int) -> Shape:
    """The sizes that kernels share. What the GPU cannot run is refused here."""
    if missing := CUDA.missing(spec):
        raise InvalidParameter("device", f"{CUDA.runs_on} has no {', no '.join(missing)} yet; pass device=cpu")
    if spec.head_dim % 2 or spec.head_dim > _MAX_HEAD:
        raise InvalidParameter(
            "device", f"{CUDA.runs_on} takes even head widths up to {_MAX_HEAD}, not {spec.head_dim}; pass device=cpu"
        )
    return Shape(spec.heads, spec.kv_heads, spec.head_dim, page_size)
