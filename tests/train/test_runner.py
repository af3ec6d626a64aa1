"""Whole runs of a tiny model in this process: what they leave, how they end, how they go on."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.errors import Terminated, UserError
from lmms_engine.train import TrainRunner, checkpoint
from lmms_engine.train.metrics import KEYS, StepClock, read_lines
from lmms_engine.train.runner import Window
from lmms_engine.train.tracker import TRACKERS
from tests.runs import logged, make_config, make_row, row_ids, train, write_rows

pytestmark = pytest.mark.xdist_group("runner")  # one worker: the module's runs are made once
TIMES = ("step_s", "data_s", "tokens_per_s", "peak_gb")
SEEN: list[tuple[str, int]] = []


def _without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def _config(corpus: Path, run_dir: Path, **changes) -> dict:
    heldout = [{"path": str(corpus / "heldout.jsonl")}]
    settings = {"trainer__save_steps": 3, "trainer__save_total_limit": 3, "trainer__eval_steps": 3,
                "trainer__logging_steps": 4, "data__eval_datasets": heldout}  # fmt: skip
    return make_config(corpus, run_dir, **{**settings, **changes})


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Six steps without interruption: two epochs, with a checkpoint and a validation in the middle."""
    from lmms_engine.parallel.mesh import build_mesh, leave_mesh

    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    train(build_mesh(), _config(corpus, run_dir))
    leave_mesh()
    return run_dir


@pytest.fixture
def killed(straight, tmp_path):
    """The same run as `kill -9` after step 5 leaves it: the last checkpoint is that of step 3."""
    run_dir = tmp_path / "killed"
    shutil.copytree(straight, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000006")
    (run_dir / "checkpoints" / "latest").write_text("step-00000003\n")
    (run_dir / "report.html").unlink()
    for name in ("metrics.jsonl", "rows-0.jsonl"):
        kept = [
            line for line in (run_dir / name).read_text().splitlines(True) if json.loads(line)["step"] <= 5
        ]
        (run_dir / name).write_text("".join(kept) + '{"step": 6, "spl')  # and a line that was cut short
    return run_dir


def test_a_run_leaves_what_the_specification_says(straight, corpus):
    rows = logged(straight)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]  # every step, though logged every four
    assert [row["step"] for row in logged(straight, "eval")] == [3, 6]
    for row in read_lines(straight / "metrics.jsonl"):
        assert tuple(row) == KEYS
    assert rows[-1]["lr"]["decay"] == 0.0  # the schedule's final value
    assert rows[-1]["epoch"] == 2.0
    assert logged(straight, "eval")[-1]["samples"] == 5
    per_epoch = [row["id"] for line in read_lines(straight / "rows-0.jsonl") for row in line["rows"]]
    assert sorted(per_epoch[:14]) == sorted(per_epoch[14:]) == sorted(f"train-{i}" for i in range(14))
    assert sum(row["samples"] for row in rows) == 28
    assert sum(row["supervised_tokens"] for row in rows) == sum(
        row["supervised"] for line in read_lines(straight / "rows-0.jsonl") for row in line["rows"]
    )
    assert (straight / "checkpoints" / "latest").read_text().strip() == "step-00000006"
    assert Job.from_dict(_config(corpus, straight)).to_yaml() == (straight / "config.yaml").read_text()
    manifest = json.loads((straight / "manifest.json").read_text())
    assert manifest["data_fingerprint"]
    assert manifest["processor_fingerprint"]
    page = (straight / "report.html").read_text()
    assert "<mark>" in page
    assert 'src="data:image/jpeg;base64,' in page
    assert not (straight / "skipped.jsonl").exists()


def test_killed_and_resumed_equals_uninterrupted(straight, killed, corpus, mesh, said):
    with said.at_level(logging.INFO):
        train(mesh, _config(corpus, killed, trainer__dataloader_num_workers=1))
    assert "resumed from step 3" in said.text
    assert _without_times(read_lines(killed / "metrics.jsonl")) == _without_times(
        read_lines(straight / "metrics.jsonl")
    )
    assert row_ids(killed) == row_ids(straight)
    discarded = read_lines(killed / "metrics.jsonl.discarded")
    assert [(row["step"], row["split"]) for row in discarded] == [(4, "train"), (5, "train")]
    assert {line["step"] for line in read_lines(killed / "rows-0.jsonl.discarded")} == {4, 5}
    weights = [
        dict(checkpoint.model_only_state(run / "checkpoints" / "step-00000006")) for run in (straight, killed)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    assert json.loads((killed / "manifest.json").read_text())["resumed_from"] == 3


def test_a_finished_run_says_so_and_more_steps_go_on(straight, corpus, mesh, tmp_path, said):
    run_dir = tmp_path / "again"
    shutil.copytree(straight, run_dir)
    before = (run_dir / "metrics.jsonl").read_text()
    with said.at_level(logging.INFO):
        train(mesh, _config(corpus, run_dir))
    assert "finished at step 6" in said.text
    assert (run_dir / "metrics.jsonl").read_text() == before
    train(mesh, _config(corpus, run_dir, trainer__max_steps=7))
    assert (run_dir / "metrics.jsonl").read_text().startswith(before)
    assert [row["step"] for row in logged(run_dir)] == [1, 2, 3, 4, 5, 6, 7]
    assert (run_dir / "checkpoints" / "step-00000007").is_dir()


def test_a_fresh_start_moves_the_old_run_aside_once_all_is_built(straight, corpus, mesh, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    wrong = _config(corpus, run_dir, data__datasets=[{"path": str(tmp_path / "none.jsonl")}])
    with pytest.raises(UserError, match=r"none\.jsonl"):
        TrainRunner(wrong, mesh, fresh=True).build()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run_dir / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    runner = TrainRunner(_config(corpus, run_dir, trainer__seed=7), mesh, fresh=True).build()
    assert runner.step == 0
    (old,) = tmp_path.glob("run.*")
    assert (old / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert not (run_dir / "metrics.jsonl").exists()


def test_other_data_are_refused_before_a_model_is_built(corpus, mesh, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    config = make_config(data, tmp_path / "run", trainer__max_steps=1)
    train(mesh, config)
    write_rows(data / "train.jsonl", [make_row(f"train-{i}", i) for i in range(15)])
    config["trainer_args"]["max_steps"] = 2
    runner = TrainRunner(Job.from_dict(config), mesh)
    with pytest.raises(UserError, match=r"train\.jsonl.*14.*15"):
        runner.build()
    assert not hasattr(runner, "objective")


def test_shorter_windows_at_the_end_of_an_epoch_count_in_full(corpus, mesh, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    write_rows(data / "train.jsonl", [make_row(f"train-{i}", i) for i in range(10)])
    config = make_config(
        data, tmp_path / "run", trainer__num_train_epochs=3, trainer__gradient_accumulation_steps=4,
        data__packing=False, trainer__save_steps=9, trainer__warmup_steps=3,
    )  # fmt: skip
    runner = train(mesh, config)
    rows = logged(tmp_path / "run")
    assert [row["samples"] for row in rows] == [4, 4, 2] * 3
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["epoch"] for row in rows] == pytest.approx(
        [n / 10 for n in (4, 8, 10, 14, 18, 20, 24, 28, 30)]
    )
    rates = [row["lr"]["decay"] for row in rows]
    assert rates[-1] == 0.0
    assert rates == sorted(rates[:3]) + sorted(rates[3:], reverse=True)
    for epoch in range(3):
        ids = [i for step, _, row in row_ids(tmp_path / "run") for i in row if (step - 1) // 3 == epoch]
        assert sorted(ids) == sorted(f"train-{i}" for i in range(10))
    assert len(checkpoint.complete(tmp_path / "run")) == 1  # due at step 9 and last: written once
    assert runner.start.finished is False
    assert TrainRunner(Job.from_dict(config), mesh).build().start.finished


def test_a_shorter_window_weighs_as_much_as_one_of_its_own(corpus, mesh, tmp_path):
    """The last two of ten rows: the rest of a window of four, or a whole window of two. Weights stay put."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    write_rows(data / "train.jsonl", [make_row(f"train-{i}", i) for i in range(10)])
    last = []
    for window in (4, 2):
        run_dir = tmp_path / f"windows-of-{window}"
        train(mesh, make_config(
            data, run_dir, trainer__num_train_epochs=1, trainer__gradient_accumulation_steps=window,
            data__packing=False, trainer__learning_rate=1e-12,
        ))  # fmt: skip
        step = logged(run_dir)[-1]
        last.append([step[key] for key in ("samples", "supervised_tokens", "loss", "grad_norm")])
    assert last[0][0] == 2
    assert last[0] == pytest.approx(last[1], rel=1e-6)


def test_a_step_without_targets_changes_nothing_and_says_so(corpus, mesh, tmp_path, said):
    config = make_config(
        corpus, tmp_path / "run", trainer__weight_decay=0.5, trainer__lr_scheduler_type="constant"
    )
    runner = TrainRunner(Job.from_dict(config), mesh).build()
    with runner._trackers(), runner._progress_bar():
        runner._train(runner._next_window(), StepClock(mesh.device))  # moments that would move the weights
        before = {name: p.detach().to_local().clone() for name, p in runner.objective.named_parameters()}
        empty = [runner.loader.empty(), runner.loader.empty()]
        with said.at_level(logging.WARNING):
            runner._train(Window([], empty, 0.0, False), StepClock(mesh.device))
    for name, parameter in runner.objective.named_parameters():
        assert torch.equal(before[name], parameter.detach().to_local()), name
    row = logged(tmp_path / "run")[-1]
    assert (row["step"], row["loss"], row["grad_norm"], row["supervised_tokens"]) == (2, 0.0, 0.0, 0)
    assert "step 2: 0 supervised tokens" in said.text


def test_rows_of_questions_alone_are_counted_and_teach_nothing(corpus, mesh, tmp_path, said):
    """Beside others in a step, and as a whole one, which moves nothing."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    rows = [make_row(f"train-{i}", i) for i in range(6)]
    for i in (1, 2, 3):   # the first has a picture
        del rows[i]["messages"][1]
    write_rows(data / "train.jsonl", rows)
    changes = {"data__packing": False, "data__shuffle": False, "data__num_logical_shards": 1}
    changes |= {"trainer__weight_decay": 0.5, "trainer__lr_scheduler_type": "constant"}
    config = make_config(data, tmp_path / "run", trainer__max_steps=3, **changes)
    runner = TrainRunner(Job.from_dict(config), mesh).build()

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().to_local().clone() for name, p in runner.objective.named_parameters()}

    moved = []
    with runner._trackers(), runner._progress_bar(), said.at_level(logging.WARNING):
        for _ in range(3):
            before = weights()
            runner._train(runner._next_window(), StepClock(mesh.device))
            moved.append(any(not torch.equal(before[name], tensor) for name, tensor in weights().items()))
    steps = logged(tmp_path / "run")
    assert moved == [True, False, True]
    assert [step["samples"] for step in steps] == [2, 2, 2]
    assert [step["supervised_tokens"] > 0 for step in steps] == [True, False, True]
    assert [step["loss"] > 0 for step in steps] == [True, False, True]
    assert (steps[1]["loss"], steps[1]["grad_norm"]) == (0.0, 0.0)
    assert "step 2: 0 supervised tokens" in said.text
    assert said.text.count("0 supervised tokens") == 1


def test_skipped_rows_are_named_with_their_step(corpus, mesh, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    rows = [make_row(f"train-{i}", i) for i in range(8)]
    rows[4]["messages"][0]["content"].insert(
        0, {"type": "image_url", "image_url": {"url": "images/absent.png"}}
    )
    write_rows(data / "train.jsonl", rows)
    shutil.copy(data / "train.jsonl", data / "heldout.jsonl")
    entries = [{"path": str(data / "heldout.jsonl")}]
    changes = {"data__on_bad_row": "skip", "data__eval_datasets": entries}
    train(mesh, make_config(data, tmp_path / "run", trainer__max_steps=2, **changes))
    skipped, held_out = read_lines(tmp_path / "run" / "skipped.jsonl")
    assert (held_out["step"], held_out["id"]) == (2, "train-4")
    assert held_out["source"].endswith("heldout.jsonl")
    assert logged(tmp_path / "run", "eval")[0]["skipped"] == 1
    assert (skipped["id"], skipped["row"], skipped["shard"]) == ("train-4", 4, 0)
    assert "absent.png" in skipped["reason"]
    assert skipped["kind"]
    assert sum(row["skipped"] for row in logged(tmp_path / "run")) == 1
    assert logged(tmp_path / "run")[skipped["step"] - 1]["skipped"] == 1


def test_a_pass_without_a_usable_row_stops_the_run(corpus, mesh, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    long = make_row("train-0", 0)
    long["messages"][1]["content"] = "word " * 200
    write_rows(data / "train.jsonl", [long, long])
    with pytest.raises(UserError, match=r"no usable row \(overlong 2\); see"):
        train(mesh, make_config(data, tmp_path / "run"))
    assert [row["kind"] for row in read_lines(tmp_path / "run" / "skipped.jsonl")] == ["overlong"] * 2


class _Stopped(TrainRunner):
    """Gets SIGTERM in step 2; keeps who lived when it saved."""

    def build(self) -> TrainRunner:
        self.others = set(multiprocessing.active_children())   # of tests before
        return super().build()

    def _next_window(self) -> Window:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._next_window()

    def _save(self) -> None:
        self.children = set(multiprocessing.active_children()) - self.others
        super()._save()


def test_sigterm_ends_the_data_workers_before_it_saves(corpus, mesh, tmp_path):
    config = make_config(corpus, tmp_path / "run", trainer__dataloader_num_workers=1)
    runner = _Stopped(Job.from_dict(config), mesh).build()
    with pytest.raises(Terminated):
        runner.run()
    assert runner.children == set()
    assert checkpoint.latest(tmp_path / "run").name == "step-00000002"
    train(mesh, config)   # and the place in the data is that of step 2
    ids = [i for _, _, row in row_ids(tmp_path / "run") for i in row]
    assert sorted(ids[:14]) == sorted(f"train-{i}" for i in range(14))


@TRACKERS.register("test_broken")
class _Broken:
    def start(self, run) -> None:
        raise ConnectionError("no network")


@TRACKERS.register("test_listening")
class _Listening:
    def start(self, run) -> None:
        SEEN.append(("start", run.start_step))

    def log(self, values, step) -> None:
        if "train/loss" in values:
            SEEN.append(("train", step))

    def finish(self) -> None:
        SEEN.append(("finish", 0))


def test_trackers_follow_and_broken_ones_do_not_matter(corpus, mesh, tmp_path, said):
    SEEN.clear()
    for max_steps in (2, 3):
        config = make_config(corpus, tmp_path / "run", trainer__max_steps=max_steps)
        job = Job.from_dict(config)
        named = job.trainer.model_copy(update={"report_to": ("test_broken", "test_listening")})
        runner = TrainRunner(job, mesh).build()
        runner.job = job.model_copy(update={"trainer": named})
        runner.run()
    assert SEEN == [
        ("start", 0),
        ("train", 1),
        ("train", 2),
        ("finish", 0),
        ("start", 2),
        ("train", 3),
        ("finish", 0),
    ]
    assert said.text.count("no network") == 2
    assert len(logged(tmp_path / "run")) == 3
