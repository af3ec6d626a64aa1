"""Which parameters decay, and the AdamW that updates them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from lmms_engine.config import TrainerSection

# Parameters that a module holds itself (no nn.Embedding) and that are positions or learned tokens.
EMBEDDING_LIKE = re.compile(r"(^|_)(pos|position|positional|cls|class|mask|query|register)_?(embed|token)")


@dataclass(frozen=True)
class ParamGroup:
    """A named set of trainable parameters, by their checkpoint names."""

    name: str
    weight_decay: float
    params: dict[str, nn.Parameter]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.params.values())


def build_groups(model: nn.Module, weight_decay: float) -> list[ParamGroup]:
    """Every trainable parameter in exactly one group: `decay` or `no_decay`; empty groups are left out.

    Without decay: norms, biases and other vectors, embeddings of any kind, and with them a head that is tied
    to the input embedding. An untied head decays.
    """
    exempt = _exempt(model)
    decay: dict[str, nn.Parameter] = {}
    no_decay: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (no_decay if id(parameter) in exempt else decay)[name] = parameter
    groups = [ParamGroup("decay", weight_decay, decay), ParamGroup("no_decay", 0.0, no_decay)]
    return [group for group in groups if group.params]


def _exempt(model: nn.Module) -> set[int]:
    """Ids of the parameters that must not decay, under whichever of their names they qualify."""
    exempt: set[int] = set()
    for module in model.modules():
        whole = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
        for leaf, parameter in module.named_parameters(recurse=False):
            if whole or parameter.ndim < 2 or leaf.endswith("bias") or EMBEDDING_LIKE.search(leaf):
                exempt.add(id(parameter))
    return exempt


def format_groups(groups: list[ParamGroup]) -> str:
    """The groups as a small table: name, weight decay, tensors, parameters."""
    rows = [f"  {'group':<10} {'weight decay':>12} {'tensors':>8} {'parameters':>15}"]
    rows += [f"  {g.name:<10} {g.weight_decay:>12g} {len(g.params):>8} {g.numel:>15,}" for g in groups]
    return "\n".join(rows)


def build_adamw(groups: list[ParamGroup], trainer: TrainerSection) -> torch.optim.AdamW:
    """AdamW over named groups.

    The fused kernel serves CPU and GPU alike; it takes a gradient divisor and a skip flag as tensors, so that
    neither clipping nor a non-finite gradient makes the host wait for the device.
    """
    return torch.optim.AdamW(
        [{"name": g.name, "params": list(g.params.values()), "weight_decay": g.weight_decay} for g in groups],
        lr=trainer.learning_rate,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=trainer.adam_epsilon,
        fused=True,
    )
