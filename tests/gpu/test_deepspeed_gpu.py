"""DeepSpeed ZeRO in bf16 on a GPU against FSDP2 in bf16, from one configuration."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.train import checkpoint
from lmms_engine.train.backend.base import Backend
from tests.gpu.training import (
    assert_close,
    everything,
    job_of,
    keep_first_gradients,
    micros_for,
    start,
    step,
)
from tests.invariants.test_zero import CLIP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]
STEPS = 3
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ZERO: dict[str, dict[str, Any]] = {
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-2, optimiser on the host": {"stage": 2, **OFFLOAD},
    "ZeRO-3, all on the host": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
}
# Relative. Both compute with the same kernels on weights rounded from equal float32 masters; only the order
# of sums differs: first loss, its gradients' norm, each gradient, losses after updates, how far all moved.
FIRST, NORM, EACH, LATER, MOVED = 1e-3, 1e-2, 2e-2, 1e-2, 5e-2


class Run(NamedTuple):
    """begun, ended: weights, buffers and moments on the host. steps: (loss, gradient norm)."""

    objective: Objective
    backend: Backend
    begun: dict[str, Tensor]
    steps: list[tuple[float, float]]
    gradients: dict[str, Tensor]
    ended: dict[str, Tensor]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """One process group for all, in which DeepSpeed keeps groups of its own; what it exports goes again."""
    before = dict(os.environ)
    yield build_mesh()
    leave_mesh()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def plain(mesh: Mesh) -> Run:
    """The same with FSDP2."""
    return train(mesh, None)


def train(mesh: Mesh, zero: dict[str, Any] | None) -> Run:
    """A few steps in bf16."""
    objective, backend = start(mesh, job_of(bf16=True, zero=zero))
    begun = everything(backend)
    gradients = keep_first_gradients(backend)
    steps = [step(objective, backend, mesh, number) for number in range(1, STEPS + 1)]
    return Run(objective, backend, begun, steps, gradients, everything(backend))


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


@pytest.mark.parametrize("name", ZERO)
def test_zero_in_bf16_is_fsdp2_in_bf16(mesh: Mesh, plain: Run, name: str) -> None:
    run = train(mesh, ZERO[name])
    print(f"FSDP2 {plain.steps}\n{name} {run.steps}")
    assert min(norm for _, norm in plain.steps) > CLIP   # every step is clipped
    assert plain.steps[-1][0] < plain.steps[0][0]
    assert {p.dtype for p in run.objective.model.parameters()} == {torch.bfloat16}   # what computes
    assert {b.dtype for b in run.objective.model.buffers()} == {torch.float32}   # rotary tables keep theirs
    assert run.begun.keys() == plain.begun.keys()
    for key, tensor in weights(plain.begun).items():
        assert torch.equal(run.begun[key], tensor), key   # masters were not rounded on the way
    assert run.steps[0][0] == pytest.approx(plain.steps[0][0], rel=FIRST)
    assert run.steps[0][1] == pytest.approx(plain.steps[0][1], rel=NORM)
    assert_close(run.gradients, plain.gradients, EACH)
    losses, wanted = ([loss for loss, _ in each.steps] for each in (run, plain))
    assert losses == pytest.approx(wanted, rel=LATER)
    assert run.ended.keys() == plain.ended.keys()
    moved, error = [], []
    for key, tensor in weights(plain.ended).items():
        moved.append((tensor - plain.begun[key]).norm())
        error.append((run.ended[key] - tensor).norm())
    assert float(torch.stack(error).norm()) <= MOVED * float(torch.stack(moved).norm())
    rounded = [(tensor.bfloat16().float() == tensor).float().mean() for tensor in weights(run.ended).values()]
    assert float(torch.stack(rounded).mean()) < 0.5   # masters are finer than what computes


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3"])
def test_a_checkpoint_goes_from_one_backend_to_the_other(
    mesh: Mesh, plain: Run, tmp_path: Path, name: str
) -> None:
    """FSDP2 to ZeRO and back, moments included, nothing rounded."""
    saved = checkpoint.save(tmp_path / "fsdp2", STEPS, plain.backend.state(), mesh, {})
    held = everything(plain.backend)
    objective, backend = start(mesh, job_of(bf16=True, zero=ZERO[name]), load_weights=False)
    checkpoint.load(saved, backend.state(), mesh)
    loaded = everything(backend)
    assert loaded.keys() == held.keys()
    for key, tensor in held.items():
        assert torch.equal(loaded[key], tensor), key
    again = checkpoint.save(tmp_path / "zero", STEPS, backend.state(), mesh, {})
    third, other = start(mesh, job_of(bf16=True), load_weights=False)
    checkpoint.load(again, other.state(), mesh)
    for key, tensor in everything(other).items():
        assert torch.equal(tensor, held[key]), key
    found, want = step(objective, backend, mesh, STEPS + 1), step(third, other, mesh, STEPS + 1)
    assert found[0] == pytest.approx(want[0], rel=FIRST)
    assert found[1] == pytest.approx(want[1], rel=NORM)


def test_a_norm_that_is_not_finite_moves_nothing(mesh: Mesh) -> None:
    run = train(mesh, ZERO["ZeRO-2"])
    run.backend.set_progress(0.5, STEPS + 1)
    micro = micros_for(run.objective)[0].to(mesh.device)
    with run.backend.micro(last=True):
        run.backend.backward(run.objective(micro)["ce"] * float("nan"))

    def update() -> None:
        run.backend.step()
        run.backend.check_finite()   # a GPU is not asked before

    with pytest.raises(UserError, match=f"gradient norm of step {STEPS + 1} is (nan|inf)"):
        update()
    after = everything(run.backend)
    assert all(torch.equal(after[key], tensor) for key, tensor in weights(run.ended).items())
