"""Whether a run goes on, has finished, or is another run: by its saved config and checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.train import rundir


def _job(**trainer) -> Job:
    return Job.from_dict(
        {
            "model_config": {"load_from_pretrained_path": "/models/a"},
            "dataset_config": {"datasets": [{"path": "/data/a.jsonl"}], "packing_length": 512},
            "trainer_args": {"max_steps": 10, "report_to": "none", **trainer},
        }
    )


def _leave(run_dir: Path, job: Job, **state) -> None:
    """A run folder as a run with `job` leaves it."""
    folder = run_dir / "checkpoints" / f"step-{state['step']:08d}"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    state = {"epoch": 0.5, "dp_size": 2, "loader": {}, "written": 1, **state}
    (folder / "state.json").write_text(json.dumps(state))
    (run_dir / "config.yaml").write_text(job.to_yaml())


def test_a_new_folder_starts_at_the_beginning(tmp_path):
    start = rundir.prepare(_job(), tmp_path / "runs" / "new", 2)
    assert (start.step, start.checkpoint, start.finished) == (0, None, False)


@pytest.mark.parametrize(("max_steps", "finished"), [(10, True), (11, False), (5, True)])
def test_max_steps_may_grow(tmp_path, max_steps, finished):
    _leave(tmp_path, _job(), step=10)
    start = rundir.prepare(_job(max_steps=max_steps), tmp_path, 2)
    assert (start.step, start.finished) == (10, finished)
    assert start.checkpoint.name == "step-00000010"


def test_fewer_steps_of_an_unfinished_run_are_another_schedule(tmp_path):
    _leave(tmp_path, _job(), step=4)
    assert rundir.prepare(_job(), tmp_path, 2).step == 4
    with pytest.raises(UserError, match=r"trainer_args.max_steps: 10 there, 8 now"):
        rundir.prepare(_job(max_steps=8), tmp_path, 2)


def test_epochs_count_by_what_was_read(tmp_path):
    _leave(tmp_path, _job(max_steps=None, num_train_epochs=2.0), step=7, epoch=2.0)
    assert rundir.prepare(_job(max_steps=None, num_train_epochs=2.0), tmp_path, 2).finished
    assert not rundir.prepare(_job(max_steps=None, num_train_epochs=3.0), tmp_path, 2).finished


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 7}, "trainer_args.seed: 42 there, 7 now"),
        ({"learning_rate": 1e-4}, "trainer_args.learning_rate: 1e-05 there, 0.0001 now"),
        ({"freeze_modules": ["visual"]}, "trainer_args.freeze_modules"),
        ({"lr_scheduler_kwargs": {"min_lr_ratio": 0.1}}, "trainer_args.lr_scheduler_kwargs"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, named):
    _leave(tmp_path, _job(), step=4)
    with pytest.raises(UserError) as caught:
        rundir.prepare(_job(**change), tmp_path, 2)
    assert named in str(caught.value)
    assert "FRESH=1" in str(caught.value)


def test_a_run_can_be_moved_aside_twice_in_a_second(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rundir.move_aside(run)   # nothing in it: it stays
    for number in range(2):
        (run / f"file-{number}").touch()
        rundir.move_aside(run)
    aside = sorted(path.name for folder in tmp_path.glob("run.*") for path in folder.iterdir())
    assert aside == ["file-0", "file-1"]
    assert not any(run.iterdir())


def test_all_differences_are_named_at_once(tmp_path):
    _leave(tmp_path, _job(), step=4)
    other = _job(seed=1).to_dict()
    other["model_config"]["load_from_pretrained_path"] = "/models/b"
    other["dataset_config"]["datasets"][0]["path"] = "/data/b.jsonl"
    with pytest.raises(UserError) as caught:
        rundir.prepare(Job.from_dict(other), tmp_path, 2)
    for key in ("model_config.load_from_pretrained_path", "dataset_config.datasets", "trainer_args.seed"):
        assert key in str(caught.value)


def test_layout_and_logging_may_change(tmp_path):
    _leave(tmp_path, _job(), step=4)
    job = _job(
        save_steps=7, logging_steps=3, save_total_limit=9, dataloader_num_workers=0, log_rows=True,
        ddp_timeout=60,
        report_to="tensorboard", run_name="x", fsdp_config={"reshard_after_forward": False},
    )  # fmt: skip
    assert rundir.prepare(job, tmp_path, 2).step == 4


def test_accumulation_may_change_with_the_ranks_but_not_the_global_batch(tmp_path):
    _leave(tmp_path, _job(gradient_accumulation_steps=2), step=4)  # on 2 ranks
    assert rundir.prepare(_job(gradient_accumulation_steps=4), tmp_path, 1).notes == ()
    assert "global batch" in rundir.prepare(_job(gradient_accumulation_steps=2), tmp_path, 1).notes[0]
    with pytest.raises(UserError, match="gradient_accumulation_steps: 2 there, 4 now"):
        rundir.prepare(_job(gradient_accumulation_steps=4), tmp_path, 2)


def test_checkpoints_of_unknown_origin_are_refused(tmp_path):
    _leave(tmp_path, _job(), step=4)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserError, match="cannot tell whose they are"):
        rundir.prepare(_job(), tmp_path, 2)


def test_a_run_that_saved_nothing_may_begin_anew_with_other_settings(tmp_path):
    (tmp_path / "config.yaml").write_text(_job().to_yaml())
    assert rundir.prepare(_job(seed=9), tmp_path, 2).checkpoint is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(UserError, match=r"trainer_args.output_dir=.*file/run: cannot be written"):
        rundir.prepare(_job(), blocked / "run", 1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_folder_of_another_user_is_named(open_folder):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o755)
    pid = os.fork()
    if pid == 0:  # a child under another uid, since root may write everywhere
        os.setuid(65534)
        try:
            rundir.require_writable(closed / "run")
        except UserError as error:
            os._exit(0 if "Permission denied" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_rank_0_finds_reaches_every_rank():
    sent = []
    main = SimpleNamespace(is_main=True, broadcast=lambda value: sent.append(value) or value)
    other = SimpleNamespace(is_main=False, broadcast=lambda value: sent[-1])

    def fails():
        raise UserError("bad news")

    for mesh in (main, other):
        with pytest.raises(UserError, match="bad news"):
            rundir.on_main(mesh, fails)
    assert rundir.on_main(main, lambda: 7) == 7
    assert rundir.on_main(other, fails) == 7  # there the work is not done


@pytest.mark.parametrize("text", ["", "5\n", "[]\n", "model_config: {}\n", "\udcff"])
def test_a_damaged_configuration_is_named(tmp_path, text):
    _leave(tmp_path, _job(), step=4)
    (tmp_path / "config.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"config\.yaml(: is not UTF-8| is damaged \(it has no .*put a copy)"):
        rundir.prepare(_job(), tmp_path, 2)


def test_a_batch_that_the_saved_configuration_lacks_is_a_difference(tmp_path):
    _leave(tmp_path, _job(), step=4)
    lines = (tmp_path / "config.yaml").read_text().splitlines(keepends=True)
    key = "gradient_accumulation_steps"
    (tmp_path / "config.yaml").write_text("".join(line for line in lines if key not in line))
    with pytest.raises(UserError, match=f"trainer_args.{key}: null there, 1 now"):
        rundir.prepare(_job(), tmp_path, 2)


@pytest.mark.parametrize("name", [b"step-00000004", b"\x9f\xff", b"../../x"])
def test_an_incomplete_checkpoint_is_not_passed_over_in_silence(tmp_path, name):
    _leave(tmp_path, _job(), step=4)
    (tmp_path / "checkpoints" / "latest").write_bytes(name)
    folder = tmp_path / "checkpoints" / "step-00000004"
    if name.startswith(b"step"):
        (folder / "state.json").rename(tmp_path / "kept")
        _leave(tmp_path, _job(), step=2)
    start = rundir.prepare(_job(), tmp_path, 2)
    assert [note.endswith(f"which is not complete; {start.checkpoint.name} is the newest")
            for note in start.notes] == [True]
    for state in (tmp_path / "checkpoints").glob("step-*/state.json"):
        state.write_text("5")
    with pytest.raises(UserError, match="not complete, and no other checkpoint is; put its files back"):
        rundir.prepare(_job(), tmp_path, 2)
    assert rundir.prepare(_job(), tmp_path, 2, fresh=True).step == 0


@pytest.mark.parametrize("gone", ["step", "epoch", "dp_size", "loader"])
@pytest.mark.parametrize("value", [None, "x"])
def test_a_state_that_lacks_what_a_run_goes_on_from_is_damaged(tmp_path, gone, value):
    _leave(tmp_path, _job(), step=4)
    file = tmp_path / "checkpoints/step-00000004/state.json"
    state = {key: kept for key, kept in json.loads(file.read_text()).items() if key != gone}
    file.write_text(json.dumps(state if value is None else {**state, gone: value}))
    said = rf"step-00000004 cannot be read: state\.json has no usable {gone}\. Move it aside"
    with pytest.raises(UserError, match=said):
        rundir.prepare(_job(), tmp_path, 2)


def test_an_order_of_writing_that_is_no_number_is_no_checkpoint(tmp_path):
    _leave(tmp_path, _job(), step=4)
    _leave(tmp_path, _job(), step=2, written="x")
    assert rundir.prepare(_job(), tmp_path, 2).step == 4


def test_a_pointer_that_is_a_folder_is_named(tmp_path):
    _leave(tmp_path, _job(), step=4)
    (tmp_path / "checkpoints/latest").mkdir()
    with pytest.raises(UserError, match="checkpoints/latest is a folder, and should be a file with the name"):
        rundir.prepare(_job(), tmp_path, 2)
    assert rundir.prepare(_job(), tmp_path, 2, fresh=True).step == 0
    (tmp_path / "checkpoints/latest").rmdir()
    assert rundir.prepare(_job(), tmp_path, 2).step == 4
