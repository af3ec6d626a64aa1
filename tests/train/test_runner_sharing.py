"""Runs in which ranks share sequences: rows, seeds, counts and losses; going on in other splits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmms_engine.commands.inspect import batches
from lmms_engine.config import Job
from lmms_engine.train import TrainRunner
from lmms_engine.train.metrics import batch_records, read_lines
from tests import toy
from tests.distributed import run_ranks
from tests.runs import logged, make_config, make_row, row_ids, train, write_rows

pytestmark = pytest.mark.xdist_group("shared sequences")
STEPS = 4
SHARED_BY = (1, 2, 4)   # ranks of a sequence


def _config(corpus: Path, run_dir: Path, *, accumulate: int, **trainer: Any) -> dict[str, Any]:
    """A step is two packs, one of each logical shard, whoever reads them."""
    changes = {f"trainer__{key}": value for key, value in trainer.items()}
    heldout = [{"path": str(corpus / "heldout.jsonl")}]
    return make_config(
        corpus, run_dir, trainer__max_steps=STEPS, trainer__save_steps=2, data__eval_datasets=heldout,
        trainer__lr_scheduler_type="constant", trainer__gradient_accumulation_steps=accumulate, **changes,
    )  # fmt: skip


def _watched(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Trains; what this rank draws targets by, what dropout draws by, and what it sees: one entry a micro."""
    runner = TrainRunner(Job.from_dict(config)).build()
    seen: list[tuple[int, int, int]] = []
    draw = runner.objective.draw

    def watch(batch, rng):
        seen.append((rng.initial_seed(), torch.initial_seed(), int(batch.input_ids.sum())))
        return draw(batch, rng)

    runner.objective.draw = watch
    runner.run()
    return seen


def _back_to_step_2(mesh, config: dict[str, Any], run_dir: Path) -> None:
    """A copy of a run as if it had been killed after its second step."""
    if mesh.is_main:
        shutil.copytree(config["trainer_args"]["output_dir"], run_dir)
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
        (run_dir / "checkpoints" / "latest").write_text("step-00000002\n")
    mesh.barrier()


def _copies(corpus: Path, folder: Path, sp: int) -> dict[str, Any]:
    """Four ranks, each data rank with a copy of one row about a picture."""
    ranks = 4 // sp
    rows = folder / f"copies-{ranks}.jsonl"
    write_rows(rows, [make_row("the one", 4)] * ranks)
    return make_config(
        corpus, folder / f"sp-{sp}", data__datasets=[{"path": str(rows)}], data__num_logical_shards=ranks,
        trainer__gradient_accumulation_steps=1, trainer__max_steps=1, trainer__sp_ulysses_degree=sp,
    )  # fmt: skip


def _gradients(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Trains one step; the whole gradients before it is clipped."""
    runner = TrainRunner(Job.from_dict(config)).build()
    found: dict[str, torch.Tensor] = {}
    model = runner.objective.model
    runner.backend.optimizer.register_step_pre_hook(lambda *_: found.update(toy.gradients(model)))
    runner.run()
    return found


def _on_four_ranks(mesh, pairs, wide, copies):
    seen = _watched(pairs)
    _back_to_step_2(mesh, pairs, Path(wide["trainer_args"]["output_dir"]))
    train(None, wide)
    return seen, [_gradients(config) for config in copies]


@pytest.fixture(scope="module")
def four_ranks(corpus, tmp_path_factory):
    """Two data ranks of two ranks each; then the same run goes on as one data rank of four, in replicas."""
    folder = tmp_path_factory.mktemp("four")
    fsdp = {"activation_checkpointing": True, "hsdp_shard_size": 2}
    pairs = _config(corpus, folder / "pairs", accumulate=1, sp_ulysses_degree=2)
    wide = _config(corpus, folder / "wide", accumulate=2, sp_ulysses_degree=4, fsdp_config=fsdp)
    (folder / "images").symlink_to(corpus / "images")
    copies = [_copies(corpus, folder, sp) for sp in SHARED_BY]
    return folder, pairs, run_ranks(_on_four_ranks, 4, pairs, wide, copies, timeout=300)


def _same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for key in ("step", "tokens", "supervised_tokens", "samples", "skipped"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-4)


def test_shared_sequences_train_as_one_process_does_and_go_on_in_any_split(
    four_ranks, corpus, mesh, tmp_path
):
    folder, pairs, _ = four_ranks
    train(mesh, _config(corpus, tmp_path / "one", accumulate=2))
    _back_to_step_2(mesh, pairs, tmp_path / "alone")
    train(mesh, _config(corpus, tmp_path / "alone", accumulate=2))
    for run_dir in (folder / "pairs", folder / "wide", tmp_path / "alone"):
        _same_numbers(logged(run_dir), logged(tmp_path / "one"))
        ours, theirs = logged(run_dir, "eval")[-1], logged(tmp_path / "one", "eval")[-1]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert [ours[key] for key in ("tokens", "samples")] == [theirs[key] for key in ("tokens", "samples")]


def test_ranks_of_a_sequence_read_the_same_rows_and_data_ranks_different_ones(four_ranks):
    folder, pairs, _ = four_ranks
    logs = [row_ids(folder / "pairs", rank) for rank in range(4)]
    assert logs[0] == logs[1] != logs[2] == logs[3]
    last = max(row["step"] for row in logged(folder / "pairs") if row["epoch"] <= 1)
    passed = [name for rank in (0, 2) for step, _, names in logs[rank] if step <= last for name in names]
    assert sorted(passed) == sorted(f"train-{i}" for i in range(14))   # each row once, on one data rank
    pairs["trainer_args"]["dataloader_num_workers"] = 1   # a worker process, which knows nothing of the split
    for rank in (0, 2):
        steps = batches(Job.from_dict(pairs), rank // 2, 2, STEPS)
        shown = [record for step, micros in steps for record in batch_records(step, micros)]
        assert shown == read_lines(folder / "pairs" / f"rows-{rank}.jsonl")


def test_random_numbers_agree_inside_a_sequence_and_differ_between_data_ranks(four_ranks):
    seen = [rank for rank, _ in four_ranks[2]]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    for column in range(2):
        seeds = [{entry[column] for entry in seen[rank]} for rank in (0, 2)]
        assert all(len(each) >= STEPS for each in seeds)   # and no two steps draw alike
        assert not seeds[0] & seeds[1]


def test_one_row_is_one_number_whether_copied_or_shared(four_ranks):
    """Four copies on four data ranks, two on two pairs, one on all four: nothing is divided by the ranks."""
    folder, _, ranks = four_ranks
    rows = [logged(folder / f"sp-{sp}")[0] for sp in SHARED_BY]
    assert [row["samples"] for row in rows] == [4, 2, 1]
    assert len({row["supervised_tokens"] / row["samples"] for row in rows}) == 1
    for row in rows[1:]:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-5)
    for _, gradients in ranks:
        for shared in gradients[1:]:
            toy.assert_same_gradients(shared, gradients[0])
