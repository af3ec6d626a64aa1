"""The global gradient norm over sharded gradients, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def global_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """2-norm of all gradients over all ranks: a float32 scalar on `device`, equal on every rank.

    Gradients on different meshes are summed mesh by mesh before the root is taken, so that one norm (and one
    clip factor) holds for all of them.
    """
    local: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            axes = tuple(axis for axis, place in enumerate(grad.placements) if isinstance(place, Shard))
            local[grad.device_mesh, axes].append(grad.to_local())
        else:
            local[None, ()].append(grad)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for (mesh, axes), grads in local.items():
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        square = norms.square().sum().to(device)   # of gradients that rest in the host's memory too
        for axis in axes:
            if mesh is not None and mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    return total.sqrt()


def clip_divisor(norm: Tensor, max_norm: float | None) -> Tensor:
    """What gradients are divided by so that their norm is at most `max_norm` (None or 0: no clipping)."""
    return (norm / max_norm).clamp(min=1.0) if max_norm else torch.ones_like(norm)
