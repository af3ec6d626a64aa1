"""Liger's fused loss against the chunked version and plain cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmms_engine.kernels.loss_head import LossHead

pytestmark = pytest.mark.gpu
T, DIM, V = 700, 256, 4099


def inputs(*, varied: bool) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    weights = (torch.rand(T, generator=rng) > 0.4).float()
    if varied:
        weights = weights * (torch.rand(T, generator=rng) * 3)
    labels = torch.where(weights > 0, torch.randint(V, (T,), generator=rng), -100)
    return torch.randn(T, DIM, generator=rng).cuda(), labels.cuda(), weights.cuda()


def linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(DIM, V, bias=False).to("cuda", dtype)


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    (loss / 321).backward()   # as the step does: a gradient that is not 1 goes in
    return [hidden.grad.float(), head.weight.grad.float()]


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_fused_equals_chunked_equals_plain(dtype: torch.dtype, tolerance: float, varied: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, labels, weights = inputs(varied=varied)
    results = []
    for kind in ("plain", "chunked", "fused"):
        head = linear(dtype)
        h = hidden.to(dtype).requires_grad_()
        if kind == "plain":
            rows = F.cross_entropy(head(h).float(), labels, reduction="none", ignore_index=-100)
            loss = (rows * weights).sum()
        else:
            loss = LossHead(head, fused=kind == "fused")(h, labels, weights)
        assert loss.dtype == torch.float32
        results.append((loss.item(), gradients(loss, h, head)))
    (expected, reference), *others = results
    for value, grads in others:
        assert value == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-3)
        for ours, plain in zip(grads, reference, strict=True):
            assert (ours - plain).abs().max() <= tolerance * plain.abs().max()


@pytest.mark.parametrize("varied", [False, True])
def test_groups_of_fused_equal_chunked(varied: bool) -> None:
    hidden, labels, weights = inputs(varied=varied)
    groups = torch.arange(T, device="cuda") % 3
    results = []
    for fused in (False, True):
        head, h = linear(torch.float32), hidden.clone().requires_grad_()
        loss, sums = LossHead(head, fused=fused)(h, labels, weights, groups=groups, num_groups=3)
        results.append((loss.item(), sums.tolist(), gradients(loss, h, head)))
    (expected, by_group, reference), (value, sums, grads) = results
    assert value == pytest.approx(expected, rel=1e-5)
    assert sums == pytest.approx(by_group, rel=1e-5)
    for ours, other in zip(grads, reference, strict=True):
        assert (ours - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_supervised(fused: bool) -> None:
    hidden, labels, weights = inputs(varied=False)
    head = LossHead(linear(torch.bfloat16), fused=fused)
    h = hidden.bfloat16().requires_grad_()
    loss = head(h, labels * 0 - 100, weights * 0)
    loss.backward()
    assert loss.item() == 0
    assert h.grad.abs().max() == 0
    assert head.weight.grad.abs().max() == 0


def test_fused_needs_less_memory() -> None:
    def peak(fused: bool | None) -> int:
        torch.manual_seed(0)
        head = nn.Linear(512, 65536, bias=False, device="cuda", dtype=torch.bfloat16)
        hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(65536, (8192,), device="cuda")
        weights = torch.ones(8192, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if fused is None:
            F.cross_entropy(head(hidden).float(), labels, reduction="sum").backward()
        else:
            LossHead(head, fused=fused)(hidden, labels, weights).backward()
        return torch.cuda.max_memory_allocated()

    assert peak(fused=True) < peak(fused=None) / 3
    assert peak(fused=False) < peak(fused=None) / 3
