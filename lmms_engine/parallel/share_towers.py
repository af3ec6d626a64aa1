"""Ranks that share a sequence share out its pictures: each runs the tower on some, all get all features.

Without this every rank of a sequence would run the vision tower on every picture. Pictures are dealt out in
order, in runs of nearly equal numbers of patches, so that features only have to be joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The tower's keyword arguments for pictures [start, end) of those it was called with.
Cut = Callable[[dict[str, Any], int, int], dict[str, Any]]


def share_tower(
    tower: nn.Module, cut: Cut, features: Sequence[str], merge: int, group: dist.ProcessGroup
) -> None:
    """Makes `tower` compute a part of its pictures on each rank of `group`.

    features: names of the output's parts to be joined, each a tensor [P / merge^2, dim] or a list of them.
    """
    shares: list[list[int]] = []   # feature rows of each rank, from the call of the tower to its return

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        grids = kwargs["grid_thw"]
        patches = grids.prod(-1).tolist()
        edges = deal(patches, group.size())
        start, end = edges[group.rank()], edges[group.rank() + 1]
        shares.append([sum(patches[a:b]) // merge**2 for a, b in itertools.pairwise(edges)])
        if start == end:   # nothing to do, but the tower's shards are gathered by all ranks together
            start, end = 0, 1
        first = sum(patches[:start])
        pixels = args[0][first : first + sum(patches[start:end])]
        return (pixels, *args[1:]), cut(kwargs, start, end)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        rows = shares.pop()
        for name in features:
            part = getattr(output, name)
            if isinstance(part, Tensor):
                joined = join(part, rows, group)
            else:
                joined = [join(one, rows, group) for one in part]
            setattr(output, name, joined)
        return output

    tower.register_forward_pre_hook(before, with_kwargs=True)
    tower.register_forward_hook(after)


def deal(patches: Sequence[int], ranks: int) -> list[int]:
    """Where each rank's run of pictures begins, [ranks + 1]: a picture goes to the rank its middle is in."""
    total, done = sum(patches), 0
    owners = []
    for count in patches:
        owners.append(int((done + count / 2) * ranks / total))
        done += count
    return [sum(owner < rank for owner in owners) for rank in range(ranks)] + [len(patches)]


def join(part: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The features of all pictures from this rank's. rows: how many each rank has."""
    return _Join.apply(part, tuple(rows), group)


class _Join(torch.autograd.Function):
    """Gathers unequal parts; a gradient goes back to whose part it is of, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group, ctx.own_rows = rows, group, part.shape[0]
        own = part[: rows[group.rank()]]   # none of it where this rank only went along
        padded = part.new_zeros(max(rows), part.shape[1])
        padded[: own.shape[0]] = own
        everything = part.new_empty(group.size() * max(rows), part.shape[1])
        dist.all_gather_into_tensor(everything, padded, group=group)
        blocks = everything.view(group.size(), max(rows), -1)
        return torch.cat([block[:count] for block, count in zip(blocks, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        rank = ctx.group.rank()
        start = sum(ctx.rows[:rank])
        own = grad.new_zeros(ctx.own_rows, grad.shape[1])
        own[: ctx.rows[rank]] = grad[start : start + ctx.rows[rank]]
        return own, None, None
