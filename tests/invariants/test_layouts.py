"""One number, every layout: FSDP2 over two ranks, accumulation and recomputation, for every family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.kernels import attention
from lmms_engine.kernels.loss_head import replace_head
from lmms_engine.models import hf
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.next_token import NextToken
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.parallel.paths import resolve
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import parallelize
from lmms_engine.train.step import train_step
from tests import tiny, toy
from tests.distributed import run_ranks

pytestmark = pytest.mark.parametrize("family", tiny.FAMILIES)

# Numbers of the tiny samples: 0 one picture, 1 two pictures and a clip, 2 a clip, 3 text only.
# A rank that has text alone gets a stand-in picture.
ONE_RANK = [[[0], [1], [2], [3]]]
LAYOUTS = {
    "halves": [[[0], [1]], [[2], [3]]],
    "unlike": [[[3], [3, 0]], [[2], [1]]],
    "text and pictures": [[[3]], [[0, 1, 2]]],
    "clip and picture": [[[2]], [[0]]],
    "text alone on both": [[[3]], [[3, 3]]],
}


def sharded(family: str, mesh: Mesh, job: Job) -> NextToken:
    """The family's tiny model by the engine's own path: meta, sharded, filled from a stream."""
    spec = MODELS.get(family)
    filled = tiny.build(family)[0].model
    values = {name: tensor.detach() for name, tensor in filled.named_parameters()}
    model = hf.build_meta(spec, spec.tiny()[0].config)
    replace_head(model, spec.layout.head, fused=False)
    attention.use(model, spec.layout.attention, attention.install("sdpa"))
    objective = NextToken(model, spec, model.config)
    parallelize(objective, spec.layout, mesh, job.trainer)
    materialise(objective, model, mesh, lambda: iter(values.items()), lambda: dict(filled.named_buffers()))
    return objective


def micro(family: str, numbers: list[int]) -> PackedBatch:
    """A pack of tiny samples; one without pictures gets the first sample's, weight 0, as a stand-in."""
    _, samples = tiny.build(family)
    chosen = [samples[i] for i in numbers]
    if any(sample.media for sample in chosen):
        return tiny.pack(chosen)
    batch = tiny.pack([*chosen, samples[0]], stand_ins=1)
    batch.loss_weights[batch.num_tokens :] = 0
    batch.labels[batch.num_tokens :] = -100
    return batch


def run(
    mesh: Mesh, family: str, layout: list[list[list[int]]], recompute: bool, frozen: list[str]
) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, targets, gradients; weights after two steps. layout: rank -> micro-batches -> samples."""
    job = toy.job(freeze_modules=frozen, fsdp_config={"activation_checkpointing": recompute})
    objective = sharded(family, mesh, job)
    backend = FSDP2Backend(objective, job, mesh)
    gradients: dict[str, Tensor] = {}
    keep_first_gradients(backend, objective, gradients)
    micros = [micro(family, numbers) for numbers in layout[mesh.rank]]
    losses = []
    for step in (1, 2):
        backend.set_progress(0.5, step)
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        losses.append(sum(mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"])
    assert losses[1] < losses[0]
    return losses[0], stats.totals["ce"], gradients, toy.weights(objective.model)


def keep_first_gradients(backend: FSDP2Backend, objective: NextToken, into: dict[str, Tensor]) -> None:
    """Fills `into` just before the first update."""

    def hook(*_: object) -> None:
        if not into:
            into.update(toy.gradients(objective.model))

    backend.optimizer.register_step_pre_hook(hook)


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def in_one_piece(family: str, layout: list[list[list[int]]]) -> tuple[float, float, dict[str, Tensor]]:
    """The same samples in the unsharded model, in one backward."""
    objective, _ = tiny.build(family)
    micros = [micro(family, numbers) for rank in layout for numbers in rank]
    targets = sum(objective.weights(batch)["ce"] for batch in micros)
    (sum(objective(batch.to(tiny.CPU))["ce"] for batch in micros) / targets).backward()
    with torch.no_grad():
        loss = sum(objective(batch.to(tiny.CPU))["ce"].double() for batch in micros) / targets
    return float(loss), targets, toy.gradients(objective.model)


def check(result: tuple, want: tuple) -> None:
    assert result[1] == want[1]
    assert result[0] == pytest.approx(want[0], rel=1e-6)
    toy.assert_same_gradients(result[2], want[2])


@pytest.mark.parametrize("recompute", [False, True])
def test_one_sharded_process_equals_the_plain_model(family: str, recompute: bool, mesh: Mesh) -> None:
    check(run(mesh, family, ONE_RANK, recompute, []), in_one_piece(family, ONE_RANK))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_process(family: str, layout: str) -> None:
    want = in_one_piece(family, LAYOUTS[layout])
    first, second = run_ranks(run, 2, family, LAYOUTS[layout], True, [])
    check(first, want)
    check(second, want)
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])


def test_two_ranks_with_a_frozen_tower_equal_one_process(family: str) -> None:
    loss, targets, gradients = in_one_piece(family, LAYOUTS["unlike"])
    trained = {name: grad for name, grad in gradients.items() if ".visual." not in name}
    assert len(trained) < len(gradients)
    for result in run_ranks(run, 2, family, LAYOUTS["unlike"], True, ["visual"]):
        check(result, (loss, targets, trained))


def count_calls(family: str, mesh: Mesh, recompute: bool) -> dict[str, int]:
    """How often each block runs in one forward and backward: calls of its first norm."""
    objective = sharded(family, mesh, toy.job(fsdp_config={"activation_checkpointing": recompute}))
    calls: dict[str, int] = {}
    for pattern in MODELS.get(family).layout.blocks:
        for name, block in resolve(objective.model, pattern).items():
            calls[name] = 0
            norm = next(module for path, module in block.named_modules() if "norm" in path)
            norm.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    objective(micro(family, [1]).to(tiny.CPU))["ce"].backward()
    return calls


def test_every_block_runs_twice_with_recomputation_and_once_without(family: str, mesh: Mesh) -> None:
    for recompute, times in ((False, 1), (True, 2)):
        calls = count_calls(family, mesh, recompute)
        assert set(calls.values()) == {times}
        assert any(".visual." in name for name in calls)
        assert any(".language_model." in name for name in calls)
