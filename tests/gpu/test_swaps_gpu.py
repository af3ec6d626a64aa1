"""Fused modules on == off, kernel by kernel and over whole tiny models; the GPU against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lmms_engine.kernels import attention, liger
from lmms_engine.kernels.widen import GatedMLP, apply_widening, missing_columns
from lmms_engine.models.spec import MODELS
from tests.tiny import FAMILIES, assert_same_gradients, build, loss_and_gradients, pack

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


class Gated(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, inner), nn.Linear(dim, inner)
        self.down_proj = nn.Linear(inner, dim)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def modules(kind: str) -> tuple[nn.Module, nn.Module]:
    """A plain module and its fused equal, with parameters of their own and equal values."""
    torch.manual_seed(0)
    plain = {"rms_norm": LlamaRMSNorm(128), "swiglu": Gated(128, 196)}[kind]
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5) if parameter.dim() == 1 else None
    plain = plain.to(GPU)
    return plain, liger.SWAPS.get(kind)[1](copy.deepcopy(plain))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", ["rms_norm", "swiglu"])
def test_kernel_equals_plain(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, fused = (module.to(dtype) for module in modules(kind))
    rng = torch.Generator(GPU).manual_seed(0)
    x = torch.randn(3, 50, 128, generator=rng, device=GPU, dtype=dtype)
    outs = []
    for module in (plain, fused):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out.float() * torch.linspace(-1, 1, out.numel(), device=GPU).view_as(out)).sum().backward()
        outs.append([out, leaf.grad, *(p.grad for p in module.parameters())])
    for ours, reference in zip(outs[1], outs[0], strict=True):
        assert (ours - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models(family: str) -> None:
    """float32: plain on the CPU, plain on the GPU, fused and widened on the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    spec = MODELS.get(family)
    on_cpu, samples = build(family)
    expected, reference = loss_and_gradients(on_cpu, [pack(samples)])
    for fused in (False, True):
        objective, _ = build(family)
        if fused:
            liger.swap(objective.model, spec)
            objective.model.get_submodule(spec.layout.head).fused = True
        objective.to(GPU)
        loss = objective(pack(samples, config=objective.model.config).to(GPU))["ce"]
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        grads = {name: p.grad.cpu() for name, p in objective.model.named_parameters()}
        assert_same_gradients(grads, reference, tolerance=1e-3)


@pytest.mark.parametrize("backend", ["varlen", "flex", "flash_attn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_in_whole_models(family: str, backend: str) -> None:
    """bf16 on the GPU against float32 sdpa on the CPU; packed rows must stay apart."""
    if reason := attention.unusable(backend, GPU, torch.bfloat16):
        pytest.skip(reason)
    spec = MODELS.get(family)
    on_cpu, samples = build(family)
    expected, _ = loss_and_gradients(on_cpu, [pack(samples)])
    objective, _ = build(family)
    attention.use(objective.model, spec.layout.attention, attention.install(backend))
    tables = {name: buffer.clone() for name, buffer in objective.model.named_buffers()}
    objective.to(GPU, torch.bfloat16)
    for name, buffer in objective.model.named_buffers():
        buffer.data = tables[name].to(GPU)   # rotary tables stay float32
    loss = objective(pack(samples, config=objective.model.config).to(GPU))["ce"]
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert all(p.grad.isfinite().all() for p in objective.model.parameters())


def test_widening_is_faster() -> None:
    """The tower's MLP of Qwen2.5-VL at real size: 3420 columns against 3456."""
    torch.manual_seed(0)
    plain = Gated(1280, 3420).to(GPU, torch.bfloat16)
    wide = GatedMLP(plain, extra=missing_columns(plain))
    x = torch.randn(16384, 1280, device=GPU, dtype=torch.bfloat16, requires_grad=True)

    def milliseconds(module: nn.Module) -> float:
        for _ in range(3):
            module(x).sum().backward()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            module(x).sum().backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 10

    before, after = milliseconds(plain), milliseconds(wide)
    print(f"3420 columns {before:.2f} ms, 3456 columns {after:.2f} ms")
    torch.testing.assert_close(wide(x), plain(x), atol=0.02, rtol=0.02)
    assert after < before


def test_widening_counts_on_meta() -> None:
    with torch.device("meta"):
        tower = nn.ModuleList([Gated(1280, 3420) for _ in range(2)])
    assert apply_widening(tower) == 2
