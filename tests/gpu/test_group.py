"""A group of ranks over NCCL. One GPU has room for one rank: this shows that the calls are right, not what several give."""

from __future__ import annotations

import pytest
import torch

from outrider.ops.group import Group, listen, missing_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_over_nccl_gathers_and_sums_what_it_has(dtype: torch.dtype) -> None:
    if reason := missing_backend("cuda"):
        pytest.skip(reason)
    group = Group(listen(1), 0, 1, "cuda")
    part = torch.randn(3, 5, device="cuda").to(dtype)
    gathered = group.gather(part)
    assert gathered.shape == (1, 3, 5)
    assert torch.equal(gathered[0], part)
    assert torch.equal(group.sum(part), part)
