"""The grouped product against the loop, on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmms_engine.kernels.experts import LINEARS

pytestmark = pytest.mark.gpu

COUNTS = {
    "even": [64] * 8,
    "uneven": [1, 0, 250, 3, 77, 0, 180, 1],
    "one": [0, 0, 0, 512, 0, 0, 0, 0],
    "none": [0] * 8,
}


def products(name: str, counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Result and both gradients."""
    rng = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(sum(counts), 128, generator=rng, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(8, 96, 128, generator=rng, device="cuda") / 8).to(dtype).requires_grad_()
    out = LINEARS.get(name)(x, torch.tensor(counts, device="cuda"), weight)
    out.backward(torch.randn(out.shape, generator=rng, device="cuda").to(dtype))
    return out.detach().float(), x.grad.float(), weight.grad.float()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_equals_loop(counts: list[int]) -> None:
    exact = products("loop", counts, torch.float32)
    rounded = products("loop", counts, torch.bfloat16)
    for ours, loop, want in zip(products("grouped", counts, torch.bfloat16), rounded, exact, strict=True):
        assert ours.shape == want.shape
        if want.numel():
            rounding = float((loop - want).abs().max())
            assert float((ours - want).abs().max()) <= 2 * rounding + 1e-6
