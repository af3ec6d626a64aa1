"""Expert parallelism: every rank of a group holds some of the experts, and tokens travel to them.

dispatch -> the experts of this rank -> combine, by two all-to-alls of unequal sizes. Ranks hold different
data; each sends its own tokens and gets its own results back, so nothing is replicated inside the group and a
token's loss counts once. Gradients of the experts therefore need no scaling: the tokens of all ranks of the
group arrive here, and the sum over the groups is the sum over all data. Routers and everything dense are
ordinary parameters, summed over all ranks.

Weights become Shard(0) over the group first; FSDP then cuts each expert (Shard(1)) over the ranks that hold
the same experts. Checkpoints see the library's whole tensor whatever the degree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lmms_engine.errors import UserError

FSDP_DIM = 1   # the dimension of an expert weight [experts, outputs, inputs] that FSDP cuts


def check_experts(ep_degree: int, num_experts: int | None, name: str) -> None:
    """Raises UserError where a model called `name` cannot spread its experts over `ep_degree` ranks.

    num_experts: None for a model without any.
    """
    if ep_degree == 1:
        return
    if num_experts is None:
        raise UserError(f"trainer_args.ep_degree={ep_degree}: {name} has no experts (legal: 1)")
    if num_experts % ep_degree:
        raise UserError(
            f"trainer_args.ep_degree={ep_degree}: does not divide the {num_experts} experts of this model "
            f"(legal: {_divisors(num_experts)})"
        )


def check_shards(experts: dict[str, nn.Module], efsdp: DeviceMesh) -> None:
    """Raises UserError where the ranks that share an expert cannot cut its weights into equal parts."""
    ranks = efsdp.size(efsdp.ndim - 1)
    for path, module in experts.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape[FSDP_DIM] % ranks:
                raise UserError(
                    f"trainer_args.ep_degree: it leaves {ranks} ranks to share each expert, which does not "
                    f"divide the {parameter.shape[FSDP_DIM]} rows of {path}.{name}; use a larger degree"
                )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def shard_experts(experts: dict[str, nn.Module], ep: DeviceMesh) -> None:
    """Leaves every rank of the group its experts: the parameters become DTensors, Shard(0) over `ep`."""
    for module in experts.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            sharded = DTensor.from_local(local, ep, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


class TokenExchange:
    """Carries rows to the ranks of `group` that hold their experts, and the results back.

    Expert e lives on rank e // (experts / ranks). Sizes are settled by one small all-to-all, which the host
    waits for: uneven routing moves no more rows than there are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()

    @property
    def name(self) -> str:
        return f"ep{self.size}_{self.group.group_name}"

    def __call__(
        self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Results of `compute(rows of my experts sorted by expert, how many each got)`, in order of `rows`.

        rows: [S, D] sorted by expert; counts: int64, how many of them each of all experts gets.
        """
        to_send = counts.view(self.size, -1)               # [rank, its experts]
        to_get = torch.empty_like(to_send)                 # [rank, my experts]
        dist.all_to_all_single(to_get, to_send, group=self.group)
        sent, got = torch.stack([to_send.sum(1), to_get.sum(1)]).tolist()
        arrived = exchange_rows(rows, sent, got, self.group)   # by rank, and for each rank by expert
        mine = torch.arange(to_get.shape[1], device=rows.device).repeat(self.size)
        order = mine.repeat_interleave(to_get.flatten(), output_size=sum(got)).argsort(stable=True)
        out = compute(arrived[order], to_get.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange_rows(out[back], got, sent, self.group)


def exchange_rows(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends `sent[r]` rows to rank r and returns the `got[r]` rows from each, by rank; differentiable.

    Every rank of the group must call it, also with nothing to send.
    """
    return _ExchangeRows.apply(rows, sent, got, group)


class _ExchangeRows(torch.autograd.Function):
    """The gradient travels the same way back."""

    @staticmethod
    def forward(ctx, rows, sent, got, group):
        ctx.sizes, ctx.group = (sent, got), group
        return _all_to_all(rows, sent, got, group)

    @staticmethod
    def backward(ctx, grad):
        sent, got = ctx.sizes
        return _all_to_all(grad, got, sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), got, sent, group=group)
    return out
