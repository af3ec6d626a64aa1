"""Gated MLPs whose width the GPU likes, with the checkpoint's width unchanged.

A width that is no multiple of 8 (3420 in Qwen2.5-VL's tower) sends its matrix products to kernels of an older
generation. Zero columns up to a multiple of 64 change no number: silu(0) * 0 is 0, and zero rows of the last
weight take nothing from it. The weights are padded at each forward, which costs one copy of them, so that
parameters, gradients, optimiser and checkpoint all keep the true width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lmms_engine.kernels.structure import is_gated_silu_mlp

MULTIPLE = 64


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """The plain gate: silu(gate) * up."""
    return F.silu(gate) * up


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) on the linears of the module it replaces: equal names, the same parameters.

    extra: zero columns computed beside the true ones. product: how gate and up are joined.
    """

    def __init__(
        self, mlp: nn.Module, *, extra: int, product: Callable[[Tensor, Tensor], Tensor] = silu_times
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.extra = extra
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        if not self.extra:
            return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))
        inner = self.product(self._wide(self.gate_proj, x), self._wide(self.up_proj, x))
        return F.linear(inner, F.pad(self.down_proj.weight, (0, self.extra)), self.down_proj.bias)

    def _wide(self, linear: nn.Linear, x: Tensor) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias, (0, self.extra))
        return F.linear(x, F.pad(linear.weight, (0, 0, 0, self.extra)), bias)

    def extra_repr(self) -> str:
        return f"extra={self.extra}, product={self.product.__name__}"


def missing_columns(mlp: nn.Module) -> int:
    """Zero columns that an MLP needs: up to a multiple of 64 if its width is no multiple of 8, else none."""
    width = mlp.gate_proj.out_features
    return -width % MULTIPLE if width % 8 else 0


def apply_widening(model: nn.Module) -> int:
    """Replaces every gated MLP of an awkward width by its widened equal; returns how many there were."""
    awkward = [
        (path, module)
        for path, module in model.named_modules()
        if is_gated_silu_mlp(module) and missing_columns(module)
    ]
    for path, module in awkward:
        model.set_submodule(path, GatedMLP(module, extra=missing_columns(module)))
    return len(awkward)
