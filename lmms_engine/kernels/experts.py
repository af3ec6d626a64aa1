"""Experts of a mixture: one function behind transformers' experts registry, and what it computes with.

The library's block routes and hands over (hidden states, expert of every copy, weight of every copy); what
comes back is each token's weighted sum. Copies are sorted by expert, every expert's run of rows goes through
its two products, and the sums are put together in the tokens' order.

    grouped     one grouped matrix product for all experts: GPU, bfloat16
    loop        one product after another: everywhere, the reference

Where experts are spread over ranks, an `Exchange` carries the sorted rows to the ranks that hold their
experts and the results back; nothing else changes.

Legend: T tokens, K experts a token visits, S = T * K copies, E experts (of this rank, where they are spread),
D hidden size, I inner size, O and N outputs and inputs of a product.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lmms_engine.errors import UserError
from lmms_engine.registry import Registry

log = logging.getLogger(__name__)

LIBRARY = "eager"   # transformers' own loop: what the padded reference path uses


class Linear(Protocol):
    """Rows sorted by expert, [S, N], times each expert's weight [E, O, N]: [S, O]. counts_E sums to S."""

    def __call__(self, x_SN: Tensor, counts_E: Tensor, weight_EON: Tensor) -> Tensor: ...


class Exchange(Protocol):
    """Runs `compute(rows, counts)` on the ranks that hold the experts.

    In: rows [S, D] sorted by expert and how many each of all experts gets. Out: their results, same order.
    """

    @property
    def name(self) -> str:
        """Different for every group of ranks."""
        ...

    def __call__(
        self, x_SD: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor: ...


LINEARS: Registry[Linear] = Registry("experts product")


@LINEARS.register("loop")
def loop_linear(x_SN: Tensor, counts_E: Tensor, weight_EON: Tensor) -> Tensor:
    """Expert by expert. An expert without rows takes part with none: its gradient is zero, not missing."""
    parts = x_SN.split(counts_E.tolist())
    return torch.cat([F.linear(x, weight) for x, weight in zip(parts, weight_EON.unbind(), strict=True)])


@LINEARS.register("grouped")
def grouped_linear(x_SN: Tensor, counts_E: Tensor, weight_EON: Tensor) -> Tensor:
    """All experts in one kernel, which reads the group sizes on the device."""
    if not len(x_SN):   # the kernel takes no empty operand
        return loop_linear(x_SN, counts_E, weight_EON)
    offsets = counts_E.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x_SN, weight_EON.transpose(1, 2), offs=offsets)


def resolve(experts: list[nn.Module], device: torch.device, dtype: torch.dtype) -> str:
    """The product for these experts on this device, computing in `dtype`; logged with the reason."""
    name, reason = "grouped", "one kernel for all experts"
    sizes = {size for module in experts for p in module.parameters() for size in p.shape[1:]}
    if device.type != "cuda":
        name, reason = "loop", f"no grouped kernel on {device.type}"
    elif dtype != torch.bfloat16:
        name, reason = "loop", f"the grouped kernel takes no {dtype}"
    elif odd := sorted(size for size in sizes if size % 8):
        name, reason = "loop", f"the grouped kernel wants sizes that are multiples of 8, not {odd[0]}"
    log.info("experts: %s on %s (%s)", name, device.type, reason)
    return name


def install(product: str, exchange: Exchange | None = None) -> str:
    """Registers our experts with transformers and returns their name there; safe to repeat."""
    name = f"engine_{product}" + (f"_{exchange.name}" if exchange is not None else "_local")
    forward = functools.partial(experts_forward, linear=LINEARS.get(product), exchange=exchange)
    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def use(model: nn.Module, experts: dict[str, nn.Module], name: str) -> None:
    """Points the model's experts at registered ones. Experts of another build raise UserError."""
    for path, module in experts.items():
        plain = not getattr(module, "has_bias", True) and not getattr(module, "is_transposed", True)
        if name != LIBRARY and not (plain and getattr(module, "has_gate", False)):
            raise UserError(
                f"{path}: {type(module).__name__} has a bias, transposed weights or no gate; experts must be "
                "down(act(gate(x)) * up(x)) with weights [experts, outputs, inputs]"
            )
    model.set_experts_implementation(name)
    for path, module in experts.items():
        assert module.config._experts_implementation == name, f"{path} kept its experts implementation"


def experts_forward(
    module: nn.Module,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    linear: Linear,
    exchange: Exchange | None,
) -> Tensor:
    """What the registry calls: each token's weighted sum over its experts, [T, D]."""
    top_k = index_TK.shape[1]
    experts_S = index_TK.flatten()
    order = experts_S.argsort(stable=True)
    counts = count(experts_S, module.num_experts)
    rows = hidden_TD[order // top_k]

    def compute(x_SD: Tensor, counts_E: Tensor) -> Tensor:
        inner = linear(x_SD, counts_E, _local(module.gate_up_proj))
        return linear(module._apply_gate(inner), counts_E, _local(module.down_proj))

    out_SD = compute(rows, counts) if exchange is None else exchange(rows, counts, compute)
    out_TKD = out_SD[inverse(order)].view(-1, top_k, out_SD.shape[1])
    return torch.bmm(weights_TK[:, None].to(out_TKD.dtype), out_TKD)[:, 0].to(hidden_TD.dtype)


def count(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs, int64 [num_experts]; unlike `bincount` it never waits for the device."""
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return zeros.scatter_add_(0, experts, torch.ones_like(experts))


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def _local(weight: Any) -> Tensor:
    """This rank's experts, where the weight is spread over ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
