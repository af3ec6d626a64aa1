"""`fsdp_config.cpu_offload`: parameters, gradients and optimiser in the host's memory, and no other number.

Without a GPU that memory is the device's own, so what moves is seen in tests/gpu alone; the policy, its other
rhythm of reduction and the optimiser on the host are at work here too.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import build_mesh
from lmms_engine.train import checkpoint
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks

CLIP = 0.5   # below every gradient norm of the toy
# data rank -> micro-batches
MICROS = [
    [toy.batch([5, 4], pictures=3, seed=0), toy.batch([6], pictures=0, seed=1)],
    [toy.batch([7, 2], pictures=0, seed=3, supervised=0.9), toy.batch([3], pictures=1, seed=2)],
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept gathered": {"fsdp_config": {"reshard_after_forward": False}},
    "recomputed": {"fsdp_config": {"activation_checkpointing": True}},
    "frozen tower": {"freeze_modules": ["visual"]},
    "two copies": {"fsdp_config": {"hsdp_shard_size": 1}},
}


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def job_of(trainer: dict[str, Any], *, offload: bool) -> Job:
    given = {"weight_decay": 0.1, "max_grad_norm": CLIP, **trainer}
    return toy.job(**given | {"fsdp_config": {**given.get("fsdp_config", {}), "cpu_offload": offload}})


def start(mesh, *, offload, fill=True, **trainer):
    job = job_of(trainer, offload=offload)
    objective = toy.build(mesh, job, fill=fill)
    return objective, FSDP2Backend(objective, job, mesh)


def step(objective, backend, mesh, number, micros):
    backend.set_progress(0.5, number)
    stats = train_step(objective, backend, micros, mesh, torch.Generator())
    return sum(mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"], float(stats.grad_norm)


def train(_, names, offload):
    """Per setting: loss and norm of three steps, the gradients of the first, the weights after the last."""
    found = []
    for name in names:
        mesh = build_mesh(job_of(SETTINGS[name], offload=offload).trainer)
        objective, backend = start(mesh, offload=offload, **SETTINGS[name])
        gradients = {}

        def keep(*_, backend=backend, into=gradients):
            if not into:
                into.update({name: gradient.clone() for name, gradient in backend.gradients()})

        backend.optimizer.register_step_pre_hook(keep)
        steps = [step(objective, backend, mesh, number, MICROS[mesh.rank]) for number in (1, 2, 3)]
        found.append((steps, gradients, toy.weights(objective.model)))
    return found


def test_two_ranks_train_alike_with_and_without() -> None:
    names = list(SETTINGS)
    without, offloaded = (run_ranks(train, 2, names, offload) for offload in (False, True))
    for rank in (0, 1):
        for name, ours, theirs in zip(names, offloaded[rank], without[rank], strict=True):
            assert min(norm for _, norm in theirs[0]) > CLIP
            assert theirs[0][-1][0] < theirs[0][0][0]
            assert torch.tensor(ours[0]) == pytest.approx(torch.tensor(theirs[0]), rel=1e-5), name
            assert ours[0][0][0] == pytest.approx(theirs[0][0][0], rel=1e-6), name
            toy.assert_same_gradients(ours[1], theirs[1])
            for key, weight in theirs[2].items():
                torch.testing.assert_close(ours[2][key], weight, rtol=1e-4, atol=2e-6, msg=f"{name}: {key}")


def groups_of(objective):
    """What FSDP gathers together, and how it was told to hold it."""
    states = {module._get_fsdp_state() for module in objective.modules() if isinstance(module, FSDPModule)}
    return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]


@pytest.mark.parametrize("offload", [True, False])
def test_every_parameter_is_held_as_the_key_says(mesh, offload) -> None:
    objective, _ = start(mesh, offload=offload, freeze_modules=["visual"])
    held = [parameter for group in groups_of(objective) for parameter in group.fsdp_params]
    assert len(held) == len(list(objective.parameters()))
    assert {parameter.offload_to_cpu for parameter in held} == {offload}
    assert not any(parameter.pin_memory for parameter in held)   # there is none to be had without a GPU


def test_each_micro_batch_is_reduced(mesh) -> None:
    """Whole gradients that wait for the last one would stay on the device."""
    objective, backend = start(mesh, offload=True)
    for last, micro in ((False, MICROS[0][0]), (True, MICROS[0][1])):
        with backend.micro(last=last):
            backend.backward(objective(micro)["ce"])
        assert all(parameter.grad is not None for parameter in objective.model.parameters())


def test_a_norm_that_is_not_finite_stops_the_step_itself(mesh) -> None:
    objective, backend = start(mesh, offload=True)
    before = toy.weights(objective.model)
    backend.set_progress(0.5, 1)
    with backend.micro(last=True):
        backend.backward(objective(MICROS[0][0])["ce"] * float("nan"))
    with pytest.raises(UserError, match="gradient norm of step 1 is nan"):
        backend.step()
    assert all(torch.equal(weight, before[name]) for name, weight in toy.weights(objective.model).items())


def resume(mesh, folder, before, after):
    """Two steps, saved; then the third as before and in the other memory, from the checkpoint."""
    objective, backend = start(mesh, offload=before)
    micros = MICROS[mesh.rank][:1]   # with several, sums of gradients would differ by rounding
    for number in (1, 2):
        step(objective, backend, mesh, number, micros)
    saved = checkpoint.save(folder, 2, backend.state(), mesh, {})
    again, other = start(mesh, offload=after, fill=False)
    checkpoint.load(saved, other.state(), mesh)
    last, resumed = (
        step(model, driver, mesh, 3, micros) for model, driver in ((objective, backend), (again, other))
    )
    return last, resumed, toy.weights(objective.model), toy.weights(again.model)


@pytest.mark.parametrize("before", [True, False])
def test_a_run_resumes_in_the_other_memory_bit_for_bit(tmp_path, before) -> None:
    for last, resumed, want, got in run_ranks(resume, 2, tmp_path, before, not before):
        assert resumed == last
        assert all(torch.equal(got[name], weight) for name, weight in want.items())


def test_the_run_says_so(mesh, caplog) -> None:
    """The engine's own way from a configuration to a model takes the key along."""
    from tests.invariants.test_zero import make_job  # with all families, which ranks need not import

    tree = make_job("qwen3_vl", None).to_dict()
    tree["trainer_args"]["fsdp_config"]["cpu_offload"] = True
    with caplog.at_level(logging.INFO, "lmms_engine"):
        objective, _, _ = build_model(Job.from_dict(tree), mesh)
    assert all(p.offload_to_cpu for group in groups_of(objective) for p in group.fsdp_params)
    assert "to a copy of the parameters, offloaded to the host" in caplog.text


@pytest.mark.parametrize("key", ["cpu_offload", "offload_params", "fsdp_offload_params", "fsdp_cpu_offload"])
def test_the_names_that_others_give_it(key) -> None:
    assert toy.job(fsdp_config={key: True}).trainer.fsdp_config.cpu_offload
    assert not toy.job(fsdp_config={key: False}).trainer.fsdp_config.cpu_offload


def test_transformers_older_word_is_told_the_key() -> None:
    with pytest.raises(UserError, match=r"full_shard offload.*for offload use fsdp_config\.cpu_offload"):
        toy.job(fsdp="full_shard offload")
