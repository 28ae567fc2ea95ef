"""What runs a head beside its target: the target's device where it can, else the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from outrider.cache import KVPool
from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.heads.runners import EagleNetwork, EagleRunner, MedusaNetwork, MedusaRunner
from outrider.model import Runner

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["eagle_network", "medusa_network"]


def eagle_network(head: EagleHead, pool: KVPool, target: Runner) -> EagleNetwork:
    if target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaEagleRunner, fits

        if fits(head):
            return CudaEagleRunner(head, cast("CudaRunner", target))
    return EagleRunner(head, pool, target.ops)


def medusa_network(heads: MedusaHeads, target: Runner) -> MedusaNetwork:
    if target.device_name != "cpu":
        from outrider.heads.cuda_runners import CudaMedusaRunner

        return CudaMedusaRunner(heads, cast("CudaRunner", target))
    return MedusaRunner(heads, target.ops)
