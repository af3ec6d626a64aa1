"""The Triton kernel against torch on the CPU, forward and backward, strided inputs among them."""

from __future__ import annotations

import pytest
import torch

from lmms_engine.kernels.rotary import split_and_turn, turn_heads

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# bf16: the sum of two rounded products may round to the other neighbour
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}


def tables(tokens: int, dim: int, device: torch.device) -> list[torch.Tensor]:
    """As a model has them: the first halves of wider tables."""
    angles = torch.linspace(0, 90, tokens * dim // 2).view(tokens, -1).repeat(1, 2)
    return [table.to(device)[:, : dim // 2] for table in (angles.cos(), angles.sin())]


def outcome(function, inputs: list[torch.Tensor], device: torch.device, dim: int) -> list[torch.Tensor]:
    """Outputs and gradients, on the CPU."""
    leaves = [x.detach().to(device).requires_grad_() for x in inputs]
    outs = function(*leaves, *tables(len(inputs[0]), dim, device))
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=rng).to(out) for out in outs]
    torch.autograd.backward(outs, weights)
    return [x.detach().cpu() for x in (*outs, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_equals_torch(dim: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    heads = [torch.randn(333, h, dim, generator=rng).to(dtype) for h in (32, 8)]
    joint = [torch.randn(333, 3, 16, dim, generator=rng).to(dtype)]
    for function, inputs in ((turn_heads, heads), (split_and_turn, joint)):
        expected = outcome(function, inputs, torch.device("cpu"), dim)
        for ours, reference in zip(outcome(function, inputs, GPU, dim), expected, strict=True):
            torch.testing.assert_close(ours, reference, **TOLERANCE[dtype])


def test_strided_heads_and_no_token() -> None:
    x = torch.randn(8, 100, 64, device=GPU).transpose(0, 1)   # [100, 8, 64], as a library hands them over
    cos, sin = tables(100, 64, GPU)
    ours, _ = turn_heads(x, x, cos, sin)
    torch.testing.assert_close(ours, turn_heads(x.contiguous(), x, cos, sin)[0], rtol=0, atol=0)
    assert turn_heads(x[:0], x[:0], cos[:0], sin[:0])[0].shape == (0, 8, 64)
