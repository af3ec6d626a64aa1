"""The training step. There is no other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend.base import Backend


@dataclass(frozen=True)
class StepStats:
    """What one step did. `sums` and `grad_norm` stay on the device until somebody logs them."""

    sums: dict[str, Tensor]      # this rank's loss sums over its micro-batches, float64
    totals: dict[str, float]     # denominators over all data ranks
    grad_norm: Tensor


def train_step(
    objective: Objective,
    backend: Backend,
    micros: list[PackedBatch],
    mesh: Mesh,
    rng: torch.Generator,
) -> StepStats:
    """One optimiser step over this rank's micro-batches (all ranks hold the same number of them).

    loss = sum_k coefficient_k * sum(term_k) / total_k, with totals over every token of the global batch:
    the same number in every layout. A term nobody has (total 0) adds nothing; if no term has anything, the
    parameters and the optimiser stay as they are.
    """
    micros = [objective.draw(micro, rng) for micro in micros]
    totals = mesh.sum_over_data(total_weights(objective, micros))
    sums = {term: torch.zeros((), dtype=torch.float64, device=mesh.device) for term in objective.coefficients}
    if not any(totals[term] for term, factor in objective.coefficients.items() if factor):
        # Nobody has a target, and every rank knows: weight decay and old moments must not move anything.
        return StepStats(sums=sums, totals=totals, grad_norm=torch.zeros((), device=mesh.device))
    for i, micro in enumerate(micros):
        with backend.micro(last=i == len(micros) - 1):
            micro = micro.shard(mesh.sp_rank, mesh.sp_size)
            micro = objective.prepare(micro.to(mesh.device), rng)
            parts = objective(micro)
            backend.backward(combine(parts, totals, objective.coefficients))
        for term, part in parts.items():
            sums[term] += part.detach()
    return StepStats(sums=sums, totals=totals, grad_norm=backend.step())


def total_weights(objective: Objective, micros: list[PackedBatch]) -> dict[str, float]:
    """This rank's denominators, summed over its micro-batches."""
    weights = [objective.weights(micro) for micro in micros]
    return {term: sum(w[term] for w in weights) for term in objective.coefficients}


def combine(
    parts: dict[str, Tensor], totals: dict[str, float], coefficients: dict[str, float]
) -> Tensor:
    """This rank's share of the global loss, metrics left out. A total of 0 divides by 1: the sum is 0 too."""
    used = {term: factor for term, factor in coefficients.items() if factor}
    return sum(factor * parts[term] / (totals[term] or 1.0) for term, factor in used.items())
