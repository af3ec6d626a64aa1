"""One run on one process and on two, ranks with unlike amounts of data, SIGTERM to one rank alone."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lmms_engine.commands.inspect import batches
from lmms_engine.config import Job
from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import Terminated
from lmms_engine.kernels import loss_head
from lmms_engine.parallel.mesh import build_mesh
from lmms_engine.segments import RowRef
from lmms_engine.train import TrainRunner, checkpoint
from lmms_engine.train.evaluate import evaluate
from lmms_engine.train.metrics import batch_records, read_lines
from tests import toy
from tests.distributed import run_ranks
from tests.runs import MODEL, logged, make_config, make_row, row_ids, train, write_rows

pytestmark = pytest.mark.xdist_group("two ranks")  # one worker: the module's runs are made once
EQUAL = {"trainer__max_steps": 5, "trainer__save_steps": 2, "trainer__lr_scheduler_type": "constant",
         "trainer__seed": 1}  # fmt: skip
TARGETS = (9, 1, 4, 2)
WAYS = {
    "one batch": {"trainer__per_device_train_batch_size": 4, "trainer__gradient_accumulation_steps": 1},
    "four micro-batches": {"trainer__gradient_accumulation_steps": 4},
    "one pack": {
        "data__packing": True, "data__packing_length": 400, "data__num_logical_shards": 1,
        "trainer__gradient_accumulation_steps": 1,
    },
    "padded": {"trainer__use_rmpad": False, "trainer__gradient_accumulation_steps": 4},
}  # fmt: skip


def _files(corpus: Path, *names: str) -> list[dict]:
    return [{"path": str(corpus / f"{name}.jsonl")} for name in names]


def _config(corpus: Path, run_dir: Path, **changes) -> dict:
    heldout = _files(corpus, "heldout", "other")
    waits = {"trainer__ddp_timeout": 30}   # a rank that goes on alone fails the tests soon
    return make_config(corpus, run_dir, **{"data__eval_datasets": heldout, **waits, **changes})


def _equal(corpus: Path, run_dir: Path, **changes) -> dict:
    """Two sources. Shard r is rank r's: a step has a pack of each, as one rank with two micro-batches has."""
    return _config(corpus, run_dir, **EQUAL, data__datasets=_files(corpus, "train", "other"), **changes)


def _stop_when(run_dir: Path, steps: int) -> None:
    """Sends SIGTERM to this process once the run has logged so many steps."""
    deadline = time.monotonic() + 60
    while len(read_lines(run_dir / "metrics.jsonl")) < steps and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def _targets(folder: Path, run_dir: Path, **changes) -> dict:
    """One step over four rows with 9, 1, 4 and 2 targets."""
    data = [{"path": str(folder / "targets.jsonl")}]
    settings = {"data__packing": False, "data__shuffle": False, "trainer__max_steps": 1}
    return make_config(folder, run_dir, **{**settings, "data__datasets": data, **changes})


def _gradients(mesh, config: dict) -> dict[str, torch.Tensor]:
    """Trains one step; the whole gradients before it is clipped."""
    runner = TrainRunner(Job.from_dict(config), mesh).build()
    found: dict[str, torch.Tensor] = {}
    model = runner.objective.model
    runner.backend.optimizer.register_step_pre_hook(lambda *_: found.update(toy.gradients(model)))
    runner.run()
    return found


def _all_on_two_ranks(mesh, equal, unlike, targets, stopped):
    """(held-out loss before the first step, gradients of the rows with few targets, exit code, last step)"""
    mesh = build_mesh(Job.from_dict(equal).trainer)
    runner = TrainRunner(Job.from_dict(equal), mesh).build()
    before = evaluate(runner.objective, runner.eval_loaders, mesh, seed=0)
    runner.run()
    train(mesh, unlike)
    gradients = _gradients(mesh, targets)
    runner = TrainRunner(Job.from_dict(stopped), mesh).build()
    if mesh.rank == 1:
        threading.Thread(target=_stop_when, args=(runner.run_dir, 3), daemon=True).start()
    try:
        runner.run()
    except Terminated as stop:
        return before, gradients, stop.code, runner.step
    return before, gradients, 0, runner.step


@pytest.fixture(scope="module")
def two_ranks(corpus, tmp_path_factory):
    """Runs on two ranks: as on one rank; with unlike amounts of data; of four rows; stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("two")
    rows = [make_row(f"r{i}", i) for i in range(4)]
    for row, words in zip(rows, TARGETS, strict=True):
        row["messages"][1]["content"] = " ".join(["red"] * (words - 1))   # and the end of the turn
    write_rows(folder / "targets.jsonl", rows)
    for name in ("images", "processor"):
        (folder / name).symlink_to(corpus / name)
    configs = {
        "equal": _equal(corpus, folder / "equal", trainer__gradient_accumulation_steps=1),
        # rank 0 has two of the three shards
        "unlike": _config(
            corpus, folder / "unlike", trainer__num_train_epochs=2, trainer__gradient_accumulation_steps=1,
            data__num_logical_shards=3,
        ),
        "targets": _targets(folder, folder / "targets", trainer__gradient_accumulation_steps=2),
        "stopped": _config(corpus, folder / "stopped", trainer__max_steps=5000),
    }  # fmt: skip
    results = run_ranks(_all_on_two_ranks, 2, *configs.values(), timeout=200)
    return folder, configs, results


def test_two_ranks_train_as_one_does(two_ranks, corpus, mesh, tmp_path):
    folder, _, results = two_ranks
    config = _equal(corpus, tmp_path / "one")
    runner = TrainRunner(Job.from_dict(config), mesh).build()
    before = evaluate(runner.objective, runner.eval_loaders, mesh, seed=0)
    assert [result[0].loss for result in results] == pytest.approx([before.loss] * 2, rel=1e-6)
    assert results[0][0].samples == before.samples == 9
    runner.run()
    one, two = logged(tmp_path / "one"), logged(folder / "equal")
    for key in ("tokens", "supervised_tokens", "samples"):
        assert [row[key] for row in one] == [row[key] for row in two]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-4)
    held_out = [logged(run_dir, "eval")[-1]["loss"] for run_dir in (tmp_path / "one", folder / "equal")]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    by_source = [[{name: loss or 0.0 for name, loss in row["source_loss"].items()} for row in rows]
                 for rows in (one, two)]  # fmt: skip
    for ours, theirs in zip(*by_source, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def _plainly(self, hidden, labels, weights, **_: object) -> torch.Tensor:
    """A loss head as one would write it down."""
    logits = F.linear(hidden, self.weight, self.bias)
    return (F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()


@pytest.mark.parametrize("head", ["plain", "chunked"])
def test_nine_targets_count_nine_times_as_much_as_one_in_every_layout(
    two_ranks, mesh, tmp_path, monkeypatch, head
):
    folder, _, results = two_ranks
    if head == "plain":
        monkeypatch.setattr(loss_head.LossHead, "forward", _plainly)
    else:
        monkeypatch.setattr(loss_head, "CHUNK_LOGITS", 2 * MODEL["config"]["text_config"]["vocab_size"])
    found = {"two ranks": results[0][1], "the other": results[1][1]}
    rows = [logged(folder / "targets")[0]]
    for name, changes in WAYS.items():
        found[name] = _gradients(mesh, _targets(folder, tmp_path / name, **changes))
        rows += logged(tmp_path / name)
    assert [row["supervised_tokens"] for row in rows] == [sum(TARGETS)] * 5
    assert [row["samples"] for row in rows] == [4] * 5
    for row in rows:
        assert row["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-5)
    for gradients in found.values():
        toy.assert_same_gradients(gradients, found["one batch"])


def test_each_source_has_its_own_loss(two_ranks, corpus, mesh, tmp_path):
    folder, configs, _ = two_ranks
    runner = TrainRunner(Job.from_dict(configs["equal"]), mesh, tmp_path / "fresh").build()
    processor = runner.loader.processor
    rows = [row for rank in range(2) for line in read_lines(folder / "equal" / f"rows-{rank}.jsonl")
            if line["step"] == 1 for row in line["rows"]]  # fmt: skip
    sums, counts = Counter(), Counter()
    for row in rows:
        raw = read_lines(Path(row["source"]))[row["row"]]
        ref = RowRef(row["source"], row["shard"], row["row"], row["id"])
        batch = collate([processor(parse_row(raw, corpus), ref)], processor)
        with torch.no_grad():
            batch = runner.objective.draw(batch, torch.Generator())
            sums[row["source"]] += runner.objective(batch.to(mesh.device))["ce"].item()
        counts[row["source"]] += row["supervised"]
    assert len(sums) == 2
    first = logged(folder / "equal")[0]
    assert first["source_loss"] == pytest.approx({name: sums[name] / counts[name] for name in sums}, rel=1e-5)
    assert list(first["loss_terms"]) == ["ce"]
    assert logged(folder / "unlike")[0]["source_loss"] is None   # one source


def test_a_run_of_two_ranks_goes_on_with_one(two_ranks, corpus, mesh, tmp_path):
    folder, _, _ = two_ranks
    run_dir = tmp_path / "resumed"
    shutil.copytree(folder / "equal", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")  # as if it had been killed after step 4
    (run_dir / "checkpoints" / "latest").write_text("step-00000004\n")
    train(mesh, _equal(corpus, run_dir))
    whole, resumed = logged(folder / "equal"), logged(run_dir)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5]
    assert resumed[4]["tokens"] == whole[4]["tokens"]
    assert resumed[4]["loss"] == pytest.approx(whole[4]["loss"], rel=1e-5)


def test_ranks_with_unlike_amounts_end_together(two_ranks):
    folder, _, _ = two_ranks
    run_dir = folder / "unlike"
    logs = [row_ids(run_dir, rank) for rank in range(2)]
    assert len(logs[0]) > len(logs[1]) > 0
    ids = sorted(i for log in logs for _, _, row in log for i in row)
    assert ids == sorted(2 * [f"train-{i}" for i in range(14)])  # every row exactly once an epoch
    rows = logged(run_dir)
    assert rows[-1]["epoch"] == 2.0
    assert rows[-1]["lr"]["decay"] == 0.0
    assert sum(row["samples"] for row in rows) == 28
    assert max(step for log in logs for step, _, _ in log) == rows[-1]["step"] == len(rows)
    assert checkpoint.read_state(run_dir / "checkpoints" / f"step-{len(rows):08d}")["epoch"] == 2.0


@pytest.mark.parametrize("rank", [0, 1])
def test_inspect_shows_what_each_rank_trained_on(two_ranks, rank):
    folder, configs, _ = two_ranks
    job = Job.from_dict(configs["unlike"])
    shown = [record for step, micros in batches(job, rank, 2, 1000) for record in batch_records(step, micros)]
    assert shown == read_lines(folder / "unlike" / f"rows-{rank}.jsonl")


def test_sigterm_to_one_rank_stops_all_after_one_step_and_saves(two_ranks):
    folder, _, results = two_ranks
    assert [code for *_, code, _ in results] == [143, 143]
    step = results[0][-1]
    assert results[1][-1] == step >= 3
    assert checkpoint.latest(folder / "stopped").name == f"step-{step:08d}"
    assert [row["step"] for row in logged(folder / "stopped")] == list(range(1, step + 1))
