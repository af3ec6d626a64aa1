"""Gradient norm and clipping over replicas and expert groups: those of one process, and copies stay equal.

Four ranks, a norm of 10 that is clipped to 1, twenty steps. A part is frozen, and one parameter has an empty
shard on all ranks but one of a copy.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks
from tests.invariants import test_experts

NORM, CLIP, STEPS = 10.0, 1.0, 20
TRAINER = {"max_grad_norm": CLIP, "learning_rate": 1e-3}
REPLICAS = {"fsdp_config": {"hsdp_shard_size": 2}}
# model -> the part that is frozen, and the splits of four ranks
MODELS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "tied head": ("visual", {"shards": {}, "replicas": REPLICAS}),
    "experts": (
        "model.layers.1.self_attn",
        {"ep": {"ep_degree": 2}, "ep in replicas": {"ep_degree": 2, **REPLICAS}},
    ),
}
PACKS = [[0, 1], [2], [3, 3, 0], [1]]   # numbers of the tiny samples, a micro-batch each


def prepare(model: str, split: dict[str, Any]) -> tuple[Mesh, FSDP2Backend, list[PackedBatch]]:
    """The four micro-batches of all ranks too."""
    trainer = {**TRAINER, **split, "freeze_modules": [MODELS[model][0]]}
    if model == "experts":
        return *test_experts.prepare(trainer), [test_experts.batch(numbers) for numbers in PACKS]
    job = toy.job(**trainer)
    mesh = build_mesh(job.trainer)
    backend = FSDP2Backend(toy.build(mesh, job, gain=True), job, mesh)
    return mesh, backend, [toy.batch([5, 4], pictures=2 * (i % 2), seed=i) for i in range(4)]


def scale(objective: Objective, factor: float) -> None:
    """Makes the loss, and so the norm, so many times as large."""
    for term in objective.coefficients:
        objective.coefficients[term] *= factor


def train(model: str, split: dict[str, Any], factor: float, steps: int = STEPS) -> dict[str, Any]:
    """Each step's norm; in the first and the last step the one that the update uses, recomputed; a hash."""
    mesh, backend, micros = prepare(model, split)
    scale(backend.objective, factor)
    clipped: list[float] = []

    def look(*_: object) -> None:
        if len(norms) not in (0, STEPS - 1):
            return
        gradients = toy.gradients(backend.objective.model)
        square = sum(float(g.double().square().sum()) for g in gradients.values())
        clipped.append(square**0.5 / float(backend.optimizer.grad_scale))

    norms: list[float] = []
    backend.optimizer.register_step_pre_hook(look)
    each = len(micros) // mesh.dp_size
    for number in range(1, steps + 1):
        backend.set_progress(0.5, number)
        own = micros[mesh.dp_rank * each : (mesh.dp_rank + 1) * each]
        norms.append(float(train_step(backend.objective, backend, own, mesh, torch.Generator()).grad_norm))
    weights = toy.weights(backend.objective.model)   # gathered inside this rank's copy
    digest = hashlib.blake2b(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()
    empty = [name for name, p in backend.objective.model.named_parameters() if not p.to_local().numel()]
    return {"norms": norms, "clipped": clipped, "weights": digest, "empty": empty}


def every_split(_: Mesh, factors: dict[str, float]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (model, name): train(model, split, factors[model])
        for model, (_, splits) in MODELS.items()
        for name, split in splits.items()
    }


@pytest.fixture(scope="module")
def ranks() -> tuple[dict[str, list[float]], list[dict[tuple[str, str], dict[str, Any]]]]:
    """The norms of one process, and what each of four ranks found."""
    alone, factors = {}, {}
    with toy.single_mesh():
        for model in MODELS:
            factors[model] = NORM / train(model, {}, 1.0, steps=1)["norms"][0]
            alone[model] = train(model, {}, factors[model])["norms"]
    return alone, run_ranks(every_split, 4, factors, timeout=120)


@pytest.mark.parametrize(("model", "split"), [(model, name) for model in MODELS for name in MODELS[model][1]])
def test_one_norm_one_clip_factor_and_equal_copies(ranks, model: str, split: str) -> None:
    alone, found = ranks
    results = [rank[model, split] for rank in found]
    assert alone[model][0] == pytest.approx(NORM, rel=1e-5)
    assert min(alone[model]) > CLIP   # clipping is at work in every step
    for result in results:
        assert result["norms"] == results[0]["norms"]   # bit for bit
        assert result["norms"][0] == pytest.approx(NORM, rel=1e-5)
        assert result["norms"] == pytest.approx(alone[model], rel=1e-3)
        assert result["clipped"] == pytest.approx([CLIP] * 2, rel=1e-5)
        assert result["weights"] == results[0]["weights"]
    if model == "tied head":
        assert any(result["empty"] for result in results)
