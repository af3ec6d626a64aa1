"""DeepSpeed ZeRO gives every family the numbers of one plain process, also with shared sequences and offload.

One process of FSDP2 stands for the plain one: other tests hold it against the library's model.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.spec import MODELS
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train.backend import build_backend
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.step import train_step
from tests import tiny, toy
from tests.distributed import run_ranks
from tests.invariants import test_experts, test_flow_layouts, test_layouts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)

STEPS = 3
CLIP = 0.05   # below every gradient norm of these models
BUCKETS = {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000, "stage3_prefetch_bucket_size": 500}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-2, optimiser on the host": {"stage": 2, **OFFLOAD},
    "ZeRO-3, all on the host": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
    "ZeRO-2 x SP 2": {"stage": 2, "sp": 2},
    "ZeRO-3 x SP 2": {"stage": 3, "sp": 2},
}
FAMILIES = (*tiny.DECODERS, "sit")
# Numbers of the tiny samples in four micro-batches: two for each of two data ranks, unlike and unequal.
MICROS = [[0, 3], [3], [1], [2, 3, 0]]
Steps = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def micro(family: str, numbers: list[int]) -> PackedBatch:
    """A pack of the family's tiny samples."""
    if family == "sit":
        return test_flow_layouts.micro(numbers)
    return test_layouts.micro(family, numbers) if family in tiny.FAMILIES else test_experts.batch(numbers)


def make_job(family: str, zero: dict[str, Any] | None) -> Job:
    """The family's tiny model as a job; zero: DeepSpeed's settings and `sp`, None for FSDP2."""
    config = MODELS.get(family).tiny()[0].config.to_diff_dict()
    for key in ("transformers_version", "architectures", "dtype", "_attn_implementation"):
        config.pop(key, None)
    if "num_local_experts" in config:   # the library writes it under a name that it does not read
        config["num_experts"] = config.pop("num_local_experts")
    trainer: dict[str, Any] = {
        "report_to": "none", "max_grad_norm": CLIP, "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
        "learning_rate": 0.01, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    tree = {
        "model_config": {"load_from_config": config},
        "dataset_config": {"datasets": [{"path": "unused.jsonl"}]},
        "trainer_args": trainer,
    }
    if zero is not None:
        settings = {key: value for key, value in zero.items() if key != "sp"}
        trainer |= {"fsdp2": False, "sp_ulysses_degree": zero.get("sp", 1)}
        trainer["deepspeed"] = {"zero_optimization": {**settings, **BUCKETS}}
        tree["trainer_type"] = "deepspeed_trainer"
    return Job.from_dict(tree)


def train(_: Mesh, family: str, names: list[str | None]) -> list[Steps]:
    """Per setting: (loss, norm) of each step, the gradients of the first, the weights after the last."""
    return [steps(family, None if name is None else SETTINGS[name]) for name in names]


def steps(family: str, zero: dict[str, Any] | None) -> Steps:
    """See `train`."""
    job = make_job(family, zero)
    mesh = build_mesh(job.trainer)
    objective, spec, _ = build_model(job, mesh, load_weights=False)
    plain = spec.tiny()[0]
    values = list(plain.state_dict().items())
    materialise(objective, objective.model, mesh, lambda: iter(values), lambda: dict(plain.named_buffers()))
    backend = build_backend(objective, job, mesh)
    gradients: dict[str, torch.Tensor] = {}
    update = backend.step

    def keep_gradients_and_update() -> torch.Tensor:
        if not gradients:
            gradients.update({name: gradient.clone() for name, gradient in backend.gradients()})
        return update()

    backend.step = keep_gradients_and_update
    each = len(MICROS) // mesh.dp_size
    micros = [micro(family, numbers) for numbers in MICROS[mesh.dp_rank * each : (mesh.dp_rank + 1) * each]]
    found = []
    (term,) = [name for name, factor in objective.coefficients.items() if factor == 1]
    for number in range(1, STEPS + 1):
        backend.set_progress(0.5, number)
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        loss = sum(mesh.gather(float(stats.sums[term]))) / stats.totals[term]
        found.append((loss, float(stats.grad_norm)))
    weights = {name: toy.whole(tensor) for name, tensor in backend.state()["model"].state_dict().items()}
    return found, gradients, weights


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_equals_one_plain_process(family: str) -> None:
    names = [name for name, zero in SETTINGS.items() if family != "sit" or "sp" not in zero]
    with toy.single_mesh() as mesh:
        ((want, gradients, weights),) = train(mesh, family, [None])
    assert min(norm for _, norm in want) > CLIP
    assert want[0][0] > want[-1][0]
    begun = MODELS.get(family).tiny()[0].state_dict()
    # Adam makes whole steps of a gradient that is rounding alone: that of biases of keys is 0.
    biases = {key for key in gradients if key.endswith("k_proj.bias")}
    for rank in run_ranks(train, 2, family, names, timeout=280):
        for name, (found, got, last) in zip(names, rank, strict=True):
            assert found[0][0] == pytest.approx(want[0][0], rel=1e-6), name
            assert found[0][1] == pytest.approx(want[0][1], rel=1e-5), name
            assert torch.tensor(found) == pytest.approx(torch.tensor(want), rel=1e-4), name
            toy.assert_same_gradients(got, gradients)
            for key in gradients.keys() - biases:
                moved, error = weights[key] - begun[key], last[key] - weights[key]
                assert float(error.norm()) <= 0.01 * float(moved.norm()), f"{name}: {key}"
