"""Trackers are guests: whatever they do, a run goes on, and quickly."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from lmms_engine.train import tracker as trackers
from lmms_engine.train.tracker import TRACKERS, RunInfo, Trackers, TrackerThread, flatten, run_id

CALLS: list[tuple[str, object]] = []
RELEASE = threading.Event()


@TRACKERS.register("test_raises_at_start")
class _RaisesAtStart:
    def start(self, run: RunInfo) -> None:
        raise ConnectionError("no route to host")

    def log(self, values, step) -> None:
        CALLS.append(("log", step))

    def finish(self) -> None:
        CALLS.append(("finish", None))


@TRACKERS.register("test_raises_at_step_3")
class _RaisesAtStep3(_RaisesAtStart):
    def start(self, run: RunInfo) -> None:
        CALLS.append(("start", run.start_step))

    def log(self, values, step) -> None:
        if step == 3:
            raise RuntimeError("quota")
        super().log(values, step)


@TRACKERS.register("test_hangs_at_start")
class _HangsAtStart(_RaisesAtStart):
    def start(self, run: RunInfo) -> None:
        RELEASE.wait(30)


@TRACKERS.register("test_exits")
class _Exits(_RaisesAtStart):
    def start(self, run: RunInfo) -> None:
        raise SystemExit(1)


@pytest.fixture
def run(tmp_path: Path):
    CALLS.clear()
    RELEASE.clear()
    yield RunInfo(tmp_path, "a-run", 0, {"trainer_args": {"seed": 1}})
    RELEASE.set()


def _row(step: int, loss: float = 1.0) -> dict:
    return {"step": step, "split": "train", "loss": loss, "lr": {"decay": 0.5}, "mfu": None}


def _wait(thread: TrackerThread) -> None:
    thread._thread.join(5)
    assert not thread._thread.is_alive()


@pytest.mark.parametrize("name", ["test_raises_at_start", "test_exits"])
def test_a_failing_start_is_one_warning(run, caplog, name):
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread(name, run)
        _wait(thread)
        for step in range(1, 5):
            thread.log({"loss": 1.0}, step)
        thread.finish()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert name in caplog.text
    assert not CALLS


def test_a_failing_log_call_ends_the_tracker_not_the_run(run, caplog):
    with caplog.at_level(logging.WARNING):
        both = Trackers(["test_raises_at_step_3", "none"], run)
        for step in range(1, 6):
            both.log(_row(step))
        both.finish()
    assert CALLS == [("start", 0), ("log", 1), ("log", 2)]
    assert caplog.text.count("quota") == 1


def test_a_hanging_tracker_costs_the_run_at_most_its_limit(run, caplog):
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread("test_hangs_at_start", run, finish_s=0.2)
        for step in range(1, 100):
            thread.log({"loss": 1.0}, step)
        assert time.monotonic() - began < 0.2
        thread.finish()
    assert time.monotonic() - began < 2
    assert "did not finish within 0.2 s" in caplog.text


def test_a_tracker_too_far_behind_is_dropped(run, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "QUEUE_ROWS", 5)
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread("test_hangs_at_start", run, finish_s=0.1)
        for step in range(20):
            thread.log({}, step)
    assert thread.failed
    assert caplog.text.count("rows behind") == 1


def test_flatten_keeps_numbers_only():
    row = {"step": 3, "split": "train", "mfu": None, "lr": {"decay": 0.5, "plain": 0.25}, "ok": True}
    assert flatten(row) == {"step": 3, "lr/decay": 0.5, "lr/plain": 0.25}


def test_wandb_offline_writes_into_the_run_folder(run, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    first = run_id(run.run_dir)
    thread = TrackerThread("wandb", run, finish_s=60)
    thread.log({"train/loss": 2.5}, 1)
    thread.log({"train/loss": 2.0}, 2)
    thread.finish()
    assert not thread.failed
    (data,) = run.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert first in data.name
    assert data.stat().st_size > 0
    assert run_id(run.run_dir) == first


def test_tensorboard_axis_goes_on_after_a_resume(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, range(1, 5)), (2, range(3, 7))):  # steps 3 and 4 were logged, but not saved
        thread = TrackerThread("tensorboard", RunInfo(run.run_dir, "a-run", start, {}), finish_s=30)
        for step in steps:
            thread.log({"train/loss": float(step + 10 * start)}, step)
        thread.finish()
        assert not thread.failed
    events = EventAccumulator(str(run.run_dir / "tensorboard")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25), (6, 26)]
