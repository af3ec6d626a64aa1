"""Ulysses: ranks share a sequence; each holds a part of the tokens, and inside attention a part of the heads.

Two exchanges a layer, one before attention and one after it, each one collective. Everything else of a layer
works on single tokens and needs no neighbour. The decoder's inputs are cut by a hook; what comes before it
(embedding, towers) runs whole on every rank of the group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmms_engine.errors import UserError

_NUMBERS = itertools.count()


class Ulysses:
    """The exchanges over `group`; see `Exchange` in kernels/attention.py.

    Query heads must be a multiple of the ranks. Where key/value heads are not, each is repeated, in blocks,
    just as often as it takes; query head j still meets its own key/value head.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.name = f"sp{self.size}_{next(_NUMBERS)}"

    def to_heads(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T / ranks, all heads, D] to [T, heads / ranks, D]; queries, keys and values in one collective."""
        check_heads(q_THD.shape[1], k_THD.shape[1], self.size)
        repeats = self.size // math.gcd(k_THD.shape[1], self.size)
        if repeats > 1:
            k_THD, v_THD = (x.repeat_interleave(repeats, dim=1) for x in (k_THD, v_THD))
        by_rank = [x.unflatten(1, (self.size, -1)) for x in (q_THD, k_THD, v_THD)]
        widths = [x.shape[2] for x in by_rank]
        mixed = torch.cat(by_rank, dim=2).transpose(0, 1)   # [ranks, T / ranks, heads, D]
        return _AllToAll.apply(mixed, self.group).flatten(0, 1).split(widths, dim=1)

    def to_tokens(self, out_THD: Tensor) -> Tensor:
        """[T, heads / ranks, D] to [T / ranks, all heads, D]."""
        by_rank = out_THD.unflatten(0, (self.size, -1))
        return _AllToAll.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Block i of dimension 0 goes to rank i; what comes from rank i becomes block i. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)   # gloo has no exchange of lists
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, grad, ctx.group), None


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raises UserError if `heads` query heads cannot be shared by `size` ranks."""
    if heads % size:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(
            f"trainer_args.sp_ulysses_degree={size}: does not divide the {heads} attention heads of this "
            f"model, which has {kv_heads} for keys and values (legal: {legal})"
        )


def split_sequence(
    decoder: nn.Module, shard_inputs: Callable[[dict[str, Any], slice], dict[str, Any]], rank: int, size: int
) -> None:
    """Makes `decoder` work on this rank's part of every sequence it is called with.

    shard_inputs: (keyword arguments, slice of the tokens) -> the arguments for these tokens.
    """

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            raise RuntimeError(f"{type(module).__name__}: sequence parallelism needs keyword arguments")
        tokens = kwargs["position_ids"].shape[-1]
        if tokens % size:
            raise RuntimeError(f"{tokens} tokens cannot be shared by {size} ranks; see PackedBatch.shard")
        each = tokens // size
        return args, shard_inputs(kwargs, slice(rank * each, (rank + 1) * each))

    decoder.register_forward_pre_hook(cut, with_kwargs=True)
