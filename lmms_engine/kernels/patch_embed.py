"""Patch embeddings as the matrix products they are.

A convolution whose kernel covers its whole input is one product of flattened patches with a flattened kernel.
Convolution libraries have no fast path for it, matrix products have. The swap shares weight and bias, so that
names and checkpoints do not change.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class PatchProjection(nn.Module):
    """A convolution over inputs of exactly its kernel's size: [N, C, *kernel] to [N, out, 1, …]."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel_size = conv.kernel_size

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size:
            raise ValueError(f"patches of {tuple(patches.shape[2:])}, the kernel is {self.kernel_size}")
        out = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return out.view(*out.shape, *(1 for _ in self.kernel_size))


def is_patch_convolution(module: nn.Module) -> bool:
    """Whether a convolution cuts its input in pieces of its kernel's size; here each piece comes alone."""
    return (
        isinstance(module, nn.Conv3d)
        and module.stride == module.kernel_size
        and module.groups == 1
        and module.padding in (0, (0, 0, 0))
        and math.prod(module.dilation) == 1
    )


def apply_patch_projection(model: nn.Module) -> int:
    """Replaces every patch convolution of a tower that is fed single patches; returns how many there were."""
    found = [(path, module) for path, module in model.named_modules() if is_patch_convolution(module)]
    for path, module in found:
        model.set_submodule(path, PatchProjection(module))
    return len(found)
