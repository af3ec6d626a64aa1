"""A tiny model trained by the engine's own way on the GPU, for tests that hold one backend to another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend import build_backend
from lmms_engine.train.backend.base import Backend
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.step import train_step
from lmms_engine.train.verify.run import stir
from tests import tiny
from tests.invariants.test_zero import make_job

FAMILY = "qwen3_vl"


def job_of(*, bf16: bool, offload: bool = False, zero: dict[str, Any] | None = None, **trainer: Any) -> Job:
    """Plain kernels, blocks recomputed, every step clipped. zero: DeepSpeed's settings; None: FSDP2."""
    tree = make_job(FAMILY, zero).to_dict()
    tree["model_config"]["attn_implementation"] = "sdpa"
    tree["trainer_args"] |= {"use_liger_kernel": False, "bf16": bf16, **trainer}
    tree["trainer_args"]["fsdp_config"]["cpu_offload"] = offload
    return Job.from_dict(tree)


def start(mesh: Mesh, job: Job, *, load_weights: bool = True) -> tuple[Objective, Backend]:
    """The weights are random, and the same each time."""
    objective, _, _ = build_model(job, mesh, load_weights=load_weights)
    if load_weights:
        stir(objective.model, seed=7)
    return objective, build_backend(objective, job, mesh)


def micros_for(objective: Objective) -> list[PackedBatch]:
    """Two packs: pictures; a clip and text."""
    _, samples = tiny.build(FAMILY)
    return [tiny.pack(part, config=objective.model.config) for part in (samples[:2], samples[2:])]


def step(objective: Objective, backend: Backend, mesh: Mesh, number: int) -> tuple[float, float]:
    """Loss and gradient norm."""
    backend.set_progress(0.5, number)
    stats = train_step(objective, backend, micros_for(objective), mesh, torch.Generator())
    return float(stats.sums["ce"]) / stats.totals["ce"], float(stats.grad_norm)


def keep_first_gradients(backend: Backend) -> dict[str, Tensor]:
    """Filled just before the first update."""
    gradients: dict[str, Tensor] = {}
    update = backend.step

    def look_and_update() -> Tensor:
        if not gradients:
            found = {name: gradient.float().cpu().clone() for name, gradient in backend.gradients()}
            gradients.update(found)
        return update()

    backend.step = look_and_update
    return gradients


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], each: float) -> None:
    """Per tensor |difference| <= each * |theirs|, in norms; tensors that hardly count, by the norm of all."""
    assert ours.keys() == theirs.keys()
    whole = float(torch.stack([tensor.norm() for tensor in theirs.values()]).norm())
    assert whole > 0
    for name, want in theirs.items():
        error = float((ours[name] - want).norm())
        assert error <= each * float(want.norm()) + 1e-5 * whole, f"{name}: {error:.3g} of {want.norm():.3g}"


def local(tensor: Tensor) -> Tensor:
    """A copy on the host; one rank has the whole."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def everything(backend: Backend) -> dict[str, Tensor]:
    """Weights, buffers, moments and step counts, as a checkpoint names them."""
    return {
        f"{part}.{name}": local(tensor)
        for part, source in backend.state().items()
        for name, tensor in source.state_dict().items()
    }
