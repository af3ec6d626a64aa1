from dataclasses import replace

import pytest
import torch
from torch import nn

from lmms_engine.errors import UserError
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def start(mesh, *, build=None, **trainer):
    job = toy.job(**trainer)
    objective = toy.build(mesh, job, **(build or {}))
    return objective, FSDP2Backend(objective, job, mesh)


def step(objective, backend, mesh, micros, number=1, progress=0.5):
    backend.set_progress(progress, number)
    return train_step(objective, backend, micros, mesh, torch.Generator())


def plain_steps(micros_of_steps, weight_decay, max_norm):
    """The same training, written with nothing of ours: one process, unsharded, torch's own clip and AdamW."""
    model = toy.reference()
    objective = toy.ToyObjective(model)
    vectors = [p for n, p in model.named_parameters() if p.ndim < 2 or "_tokens" in n or "pos_" in n]
    matrices = [p for p in model.parameters() if all(p is not v for v in vectors)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    norms = []
    for micros in micros_of_steps:
        total = sum(objective.weights(m)["ce"] for m in micros)
        (sum(objective(m)["ce"] for m in micros) / total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, toy.weights(model)


MICROS = [
    [toy.batch([5, 4], pictures=3, seed=0), toy.batch([6], pictures=0, seed=1)],
    [toy.batch([3], pictures=1, seed=2), toy.batch([7, 2], pictures=0, seed=3, supervised=0.9)],
    [toy.batch([4], pictures=0, seed=4), toy.batch([8], pictures=5, seed=5)],
]


def three_steps(mesh):
    objective, backend = start(mesh, weight_decay=0.1, max_grad_norm=0.5)
    norms = []
    for number, micros in enumerate(MICROS, 1):
        mine = micros if mesh.world_size == 1 else [micros[mesh.rank]]
        norms.append(float(step(objective, backend, mesh, mine, number).grad_norm))
    return norms, toy.weights(objective.model)


def test_steps_equal_plain_torch_on_one_rank_and_on_two(mesh):
    norms, weights = plain_steps(MICROS, weight_decay=0.1, max_norm=0.5)
    assert min(norms) > 0.5   # clipping is at work
    for got_norms, got in (three_steps(mesh), *run_ranks(three_steps, 2)):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for name, want in weights.items():
            torch.testing.assert_close(got[name], want, rtol=1e-4, atol=2e-6, msg=name)


def test_rates_follow_the_schedule(mesh):
    _, backend = start(mesh, learning_rate=0.2, lr_scheduler_type="linear", warmup_ratio=0.0)
    backend.set_progress(0.25, 1)
    assert backend.lrs() == {"decay": pytest.approx(0.15), "no_decay": pytest.approx(0.15)}
    backend.set_progress(1.0, 4)
    assert set(backend.lrs().values()) == {0.0}


def test_gradients_are_reduced_on_the_last_micro_batch_only(mesh):
    objective, backend = start(mesh)
    first, second = MICROS[0]
    with backend.micro(last=False):
        backend.backward(objective(first)["ce"])
    assert all(p.grad is None for p in objective.model.parameters())   # still whole, not in the shards
    with backend.micro(last=True):
        backend.backward(objective(second)["ce"])
    assert all(p.grad is not None for p in objective.model.parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_are_gathered_once_a_step_where_they_are_not_resharded(mesh, reshard):
    objective, backend = start(mesh, fsdp_config={"reshard_after_forward": reshard})
    block = objective.model.model.language_model.layers[0]
    with backend.micro(last=False):
        backend.backward(objective(MICROS[0][0])["ce"])
    whole = not hasattr(next(block.parameters()), "device_mesh")
    assert whole is not reshard
    with backend.micro(last=True):
        backend.backward(objective(MICROS[0][1])["ce"])
    assert hasattr(next(block.parameters()), "device_mesh")


def test_a_trainable_parameter_without_gradient_stops_the_run(mesh):
    objective, backend = start(mesh)
    without_pictures = replace(MICROS[0][0], media={})
    with pytest.raises(UserError, match=r"15 trainable param.* got no gradient .*: model\.visual\..* 5 more"):
        step(objective, backend, mesh, [without_pictures])


def test_frozen_parts_have_no_optimizer_entries_and_need_no_gradient(mesh):
    objective, backend = start(mesh, freeze_modules=["visual"])
    listed = {id(p) for g in backend.optimizer.param_groups for p in g["params"]}
    assert listed == {id(p) for n, p in objective.model.named_parameters() if ".visual." not in n}
    step(objective, backend, mesh, MICROS[0])
    assert all(p.grad is None for p in objective.model.model.visual.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_norm_stops_the_run_and_moves_nothing(mesh, value):
    objective, backend = start(mesh, weight_decay=0.1)
    step(objective, backend, mesh, MICROS[0], number=1)
    before = toy.weights(objective.model)
    moments = {k: v.clone() for k, v in backend.state()["optimizer"].state_dict().items()}
    backend.set_progress(0.5, 2)
    with backend.micro(last=True):
        backend.backward(objective(MICROS[1][1])["ce"] * value)
    with pytest.raises(UserError, match=r"gradient norm of step 2 is (nan|inf).*not changed"):
        backend.step()
    for name, weight in toy.weights(objective.model).items():
        assert torch.equal(weight, before[name])
    for name, moment in backend.state()["optimizer"].state_dict().items():
        assert torch.equal(toy.whole(moment), toy.whole(moments[name])), name


def test_tiny_updates_reach_the_masters(mesh):
    """A rate of 1e-6 on weights near 1 vanishes in bfloat16; masters and moments are float32."""
    objective, backend = start(mesh, learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1e6)
    norm_weight = objective.model.model.language_model.norm.weight
    start_value = toy.whole(norm_weight.detach())
    plain = nn.Parameter(start_value.clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0, foreach=False)
    for number in range(1, 21):
        backend.set_progress(0.5, number)
        for p in objective.model.parameters():
            p.grad = torch.ones_like(p)
        backend.step()
        plain.grad = torch.ones_like(plain)
        optimizer.step()
    drift = toy.whole(norm_weight.detach()) - start_value
    assert norm_weight.dtype == torch.float32
    assert {t.dtype for t in backend.state()["optimizer"].state_dict().values()} == {torch.float32}
    assert drift.max() < -15e-6
    torch.testing.assert_close(drift, (plain - start_value).detach(), rtol=0.01, atol=0)
