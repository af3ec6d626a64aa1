import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lmms_engine.errors import UserError
from lmms_engine.train import checkpoint
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.seed import derive
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def start(mesh, *, fill=True, seed=0, **trainer):
    trainer = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.4, "weight_decay": 0.1, **trainer}
    job = toy.job(max_steps=6, **trainer)
    objective = toy.build(mesh, job, dropout=0.1, fill=fill, seed=seed)
    return objective, FSDP2Backend(objective, job, mesh)


def train(mesh, objective, backend, steps):
    """What the runner does per step; returns (loss, gradient norm, rates) of each."""
    objective.train()
    rows = []
    for step in steps:
        torch.manual_seed(derive(7, "step", mesh.dp_rank, step))
        backend.set_progress(step / 6, step)
        micros = [toy.batch([5, 4], pictures=2 * (step % 2), seed=derive(1, step, mesh.dp_rank) % 1000)]
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        rows.append((float(stats.sums["ce"]), float(stats.grad_norm), backend.lrs()))
    return rows


def everything(objective, backend):
    state = {f"model.{name}": weight for name, weight in toy.weights(objective.model).items()}
    moments = backend.state()["optimizer"].state_dict()
    return {**state, **{name: toy.whole(tensor) for name, tensor in moments.items()}}


def straight_and_resumed(mesh, folder):
    objective, backend = start(mesh)
    rows = train(mesh, objective, backend, range(1, 4))
    checkpoint.save(folder, 3, backend.state(), mesh, {"loader": {"row": 12}, "seed": 7})
    rows += train(mesh, objective, backend, range(4, 7))
    again, backend_again = start(mesh, fill=False)
    state = checkpoint.load(checkpoint.latest(folder), backend_again.state(), mesh)
    resumed = train(mesh, again, backend_again, range(4, 7))
    same = all(
        torch.equal(value, want)
        for value, want in zip(
            everything(again, backend_again).values(), everything(objective, backend).values(), strict=True
        )
    )
    return rows, resumed, state, same


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path):
    first, second = run_ranks(straight_and_resumed, 2, tmp_path)
    for rows, resumed, state, same in (first, second):
        assert resumed == rows[3:]
        assert same
        assert state == {"loader": {"row": 12}, "seed": 7, "step": 3, "written": 1}
    assert first[0][0][0] != second[0][0][0]           # the ranks see other data and other dropout
    assert len({row[1] for row in first[0]}) == 6      # and no two steps are alike


def save_at_2(mesh, folder):
    objective, backend = start(mesh)
    train(mesh, objective, backend, [1, 2])
    checkpoint.save(folder, 2, backend.state(), mesh, {})
    return everything(objective, backend)


def load_it(mesh, folder):
    objective, backend = start(mesh, fill=False)
    checkpoint.load(checkpoint.latest(folder), backend.state(), mesh)
    return everything(objective, backend)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_a_checkpoint_of_two_ranks_loads_on_one(mesh, tmp_path):
    saved, _ = run_ranks(save_at_2, 2, tmp_path)
    assert_equal(load_it(mesh, tmp_path), saved)
    assert all(value == 2 for name, value in saved.items() if name.endswith(".step"))
    assert all(moment.abs().max() > 0 for name, moment in saved.items() if name.endswith("up.weight.exp_avg"))


def test_a_checkpoint_of_one_rank_loads_on_two(mesh, tmp_path):
    saved = save_at_2(mesh, tmp_path)
    for loaded in run_ranks(load_it, 2, tmp_path):
        assert_equal(loaded, saved)


def test_the_whole_model_is_read_without_a_process_group(mesh, tmp_path):
    saved = save_at_2(mesh, tmp_path)
    code = (
        "import sys, torch, pathlib; from lmms_engine.train.checkpoint import latest, model_only_state;"
        "torch.save(dict(model_only_state(latest(pathlib.Path(sys.argv[1])))), sys.argv[2])"
    )
    out = tmp_path / "whole.pt"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(out)], check=True, cwd=ROOT)
    whole = torch.load(out)
    assert list(whole) == [name for name, _ in toy.reference().named_parameters()]   # a tied head once
    for name, tensor in whole.items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name


def test_moments_are_loaded_though_gradients_are_present(mesh, tmp_path):
    saved = save_at_2(mesh, tmp_path)
    objective, backend = start(mesh)
    backend.backward(objective(toy.batch([5], pictures=1, seed=0))["ce"])
    checkpoint.load(checkpoint.latest(tmp_path), backend.state(), mesh)
    assert_equal(everything(objective, backend), saved)
    assert all(p.grad is None for p in objective.model.parameters())


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [((), ("visual",), "holds, beyond what this run needs,"), (("visual",), (), "lacks")],
)
def test_another_set_of_frozen_parts_is_refused(mesh, tmp_path, before, after, problem):
    _, backend = start(mesh, freeze_modules=list(before))
    checkpoint.save(tmp_path, 1, backend.state(), mesh, {})
    _, other = start(mesh, freeze_modules=list(after))
    with pytest.raises(UserError, match=rf"{problem} \d+ tensors: optimizer\.model\.visual.*freeze_modules"):
        checkpoint.load(checkpoint.latest(tmp_path), other.state(), mesh)


def test_a_damaged_checkpoint_is_one_clear_error(mesh, tmp_path):
    _, backend = start(mesh)
    folder = checkpoint.save(tmp_path, 1, backend.state(), mesh, {})
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load(folder, backend.state(), mesh)
    with pytest.raises(UserError, match="cannot be read"):
        list(checkpoint.model_only_state(folder))   # what export reads
    shard.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load(folder, backend.state(), mesh)
    index = folder / checkpoint.DCP_INDEX
    for rest in (b"", index.read_bytes()[:200], b"\xff" * 200):
        index.write_bytes(rest)
        with pytest.raises(UserError, match=r"cannot be read.*Move it aside"):
            checkpoint.load(folder, backend.state(), mesh)
        with pytest.raises(UserError, match="cannot be read"):
            list(checkpoint.model_only_state(folder))


# ---- what is kept, and what is resumed ---------------------------------------------------------------


class Part:
    """One small tensor."""

    def __init__(self, value=0.0, numel=4):
        self.tensor = torch.full((numel,), float(value))

    def state_dict(self):
        return {"weight": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["weight"]


def write(run_dir, mesh, step, **options):
    return checkpoint.save(run_dir, step, {"model": Part(step)}, mesh, {}, **options)


def steps(run_dir):
    return sorted(int(folder.name[5:]) for folder in checkpoint.complete(run_dir))


def value(folder):
    return next(iter(checkpoint.model_only_state(folder)))[1][0].item()


def test_the_newest_are_kept(mesh, tmp_path):
    for step in range(1, 7):
        write(tmp_path, mesh, step, keep=2)
        assert steps(tmp_path) == ([1] if step == 1 else [step - 1, step])
    assert checkpoint.latest(tmp_path).name == "step-00000006"
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == [
        "latest", "step-00000005", "step-00000006",
    ]   # fmt: skip


def test_keeping_one_keeps_the_newest(mesh, tmp_path):
    for step in (1, 2):
        write(tmp_path, mesh, step, keep=1)
    assert steps(tmp_path) == [2]


def test_a_leftover_of_a_higher_step_blocks_no_slot_and_is_not_resumed(mesh, tmp_path):
    other = tmp_path / "other"
    write(other, mesh, 5000)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.folder_of(other, 5000).rename(checkpoint.folder_of(run, 5000))
    for step in (1, 2, 3):
        write(run, mesh, step, keep=2)
    assert checkpoint.latest(run) == checkpoint.folder_of(run, 3)
    assert steps(run) == [2, 3]   # the oldest written went first, whatever its number


def test_a_half_folder_is_neither_counted_nor_resumed_nor_deleted(mesh, tmp_path):
    half = checkpoint.folder_of(tmp_path, 5000)
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 3):
        write(tmp_path, mesh, step, keep=2)
    assert steps(tmp_path) == [2, 3]
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 3)
    assert half.is_dir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.load(half, {"model": Part()}, mesh)


def test_without_a_pointer_the_last_written_is_resumed(mesh, tmp_path):
    for step in (7, 3):
        write(tmp_path, mesh, step)
    (tmp_path / "checkpoints" / "latest").unlink()
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 3)
    (tmp_path / "checkpoints" / "latest").write_text("step-00000099\n")
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 3)


def test_one_step_is_saved_once(mesh, tmp_path):
    first = write(tmp_path, mesh, 10)
    stamp = (first / "state.json").stat().st_mtime_ns
    assert write(tmp_path, mesh, 10) == first
    assert (first / "state.json").stat().st_mtime_ns == stamp


def test_a_leftover_of_the_same_step_is_replaced(mesh, tmp_path):
    write(tmp_path, mesh, 1)
    checkpoint.save(tmp_path, 2, {"model": Part(-1)}, mesh, {})
    (tmp_path / "checkpoints" / "latest").write_text("step-00000001\n")   # as if killed before the pointer
    write(tmp_path, mesh, 2)
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 2)
    assert value(checkpoint.latest(tmp_path)) == 2


# ---- saves that fail ---------------------------------------------------------------------------------


def fill_the_disk(mesh, folder):
    """A file-size limit on rank 1 alone: the others must hear of it."""
    checkpoint.save(folder, 1, {"model": Part(1)}, mesh, {})
    big = {"model": toy.build(mesh, toy.job()).model}
    big = {"model": checkpoint.ModelState(big["model"])}
    if mesh.rank == mesh.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        checkpoint.save(folder, 2, big, mesh, {}, keep=1)
    except UserError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("limit", [1_000, 3_000, 30_000])
def test_a_write_cut_short_anywhere_speaks_of_the_disk(mesh, tmp_path, limit):
    """Torch's own file writer notices some cuts first, in words that say nothing of a disk."""
    big = {"model": checkpoint.ModelState(toy.build(mesh, toy.job()).model)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UserError, match=r"File too large|is the disk full\?") as caught:
            checkpoint.save(tmp_path, 1, big, mesh, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "inline_container" not in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_leaves_the_older_checkpoint(mesh, tmp_path, ranks):
    for message in run_ranks(fill_the_disk, ranks, tmp_path):
        assert "the checkpoint of step 2 could not be written" in message
        assert "File too large" in message
    assert steps(tmp_path) == [1]
    assert value(checkpoint.latest(tmp_path)) == 1
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]
    write(tmp_path, mesh, 3)   # and the next save works
    assert value(checkpoint.latest(tmp_path)) == 3


def test_a_folder_that_cannot_be_made_is_an_error(mesh, tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(UserError, match=r"step 1 could not be written.*(exists|directory)"):
        write(tmp_path, mesh, 1)


KILLED = """
import sys, torch
from pathlib import Path
from lmms_engine.parallel.mesh import build_mesh
from lmms_engine.train import checkpoint
class Part:
    def __init__(self, value, numel):
        self.tensor = torch.full((numel,), float(value))
    def state_dict(self):
        return {f"weight{i}": self.tensor for i in range(40)}
mesh, folder = build_mesh(), Path(sys.argv[1])
checkpoint.save(folder, 1, {"model": Part(1, 4)}, mesh, {})
print("saving", flush=True)
checkpoint.save(folder, 2, {"model": Part(2, 1 << 20)}, mesh, {}, keep=1)
print("saved", flush=True)
"""


def test_kill_9_during_a_save_loses_nothing(mesh, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "saving\n"
    partial = tmp_path / "checkpoints" / ".step-00000002.partial"
    deadline = time.monotonic() + 60
    while not (partial.is_dir() and any(f.stat().st_size > 1 << 20 for f in partial.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert "saved" not in process.communicate()[0]
    assert partial.is_dir()   # it was in the middle of it
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 1)
    assert value(checkpoint.latest(tmp_path)) == 1
    write(tmp_path, mesh, 3, keep=2)
    assert not partial.exists()   # cleared by the next save
    assert steps(tmp_path) == [1, 3]


def test_state_is_plain_json(mesh, tmp_path):
    extra = {"rng": {"seed": 1}, "loader": {"3": [1, 2]}}
    folder = checkpoint.save(tmp_path, 4, {"model": Part()}, mesh, extra)
    state = json.loads((folder / "state.json").read_text())
    assert state == {**extra, "step": 4, "written": 1}
    assert checkpoint.read_state(folder) == state
