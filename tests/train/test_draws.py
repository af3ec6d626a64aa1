"""What a run draws: alike on ranks of a sequence, unlike on data ranks, the same again after a resume.

Four ranks, as two data ranks of two ranks each for text and pictures, as four data ranks for a model that
learns to draw. Compared are hashes of the numbers themselves: noise, times, dropped classes, dropout masks.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.sit.processor import Settings, SiTProcessor
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train import TrainRunner
from tests import flow
from tests.distributed import run_ranks
from tests.runs import COLOURS, make_config, make_row, write_rows

pytestmark = pytest.mark.xdist_group("draws")
ROWS, HALF = 12, 3
SIT = {
    "model_type": "sit",
    "config": {
        "input_size": 8, "patch_size": 2, "hidden_size": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0,
        "num_classes": 4, "class_dropout_prob": 0.5,
    },
}  # fmt: skip
Draws = list[dict[str, Any]]   # of each step: row ids, and hashes by what was drawn


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def targets(batch: PackedBatch) -> dict[str, str]:
    """What flow matching has drawn for a batch."""
    return {key: digest(batch.media[key]) for key in ("noise", "times", "class_labels")}


def watched(config: dict[str, Any]) -> Draws:
    """Trains with dropout before every MLP of a decoder; what this rank drew."""
    job = Job.from_dict(config)
    runner = TrainRunner(job, build_mesh(job.trainer)).build()
    draw, seen = runner.objective.draw, []
    pictures, _, samples = flow.build()
    many = flow.batch_of([samples[3]] * 40)

    def watch(batch: PackedBatch, rng: torch.Generator) -> PackedBatch:
        copy = rng.clone_state()
        drawn = draw(batch, rng)
        own = drawn if "noise" in drawn.media else pictures.draw(many, copy)
        seen.append({"ids": [row.id for row in batch.rows], **targets(own), "masks": []})
        return drawn

    def drop(module: torch.nn.Module, args: tuple[Tensor]) -> Tensor:
        dropped = F.dropout(args[0], 0.1, module.training)
        seen[-1]["masks"].append(digest(dropped == 0))
        return dropped

    runner.objective.draw = watch
    for name, module in runner.objective.model.named_modules():
        if name.endswith(".mlp") and ".language_model." in name:
            module.register_forward_pre_hook(drop)
    runner.run()
    return seen


def again(mesh: Mesh, config: dict[str, Any]) -> Draws:
    """The run goes on from its first checkpoint, as if it had been killed there."""
    whole = Path(config["trainer_args"]["output_dir"])
    resumed = whole.with_name(f"{whole.name}-resumed")
    if mesh.is_main:
        shutil.copytree(whole, resumed)
        last = (whole / "checkpoints" / "latest").read_text().strip()
        shutil.rmtree(resumed / "checkpoints" / last)
    mesh.barrier()
    return watched({**config, "trainer_args": {**config["trainer_args"], "output_dir": str(resumed)}})


def on_four_ranks(mesh: Mesh, configs: dict[str, dict[str, Any]]) -> dict[str, Draws]:
    found = {}
    for name, config in configs.items():
        found[name] = watched(config)
        if config["trainer_args"].get("save_steps"):
            found[f"{name}, resumed"] = again(mesh, config)
    return found


@pytest.fixture(scope="module")
def ranks(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Draws]]:
    folder = tmp_path_factory.mktemp("draws")
    for name in ("images", "processor"):
        (folder / name).symlink_to(corpus / name)
    write_rows(folder / "talk.jsonl", [make_row(f"r{i}", i) for i in range(ROWS)])
    SiTProcessor(Settings(COLOURS, 2)).save_pretrained(folder / "sit")
    draw_me = []
    for i in range(ROWS):
        Image.new("RGB", (8, 8), COLOURS[i % 4]).save(folder / f"{i}.png")
        picture = {"type": "image_url", "image_url": {"url": f"{i}.png"}}
        turns = [{"role": "user", "content": COLOURS[i % 4]}, {"role": "assistant", "content": [picture]}]
        draw_me.append({"id": f"r{i}", "messages": turns})
    write_rows(folder / "draw.jsonl", draw_me)

    def config(name: str, data: str, steps: int, **changes: Any) -> dict[str, Any]:
        given = {"data__datasets": [{"path": str(folder / data)}], "data__packing": False,
                 "data__num_logical_shards": 4, "trainer__gradient_accumulation_steps": 1,
                 "trainer__max_steps": steps,
                 "trainer__fsdp_config": {"activation_checkpointing": True}}  # fmt: skip
        return make_config(corpus, folder / name, **{**given, **changes})

    pairs = {"trainer__sp_ulysses_degree": 2}
    sit = {"model__load_from_config": SIT, "data__processor_config": {"processor_name": str(folder / "sit")}}
    configs = {
        "talk": config("talk", "talk.jsonl", ROWS // 2, **pairs, trainer__save_steps=HALF),
        "other seed": config("other", "talk.jsonl", 1, **pairs, trainer__seed=7),
        "draw": config("draw", "draw.jsonl", ROWS // 4, **sit, trainer__save_steps=2),
    }
    return run_ranks(on_four_ranks, 4, configs, timeout=200)


KINDS = ("noise", "times", "class_labels", "masks")


def drawn(rank: dict[str, Draws], run: str, kind: str) -> list[Any]:
    return [step[kind] for step in rank[run]]


def test_row_ids_are_disjoint_over_data_ranks_and_complete(ranks) -> None:
    for run, firsts in (("talk", (0, 2)), ("draw", (0, 1, 2, 3))):
        ids = [name for rank in firsts for step in drawn(ranks[rank], run, "ids") for name in step]
        assert sorted(ids) == sorted(f"r{i}" for i in range(ROWS))
    assert drawn(ranks[0], "talk", "ids") == drawn(ranks[1], "talk", "ids")
    assert drawn(ranks[2], "talk", "ids") == drawn(ranks[3], "talk", "ids")


@pytest.mark.parametrize("kind", KINDS)
def test_draws_agree_inside_a_sequence_and_differ_between_data_ranks_and_steps(ranks, kind: str) -> None:
    by_rank = [drawn(rank, "talk", kind) for rank in ranks]
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    different = {str(draw) for rank in (0, 2) for draw in by_rank[rank]}
    assert len(different) == ROWS


def test_recomputation_draws_the_masks_of_the_forward(ranks) -> None:
    for masks in drawn(ranks[0], "talk", "masks"):
        assert len(masks) == 4   # two layers, forward and again in backward, from the last to the first
        assert masks[2:] == masks[1::-1]
        assert masks[0] != masks[1]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_model_that_draws_gets_noise_and_times_of_its_own_on_every_rank(ranks, kind: str) -> None:
    assert len({draw for rank in ranks for draw in drawn(rank, "draw", kind)}) == ROWS


def test_classes_are_not_dropped_alike_on_every_rank(ranks) -> None:
    assert len({tuple(drawn(rank, "draw", "class_labels")) for rank in ranks}) == 4


@pytest.mark.parametrize("kind", ["ids", *KINDS])
def test_draws_repeat_after_a_resume_and_are_others_for_another_seed(ranks, kind: str) -> None:
    for rank in ranks:
        assert drawn(rank, "talk, resumed", kind) == drawn(rank, "talk", kind)[HALF:]
        assert drawn(rank, "draw, resumed", kind) == drawn(rank, "draw", kind)[2:]
        assert drawn(rank, "other seed", kind)[0] != drawn(rank, "talk", kind)[0]
