"""Blocks are known by what they compute: look-alikes are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lmms_engine.kernels.structure import is_gated_silu_mlp, is_rms_norm
from lmms_engine.models.spec import MODELS


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OnePlus(Renamed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.weight) / self.weight


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (LlamaRMSNorm(4), True),
        (Renamed(), True),
        (OnePlus(), False),
        (Gemma3RMSNorm(4), False),
        (nn.LayerNorm(4), False),
        (nn.RMSNorm(4), False),
        (nn.Linear(4, 4), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_norms(module: nn.Module, known: bool) -> None:
    assert is_rms_norm(module) == known


class Gated(nn.Module):
    def __init__(self, act: str, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6, bias=bias), nn.Linear(4, 6, bias=bias)
        self.down_proj = nn.Linear(6, 4, bias=bias)
        self.act_fn = ACT2FN[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class WithNorm(Gated):
    def __init__(self, act: str) -> None:
        super().__init__(act)
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (Gated("silu"), True),
        (Gated("silu", bias=True), True),
        (Gated("gelu"), False),
        (Swapped("silu"), False),
        (WithNorm("silu"), False),
    ],
)
def test_mlps(module: nn.Module, known: bool) -> None:
    assert is_gated_silu_mlp(module) == known


@pytest.mark.parametrize(("family", "norms", "mlps"), [("qwen3_vl", 13, 3), ("qwen2_5_vl", 14, 6)])
def test_families(family: str, norms: int, mlps: int) -> None:
    """Every RMSNorm and gated MLP of the models that we ship, also without storage."""
    spec = MODELS.get(family)
    config = spec.tiny()[0].config
    with torch.device("meta"):
        model = spec.model_class(config)
    assert sum(map(is_rms_norm, model.modules())) == norms
    assert sum(map(is_gated_silu_mlp, model.modules())) == mlps
