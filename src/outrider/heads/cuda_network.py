"""Networks beside a target on a GPU: captured for each number of rows, with the target's kernels and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outrider.heads.exit import ExitAdapter
from outrider.model import Feed
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_readback import Readback
from outrider.model.cuda_runner import CudaRunner
from outrider.ops import Plain
from outrider.ops.cuda.launch import AttentionMetadata, Kernels, RowNorm
from outrider.ops.cuda.matrix import Matrix, matrix_of
from outrider.sampling import Row

__all__ = ["DeviceNetwork", "KernelOps", "adapter_on_device", "move_to_target"]

Run = Callable[[Sequence[Feed], Sequence[Row], Sequence[int]], None]
_FEW_COLUMNS = 8192  # of a product whose programs would be too few: its parts are summed by programs of their own


class KernelOps(Plain):
    """Products and norms by the target's kernels; products are float32."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, x: Tensor, weight: Tensor | Matrix, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] <= _FEW_COLUMNS and matrix_of(weight).splits(len(x)):
            out = self._kernels.parts(x.to(self._kernels.dtype).contiguous(), weight).sum(0)
            return out if bias is None else out + bias
        out = torch.empty(len(x), weight.shape[0], device=x.device)
        self._kernels.linear(x.to(self._kernels.dtype).contiguous(), weight, bias, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.norm(x.float().contiguous(), RowNorm("rms", eps, weight))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._kernels.norm(x.float().contiguous(), RowNorm("layer", eps, weight, bias))


class DeviceNetwork:
    """A function of rows on the device, captured for each number of rows."""

    def __init__(self, name: str, target: CudaRunner, work: Callable[[Tensor, AttentionMetadata], Tensor]) -> None:
        self._name, self._target, self._work = name, target, work
        self._graphs: dict[int, tuple[Run, Tensor, list[Tensor]]] = {}
        self._hosts: dict[int, Readback] = {}

    def __call__(
        self, rows_in: Tensor, feeds: Sequence[Feed] = (), rows: Sequence[Row] = (), size: int = 0, numbers: Sequence[int] = ()
    ) -> Tensor:  # fmt: skip
        """The outputs of the rows, padded to a graph of `size` rows or the next size. The next call overwrites them.

        `numbers` are the first parameters of rows.
        """
        size = size or bucket(len(rows_in), GRAPH_ROWS)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, rows_in.shape[1])
        run, buffer, outputs = self._graphs[size]
        buffer[: len(rows_in)].copy_(rows_in)
        run(feeds, rows, numbers)
        return outputs[0]

    def launch(
        self, rows_in: Tensor, feeds: Sequence[Feed], rows: Sequence[Row], size: int, numbers: Sequence[int] = ()
    ) -> Callable[[], Tensor]:
        """The same without waiting. What is returned waits for the outputs on the host; the next launch overwrites them."""
        out = self(rows_in, feeds, rows, size, numbers)
        if size not in self._hosts:
            self._hosts[size] = Readback(out)
        return self._hosts[size].start(out)

    def _capture(self, size: int, width: int) -> tuple[Run, Tensor, list[Tensor]]:
        buffer = torch.zeros(size, width, device=self._target.device)
        outputs: list[Tensor] = []

        def work(meta: AttentionMetadata) -> None:
            outputs[:] = [self._work(buffer, meta)]

        return self._target.capture_rows(f"{self._name}, {size} rows", size, work), buffer, outputs


def adapter_on_device(adapter: ExitAdapter, target: CudaRunner) -> Callable[[Tensor], Tensor]:
    """What an exit adapter makes of rows on its target's device."""
    move_to_target(adapter, target, {"output": target.cuda.output})
    ops = KernelOps(target.cuda.kernels)
    return lambda x: adapter(x, ops)


def move_to_target(network: nn.Module, target: CudaRunner, borrowed: dict[str, Tensor | Matrix]) -> None:
    """Move a head to its target's device, with the target's tensors where it borrows and matrices in the target's dtype."""
    parameters = dict(network.named_parameters())
    for name, tensor in borrowed.items():
        if name not in parameters:
            delattr(network, name)  # a buffer, which takes tensors alone
            setattr(network, name, tensor)
    for parameter in parameters.values():
        dtype = target.cuda.dtype if parameter.dim() > 1 else parameter.dtype
        parameter.data = parameter.data.to(target.device, dtype)
    network.to(target.device)
