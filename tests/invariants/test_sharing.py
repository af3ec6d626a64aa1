"""One number, every split of four ranks: replicas, shared sequences and both, for every family.

The same four micro-batches, dealt out to as many data ranks as a split leaves, equal the plain model in one
process: loss, every gradient, and the weights after two steps.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.grad_norm import global_norm
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train import checkpoint
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.step import train_step
from tests import tiny, toy
from tests.distributed import run_ranks
from tests.invariants.test_layouts import in_one_piece, micro

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
# Numbers of the tiny samples: 0 one picture, 1 two pictures and a clip, 2 a clip, 3 text only.
MICROS = [[0, 3], [3], [1], [2, 3, 0]]
CLIP = 0.5   # below every gradient norm of these models
SPLITS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"fsdp_config": {"hsdp_shard_size": 2}},
    "sp 2": {"sp_ulysses_degree": 2},
    "sp 4": {"sp_ulysses_degree": 4},   # more ranks than key/value heads
    "hsdp, sp 2": {"sp_ulysses_degree": 2, "fsdp_config": {"hsdp_shard_size": 2}},
    "hsdp inside sp 4": {"sp_ulysses_degree": 4, "fsdp_config": {"hsdp_shard_size": 2}},
}


def make_job(family: str, split: dict[str, Any], **changes: Any) -> Job:
    """The family's tiny model as a job, recomputation on."""
    config = import_module(f"lmms_engine.models.{family}.tiny").tiny_config().to_diff_dict()
    for key in ("transformers_version", "architectures", "dtype", "_attn_implementation"):
        config.pop(key, None)
    schedule = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "learning_rate": 0.01}
    trainer = {**schedule, **split, **changes}
    fsdp = {"activation_checkpointing": True, **trainer.pop("fsdp_config", {})}
    return Job.from_dict(
        {
            "model_config": {"load_from_config": config},
            "dataset_config": {"datasets": [{"path": "unused.jsonl"}]},
            "trainer_args": {"report_to": "none", "max_grad_norm": CLIP, **trainer, "fsdp_config": fsdp},
        }
    )


class Run:
    """A model in one split, from the tiny model's weights, and its micro-batches."""

    def __init__(self, family: str, split: dict[str, Any]) -> None:
        job = make_job(family, split)
        self.mesh = build_mesh(job.trainer)
        self.objective, _, config = build_model(job, self.mesh, load_weights=False)
        plain = tiny.build(family)[0].model
        values = [(name, p.detach()) for name, p in plain.named_parameters()]
        model, buffers = self.objective.model, dict(plain.named_buffers())
        materialise(self.objective, model, self.mesh, lambda: iter(values), lambda: buffers)
        self.backend = FSDP2Backend(self.objective, job, self.mesh)
        each = len(MICROS) // self.mesh.dp_size
        mine = MICROS[self.mesh.dp_rank * each : (self.mesh.dp_rank + 1) * each]
        self.micros = [micro(family, numbers) for numbers in mine]
        grids = [batch.media["image_grid_thw"] for batch in self.micros]
        towers = [tiny.tower_inputs(config.vision_config, grid) for grid in grids]
        self.micros = [replace(b, tower=t) for b, t in zip(self.micros, towers, strict=True)]
        self.gradients: dict[str, torch.Tensor] = {}
        self.clipped = 0.0
        self.backend.optimizer.register_step_pre_hook(self._look)

    def _look(self, *_: object) -> None:
        self.gradients = toy.gradients(self.objective.model)
        divisor = self.backend.optimizer.grad_scale
        self.clipped = float(global_norm(self.objective.parameters(), self.mesh.device) / divisor)

    def step(self, number: int) -> tuple[float, float, float]:
        """Loss, number of targets and gradient norm of one step."""
        self.backend.set_progress(0.5, number)
        stats = train_step(self.objective, self.backend, self.micros, self.mesh, torch.Generator())
        loss = sum(self.mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"]
        return loss, stats.totals["ce"], float(stats.grad_norm)


def every_split(mesh: Mesh, family: str, folder: Any) -> dict[str, Any]:
    """Per split: loss, targets, gradients of step 1; all later losses, also after a change of split."""
    found: dict[str, Any] = {}
    for name, split in SPLITS.items():
        run = Run(family, split)
        loss, targets, norm = run.step(1)
        result = {"loss": loss, "targets": targets, "norm": norm, "clipped": run.clipped}
        result["gradients"] = run.gradients if mesh.is_main else None
        result["losses"] = [run.step(2)[0]]
        checkpoint.save(folder / name, 2, run.backend.state(), run.mesh, {})
        result["losses"] += [run.step(3)[0], run.step(4)[0]]
        weights = toy.weights(run.objective.model)   # of this replica alone
        result["drift"] = [sum(float(w.double().sum()) for w in weights.values())]
        found[name] = result
    names = list(SPLITS)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        run = Run(family, SPLITS[other])
        checkpoint.load(checkpoint.latest(folder / name), run.backend.state(), run.mesh)
        found[name]["resumed"] = [run.step(3)[0], run.step(4)[0]]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_is_one_number_and_resumes_on_any_other(family: str, tmp_path) -> None:
    loss, targets, gradients = in_one_piece(family, [[numbers] for numbers in MICROS])
    norm = float(sum(g.double().square().sum() for g in gradients.values()) ** 0.5)
    assert norm > CLIP
    ranks = run_ranks(every_split, 4, family, tmp_path, timeout=400)
    later = ranks[0]["fsdp"]["losses"]
    assert later[0] > later[1] > later[2]
    for name in SPLITS:
        results = [rank[name] for rank in ranks]
        assert len({tuple(result["drift"]) for result in results}) == 1, f"{name}: the replicas drift apart"
        assert len({result["norm"] for result in results}) == 1, f"{name}: each rank has its own norm"
        for result in results:
            assert result["targets"] == targets, name
            assert result["loss"] == pytest.approx(loss, rel=1e-6), name
            assert result["norm"] == pytest.approx(norm, rel=1e-5), name
            assert result["clipped"] == pytest.approx(CLIP, rel=1e-5), name
            assert result["losses"] == pytest.approx(later, rel=1e-4), name
            assert result["resumed"] == pytest.approx(result["losses"][1:], rel=1e-4), name
        toy.assert_same_gradients(results[0]["gradients"], gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_ranks_than_heads_are_refused_before_a_model_is_built(family: str) -> None:
    for message in run_ranks(refused, 3, family):
        assert "sp_ulysses_degree=3: does not divide the 4 attention heads" in message
        assert "2 for keys and values" in message


def refused(_: Mesh, family: str) -> str:
    from lmms_engine.models import hf

    hf.build_meta = lambda *_: pytest.fail("a model was built")
    job = make_job(family, {"sp_ulysses_degree": 3})
    try:
        build_model(job, build_mesh(job.trainer))
    except UserError as error:
        return str(error)
    return "nothing raised"


def test_the_padded_path_keeps_its_sequences() -> None:
    with pytest.raises(UserError, match=r"sp_ulysses_degree=2: needs trainer_args.use_rmpad=true"):
        make_job("qwen3_vl", {"sp_ulysses_degree": 2, "use_rmpad": False})
