"""Every backend that this machine has against float32 sdpa on the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmms_engine.kernels.attention import ATTENTION, attend, resolve, unusable
from lmms_engine.segments import Segments

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LENGTHS = [37, 300, 1, 128, 37, 512]
SHAPES = [(16, 2, 128), (32, 8, 128), (16, 16, 80), (16, 16, 72), (16, 16, 64)]


def tensors(heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(sum(LENGTHS), h, dim, generator=rng) for h in (heads, kv_heads, kv_heads)]
    return [x.bfloat16().to(GPU) for x in made]


def run(backend: str, qkv: list[Tensor], segments: Segments, window: int | None) -> list[Tensor]:
    """Output and the three gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = attend(*leaves, segments, scale=leaves[0].shape[-1] ** -0.5, backend=backend, window=window)
    weight = torch.linspace(-1, 1, out.numel(), device=GPU).view_as(out)
    (out.float() * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("case", ["causal", "full", "window", "spans"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", list(ATTENTION))
def test_backend_equals_float32(backend: str, shape: tuple[int, int, int], case: str) -> None:
    if reason := unusable(backend, GPU, torch.bfloat16):
        pytest.skip(reason)
    segments = Segments.from_lengths(LENGTHS, causal=case != "full").to(GPU)
    if case == "spans":
        spans = torch.full((sum(LENGTHS),), -1)
        spans[50:90], spans[510:700] = 0, 1
        segments = replace(segments, spans=spans.to(GPU))
    window = 64 if case == "window" else None
    qkv = tensors(*shape)
    expected = run("sdpa", [x.float() for x in qkv], segments, window)
    ours = run(backend, qkv, segments, window)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True):
        worst = (a.float() - b).abs().max() / b.abs().max()
        assert worst < 0.02, f"{name}: {worst:.3g} of the largest"


def test_auto_is_a_flash_kernel() -> None:
    assert resolve("auto", GPU) in ("flash_attn", "varlen")
    assert resolve("auto", GPU, torch.float32) == "sdpa"
    assert "varlen" in ATTENTION


def test_varlen_compiles_in_one_piece() -> None:
    """No graph break, and no new compilation for another pack."""
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for lengths in ([100, 28], [64, 64, 33], [7, 250]):
        segments = Segments.from_lengths(lengths).to(GPU)
        q, k, v = (torch.randn(sum(lengths), h, 64, device=GPU, dtype=torch.bfloat16) for h in (4, 2, 2))
        ours = compiled(q, k, v, segments, scale=0.125, backend="varlen")
        torch.testing.assert_close(ours, attend(q, k, v, segments, scale=0.125, backend="varlen"))


def test_varlen_does_not_wait_for_the_device() -> None:
    segments = Segments.from_lengths(LENGTHS).to(GPU)
    q, k, v = (x.requires_grad_() for x in tensors(16, 2, 128))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, k, v, segments, scale=0.1, backend="varlen").float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
