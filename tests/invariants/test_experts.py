"""Experts spread over ranks: the same loss, gradients and norm as in one plain process, in every layout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.collate import collate
from lmms_engine.kernels import attention, experts
from lmms_engine.kernels.loss_head import replace_head
from lmms_engine.models import hf
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.next_token import NextToken
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.parallel.paths import resolve
from lmms_engine.parallel.ulysses import Ulysses
from lmms_engine.train import checkpoint
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import apply_expert_parallel, apply_sequence_parallel, parallelize
from lmms_engine.train.step import combine, total_weights, train_step
from tests import tiny, toy
from tests.distributed import run_ranks

FAMILY = "qwen3_moe"
COEFFICIENTS = {"aux": 0.3, "z": 0.2}   # large, so that a mistake in them shows

# data rank -> micro-batches -> numbers of tiny samples; the data ranks hold unlike and unequal data
TWO = [[[0, 1], [2]], [[3], [1, 2, 0]]]
FOUR = [[[0, 1]], [[2]], [[3, 3, 0]], [[1]]]
IDLE = [[[0, 1, 2, 3]], [[]]]   # one rank has no row, only the token that stands in
LAYOUTS: dict[str, tuple[int, list[list[list[int]]], dict[str, Any]]] = {
    "ep 2": (2, TWO, {"ep_degree": 2}),
    "ep 2, a rank without rows": (2, IDLE, {"ep_degree": 2}),
    "ep 2, experts frozen": (2, TWO, {"ep_degree": 2, "freeze_modules": ["model.layers.*.mlp.experts"]}),
    "ep 2, on the host": (2, TWO, {"ep_degree": 2, "fsdp_config": {"cpu_offload": True}}),
    "ep 4": (4, FOUR, {"ep_degree": 4}),
    "ep 2 x fsdp 2": (4, FOUR, {"ep_degree": 2}),
    "ep 2 x hsdp 2": (4, FOUR, {"ep_degree": 2, "fsdp_config": {"hsdp_shard_size": 2}}),
    "ep 2 x hsdp 2, on the host": (
        4, FOUR, {"ep_degree": 2, "fsdp_config": {"hsdp_shard_size": 2, "cpu_offload": True}},
    ),
    "ep 2 across sp 2": (2, [[[0, 1], [2, 3, 3]]], {"ep_degree": 2, "sp_ulysses_degree": 2}),
    "ep 2 x sp 2": (4, TWO, {"ep_degree": 2, "sp_ulysses_degree": 2}),
    "ep 4 x sp 2": (4, TWO, {"ep_degree": 4, "sp_ulysses_degree": 2}),
}


# Of the first step: means of the terms, gradients and their norm. After the last: weights.
Result = tuple[dict[str, float], dict[str, Tensor], float, dict[str, Tensor]]


def sharded(mesh: Mesh, job: Any) -> NextToken:
    """The tiny model by the engine's own path: meta, spread, sharded, filled from a stream."""
    spec = MODELS.get(FAMILY)
    filled = tiny.build(FAMILY)[0].model
    values = {name: tensor.detach() for name, tensor in filled.named_parameters()}
    exchange = Ulysses(mesh.sp) if mesh.sp is not None else None
    model = hf.build_meta(spec, spec.tiny()[0].config)
    replace_head(model, spec.layout.head, fused=False)
    attention.use(model, spec.layout.attention, attention.install("sdpa", exchange))
    apply_sequence_parallel(model, spec, exchange)
    apply_expert_parallel(model, spec.layout, job.trainer, mesh)
    objective = NextToken(model, spec, model.config)
    objective.coefficients.update(COEFFICIENTS)
    objective.sequence_group = mesh.sp
    parallelize(objective, spec.layout, mesh, job.trainer)
    materialise(objective, model, mesh, lambda: iter(values.items()), lambda: dict(filled.named_buffers()))
    return objective


def batch(numbers: list[int]) -> PackedBatch:
    """A pack of tiny samples; of none, one token that counts as no row."""
    _, samples = tiny.build(FAMILY)
    return tiny.pack([samples[i] for i in numbers]) if numbers else collate([], NoTower())


class NoTower:
    """What `collate` asks of a processor of text."""

    keys: ClassVar[dict[str, Any]] = {}

    def stand_in(self) -> None:
        return None


def prepare(trainer: dict[str, Any]) -> tuple[Mesh, FSDP2Backend]:
    """A mesh split as `trainer` says, and the backend around the model on it."""
    job = toy.job(**trainer)
    mesh = build_mesh(job.trainer)
    return mesh, FSDP2Backend(sharded(mesh, job), job, mesh)


def run(layout: list[list[list[int]]], trainer: dict[str, Any], steps: int = 2) -> Result:
    """Trains on the micro-batches of this data rank."""
    mesh, backend = prepare(trainer)
    objective = backend.objective
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        if not gradients:
            gradients.update(toy.gradients(objective.model))

    backend.optimizer.register_step_pre_hook(keep)
    micros = [batch(numbers) for numbers in layout[mesh.dp_rank]]
    first = None
    for step in range(1, steps + 1):
        backend.set_progress(0.5, step)
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        if first is None:
            sums = mesh.gather({term: float(value) for term, value in stats.sums.items()})
            means = {term: sum(s[term] for s in sums) / total for term, total in stats.totals.items()}
            first = means, float(stats.grad_norm)
    return first[0], gradients, first[1], toy.weights(objective.model)


def in_one_piece(layout: list[list[list[int]]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The same samples in the library's model with its own experts, in one backward."""
    objective, _ = tiny.build(FAMILY)
    experts.use(objective.model, resolve(objective.model, "model.layers.*.mlp.experts"), experts.LIBRARY)
    objective.coefficients.update(COEFFICIENTS)
    micros = [batch(numbers) for rank in layout for numbers in rank]
    totals = total_weights(objective, micros)
    parts = [objective(micro.to(tiny.CPU)) for micro in micros]
    sum(combine(part, totals, objective.coefficients) for part in parts).backward()
    means = {term: sum(p[term].item() for p in parts) / total for term, total in totals.items()}
    return means, toy.gradients(objective.model)


def check(result: Result, want: tuple[dict[str, float], dict[str, Tensor]]) -> None:
    terms, gradients, norm, _ = result
    wanted = {name: gradient for name, gradient in want[1].items() if name in gradients}
    assert terms.keys() == want[0].keys()
    for term, mean in want[0].items():
        assert terms[term] == pytest.approx(mean, rel=1e-6), term
    toy.assert_same_gradients(gradients, wanted)
    whole = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5
    assert norm == pytest.approx(whole, rel=1e-5)


def run_all(mesh: Mesh, names: list[str]) -> list[Result]:
    """Every layout of so many ranks, one after the other in the same processes."""
    results = []
    for name in names:
        _, data, given = LAYOUTS[name]
        recompute = {"activation_checkpointing": True, **given.get("fsdp_config", {})}
        results.append(run(data, {**given, "fsdp_config": recompute}))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_equals_one_process(ranks: int) -> None:
    names = [name for name, (size, *_) in LAYOUTS.items() if size == ranks]
    by_rank = run_ranks(run_all, ranks, names, timeout=180)
    for i, name in enumerate(names):
        want = in_one_piece(LAYOUTS[name][1])
        for results in by_rank:
            check(results[i], want)
            frozen = want[1].keys() - results[i][1].keys()
            assert frozen == (experts_of(want[1]) if "frozen" in name else set())
            assert all(torch.equal(results[i][3][key], whole) for key, whole in by_rank[0][i][3].items())


def experts_of(names: Iterable[str]) -> set[str]:
    return {name for name in names if ".experts." in name}


def resume_on_another_layout(mesh: Mesh, folder: str, before: dict[str, Any], after: dict[str, Any]) -> Any:
    """Two steps, saved; the third on the same layout, and on another from the checkpoint: loss, weights."""
    first, backend = prepare(before)
    micros = [batch(numbers) for numbers in FOUR[0] + FOUR[2]]
    micros = micros[mesh.rank :: mesh.world_size]

    def step(mesh: Mesh, backend: FSDP2Backend, number: int) -> float:
        backend.set_progress(0.5, number)
        stats = train_step(backend.objective, backend, micros, mesh, torch.Generator())
        return sum(mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"]

    for number in (1, 2):
        step(first, backend, number)
    checkpoint.save(Path(folder), 2, backend.state(), first, {})
    last = step(first, backend, 3)
    second, other = prepare(after)
    checkpoint.load(checkpoint.folder_of(Path(folder), 2), other.state(), second)
    again = step(second, other, 3)
    return last, again, toy.weights(backend.objective.model), toy.weights(other.objective.model)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_resumes_with_another_degree(tmp_path: Path, before: int, after: int) -> None:
    """Moments included: the third step would differ without them."""
    layouts = {"ep_degree": before}, {"ep_degree": after}
    for last, again, weights, resumed in run_ranks(resume_on_another_layout, 2, str(tmp_path), *layouts):
        assert again == pytest.approx(last, rel=1e-6)
        for name, want in weights.items():
            torch.testing.assert_close(resumed[name], want, rtol=1e-5, atol=1e-6)
