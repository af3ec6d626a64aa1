"""`fsdp_config.cpu_offload` on a GPU: what rests where, and that no number or checkpoint changes by it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmms_engine.errors import UserError
from lmms_engine.parallel.fsdp import Unit, apply_fsdp, materialise, tied_names
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.train import checkpoint
from tests.gpu.training import (
    assert_close,
    everything,
    job_of,
    keep_first_gradients,
    local,
    micros_for,
    start,
    step,
)
from tests.invariants.test_zero import CLIP

pytestmark = pytest.mark.gpu
STEPS = 3
# Relative: of the first loss; of the losses after updates; of a gradient (its norm); of the gradients' norm.
# The kernels are the same ones; only AdamW and the norm are computed elsewhere, and so round otherwise.
TOLERANCES = {False: (1e-5, 1e-3, 1e-3, 1e-4), True: (1e-4, 1e-2, 2e-2, 1e-3)}
BOTH = pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    torch.backends.cudnn.allow_tf32 = False
    yield build_mesh()
    leave_mesh()


def train(mesh: Mesh, *, offload: bool, bf16: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm) of each step, and the gradients of the first."""
    objective, backend = start(mesh, job_of(offload=offload, bf16=bf16))
    gradients = keep_first_gradients(backend)
    return [step(objective, backend, mesh, number) for number in range(1, STEPS + 1)], gradients


@BOTH
def test_the_numbers_are_those_without(mesh: Mesh, bf16: bool) -> None:
    first, later, each, of_norm = TOLERANCES[bf16]
    want, reference = train(mesh, offload=False, bf16=bf16)
    found, gradients = train(mesh, offload=True, bf16=bf16)
    print(f"without {want}\nwith    {found}")
    assert min(norm for _, norm in want) > CLIP   # every step is clipped
    assert want[-1][0] < want[0][0]
    assert found[0][0] == pytest.approx(want[0][0], rel=first)
    assert found[0][1] == pytest.approx(want[0][1], rel=of_norm)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in want], rel=later)
    assert_close(gradients, reference, each)


@BOTH
def test_all_rests_on_the_host_between_steps(mesh: Mesh, bf16: bool) -> None:
    objective, backend = start(mesh, job_of(offload=True, bf16=bf16))
    ties = tied_names(objective.model)
    assert ties   # this model's head is its embedding
    micros = micros_for(objective)
    for last, micro in zip((False, True), micros, strict=True):
        with backend.micro(last=last):
            backend.backward(objective(micro.to(mesh.device))["ce"])
        held = {name: p.grad for name, p in objective.model.named_parameters()}
        assert all(grad is not None and grad.to_local().device.type == "cpu" for grad in held.values())
    backend.set_progress(0.5, 1)
    backend.step()
    step(objective, backend, mesh, 2)
    for name, parameter in objective.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().is_pinned(), name
        assert parameter.to_local().device.type == "cpu", name
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is None, name
        for key, moment in backend.optimizer.state[parameter].items():
            assert moment.device.type == "cpu", f"{name}.{key}"
            assert moment.dtype == torch.float32, f"{name}.{key}"
    assert {buffer.device.type for buffer in objective.model.buffers()} == {"cuda"}
    assert tied_names(objective.model) == ties


def test_frozen_parts_rest_there_too_and_stay(mesh: Mesh) -> None:
    objective, backend = start(mesh, job_of(offload=True, bf16=True, freeze_modules=["visual"]))
    before = {name: local(p) for name, p in objective.model.named_parameters()}
    assert step(objective, backend, mesh, 1)[0] > step(objective, backend, mesh, 2)[0]
    for name, parameter in objective.model.named_parameters():
        assert parameter.to_local().device.type == "cpu", name
        moved = not torch.equal(local(parameter), before[name])
        assert moved is (".visual." not in name), name


def test_a_forward_without_gradients_between_steps(mesh: Mesh) -> None:
    """As a validation runs it: it sees the weights of the last step, and leaves them."""
    losses = []
    for offload in (False, True):
        objective, backend = start(mesh, job_of(offload=offload, bf16=False))
        step(objective, backend, mesh, 1)
        before = everything(backend)
        with torch.no_grad():
            parts = [objective(micro.to(mesh.device))["ce"] for micro in micros_for(objective)]
        losses.append(float(sum(parts)))
        after = everything(backend)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_comes_back_into_either_memory(
    mesh: Mesh, tmp_path: Path, before: bool, after: bool
) -> None:
    objective, backend = start(mesh, job_of(offload=before, bf16=False))
    for number in (1, 2):
        step(objective, backend, mesh, number)
    saved = everything(backend)
    folder = checkpoint.save(tmp_path, 2, backend.state(), mesh, {})
    again, other = start(mesh, job_of(offload=after, bf16=False), load_weights=False)
    checkpoint.load(folder, other.state(), mesh)
    loaded = everything(other)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    want, found = step(objective, backend, mesh, 3), step(again, other, mesh, 3)
    assert found[0] == pytest.approx(want[0], rel=1e-5)
    assert found[1] == pytest.approx(want[1], rel=1e-3)
    exported = dict(checkpoint.model_only_state(folder))
    assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in exported.items())


def test_a_norm_that_is_not_finite_stops_the_step_itself(mesh: Mesh) -> None:
    objective, backend = start(mesh, job_of(offload=True, bf16=True))
    step(objective, backend, mesh, 1)
    before = everything(backend)
    backend.set_progress(0.5, 2)
    with backend.micro(last=True):
        backend.backward(objective(micros_for(objective)[0].to(mesh.device))["ce"] * float("nan"))
    with pytest.raises(UserError, match="gradient norm of step 2 is nan"):
        backend.step()
    after = everything(backend)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


WIDE, DEEP = 2048, 8   # 34 million parameters: 134 MB in float32


class Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def wide_weights() -> Iterator[tuple[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    for i in range(DEEP):
        yield f"{i}.weight", torch.randn(WIDE, WIDE, generator=rng) / WIDE**0.5


def wide(mesh: Mesh, *, offload: bool) -> tuple[int, int, dict[str, Tensor]]:
    """Device memory between steps and at its peak, and the weights after two steps."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))
    root = Root(model)
    units = [Unit(f"model.{i}", (block,)) for i, block in enumerate(model)]
    apply_fsdp(root, units, mesh, bf16=True, reshard_after_forward=True, offload=offload)
    materialise(root, model, mesh, wide_weights, dict, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    x = torch.randn(64, WIDE, generator=torch.Generator().manual_seed(1)).to(mesh.device, torch.bfloat16)
    for _ in range(2):
        root(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    held, peak = allocated() - before, torch.cuda.max_memory_allocated() - before
    return held, peak, {name: local(parameter) for name, parameter in model.named_parameters()}


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_it_frees_the_device(mesh: Mesh) -> None:
    """And copies large enough to be still under way, were nobody to wait for them, arrive whole."""
    warm = torch.ones(WIDE, WIDE, device=mesh.device, dtype=torch.bfloat16)
    warm @ warm   # the product's workspace is nobody's
    del warm
    held, peak, weights = wide(mesh, offload=True)
    held_without, peak_without, reference = wide(mesh, offload=False)
    print(f"held {held:,} with, {held_without:,} without; peak {peak:,} with, {peak_without:,} without")
    assert held_without > 12 * DEEP * WIDE**2   # masters and moments
    assert held < held_without / 4
    assert peak < peak_without / 2
    begun = dict(wide_weights())
    for name, weight in reference.items():
        moved, error = weight - begun[name], weights[name] - weight
        assert float(moved.norm()) > 0, name
        assert float(error.norm()) <= 0.02 * float(moved.norm()), name
