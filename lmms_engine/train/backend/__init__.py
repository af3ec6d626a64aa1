"""Backends: who holds parameters, gradients and optimiser state. Chosen by `trainer_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmms_engine.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmms_engine.config import Job
    from lmms_engine.objectives.base import Objective
    from lmms_engine.parallel.mesh import Mesh
    from lmms_engine.train.backend.base import Backend

BACKENDS: Registry[Callable[..., Backend]] = Registry(
    "trainer_type",
    {
        "fsdp2_trainer": "lmms_engine.train.backend.fsdp2",
        "deepspeed_trainer": "lmms_engine.train.backend.deepspeed",
    },
)


def build_backend(objective: Objective, job: Job, mesh: Mesh) -> Backend:
    """The backend that the job asks for, around an objective from `build_model`."""
    return BACKENDS.get(job.trainer_type)(objective, job, mesh)


__all__ = ["BACKENDS", "build_backend"]
