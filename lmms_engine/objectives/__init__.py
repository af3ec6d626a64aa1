"""Objectives: a model and its loss as differentiable sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmms_engine.datasets.sources import source_names
from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import PretrainedConfig

    from lmms_engine.config import Job
    from lmms_engine.models.spec import ModelSpec

OBJECTIVES: Registry[Callable[..., Objective]] = Registry(
    "objective", {name: f"lmms_engine.objectives.{name}" for name in ("next_token", "flow_matching")}
)


def build_objective(spec: ModelSpec, model: nn.Module, config: PretrainedConfig, job: Job) -> Objective:
    """The objective that `spec` trains with, around a model whose head, if it has one, is a LossHead."""
    sources = source_names(job.dataset, "train")
    options: dict[str, Any] = {
        "rmpad": job.trainer.use_rmpad,
        "sources": sources if len(sources) > 1 else (),
    }
    if job.trainer.router_z_loss_coef:
        if spec.layout.experts is None:
            raise UserError(
                f"trainer_args.router_z_loss_coef={job.trainer.router_z_loss_coef:g}: {spec.name} has no "
                "routers (legal: 0)"
            )
        options["router_z_loss_coef"] = job.trainer.router_z_loss_coef
    return OBJECTIVES.get(spec.objective)(model, spec, config, **options)


__all__ = ["OBJECTIVES", "Objective", "build_objective"]
