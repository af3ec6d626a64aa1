"""Flow matching gives one number in every layout: two sharded ranks, accumulation, recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.kernels import attention
from lmms_engine.models import hf
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.flow_matching import FlowMatching
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import parallelize
from lmms_engine.train.seed import generator
from lmms_engine.train.step import train_step
from tests import flow, toy
from tests.distributed import run_ranks

# Rank -> micro-batches -> numbers of the tiny pictures; -1 is a stand-in, for a rank that has run out.
LAYOUTS = {
    "halves": [[[0], [1]], [[2], [3]]],
    "unequal": [[[0, 1, 2]], [[3]]],
    "one has none": [[[0, 1], [2, 3]], [[2], [-1]]],
}


def micro(numbers: list[int]) -> PackedBatch:
    """The pictures with fixed noise, in one pack."""
    if numbers == [-1]:
        (batch,) = flow.with_noise([flow.PROCESSOR.stand_in()])
        return replace(batch, rows=())
    _, _, samples = flow.build()
    batches = flow.with_noise(samples, null=5)
    return flow.join([batches[number] for number in numbers])


def sharded(mesh: Mesh, recompute: bool) -> FlowMatching:
    """The tiny model by the engine's own path: meta, sharded, filled from a stream."""
    spec = MODELS.get("sit")
    filled, _ = spec.tiny()
    model = hf.build_meta(spec, filled.config)
    attention.use(model, spec.layout.attention, attention.install("sdpa"))
    objective = FlowMatching(model, spec, model.config)
    job = toy.job(fsdp_config={"activation_checkpointing": recompute})
    parallelize(objective, spec.layout, mesh, job.trainer)
    materialise(objective, model, mesh, lambda: iter(filled.state_dict().items()), dict)
    return objective


def run(
    mesh: Mesh, layout: list[list[list[int]]], recompute: bool
) -> tuple[float, float, dict[str, Tensor], list[Tensor]]:
    """Loss, weight and gradients of the first of two steps; then what the model draws."""
    objective = sharded(mesh, recompute)
    backend = FSDP2Backend(objective, toy.job(), mesh)
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        if not gradients:
            gradients.update(toy.gradients(objective.model))

    backend.optimizer.register_step_pre_hook(keep)
    micros = [micro(numbers) for numbers in layout[mesh.rank]]
    losses = []
    for step in (1, 2):
        backend.set_progress(0.5, step)
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        losses.append(sum(mesh.gather(float(stats.sums["flow"]))) / stats.totals["flow"])
    assert losses[1] < losses[0]
    objective.eval()
    drawings = objective.drawings(flow.PROCESSOR, mesh.device, generator(0, "drawings"))
    return losses[0], stats.totals["flow"], gradients, [drawing.pixels for drawing in drawings]


def in_one_piece(layout: list[list[list[int]]]) -> tuple[float, float, dict[str, Tensor]]:
    objective, _, _ = flow.build()
    micros = [micro(numbers) for rank in layout for numbers in rank]
    loss, gradients = flow.loss_and_gradients(objective, micros)
    return loss, sum(objective.weights(batch)["flow"] for batch in micros), gradients


def check(result: tuple, layout: list[list[list[int]]]) -> None:
    loss, total, gradients = in_one_piece(layout)
    assert result[1] == total
    assert result[0] == pytest.approx(loss, rel=1e-6)
    toy.assert_same_gradients(result[2], gradients)
    assert [tuple(pixels.shape) for pixels in result[3]] == [(8, 8, 3)] * 5


@pytest.mark.parametrize("recompute", [False, True])
def test_one_sharded_process_equals_the_plain_model(recompute: bool) -> None:
    with toy.single_mesh() as mesh:
        check(run(mesh, [[[0], [1], [2], [3]]], recompute), [[[0], [1], [2], [3]]])


def test_four_micro_batches_of_two_pictures_equal_one_batch_of_eight() -> None:
    eight = [0, 1, 2, 3, 3, 0, 2, 1]
    with toy.single_mesh() as mesh:
        check(run(mesh, [[eight[i : i + 2] for i in range(0, 8, 2)]], False), [[eight]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_process(layout: str) -> None:
    first, second = run_ranks(run, 2, LAYOUTS[layout], True)
    check(first, LAYOUTS[layout])
    check(second, LAYOUTS[layout])
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True))
