"""A rank that fails or hangs leaves its step and rows behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lmms_engine.errors import Terminated
from lmms_engine.train import runner as runner_module
from lmms_engine.train.crash import CrashReport
from tests import toy
from tests.runs import make_config, make_corpus, train

MICROS = [toy.batch([3, 2], pictures=1, seed=1), toy.batch([4], pictures=0, seed=2)]


def test_an_error_names_step_rows_and_media(tmp_path: Path) -> None:
    def fail() -> None:
        with CrashReport(tmp_path, 3, 60) as report:
            report.note(6, [])
            report.note(7, MICROS)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    left = json.loads((tmp_path / "crash-rank3.json").read_text())
    assert (left["rank"], left["step"]) == (3, 7)
    assert "RuntimeError: planted" in left["error"]
    first, second = left["micro_batches"]
    assert first["rows"] == ["1-0", "1-1"]
    assert first["stand_ins"] == 0
    assert first["media"] == {"pixel_values": [1, 6]}
    assert second["rows"] == ["2-0"]
    assert second["lengths"] == [4, 1]
    assert second["stand_ins"] == 1


def test_an_error_is_not_lost_where_nothing_can_be_written(tmp_path: Path, said) -> None:
    with pytest.raises(RuntimeError, match="planted"), CrashReport(tmp_path / "gone", 3, 60):
        raise RuntimeError("planted")
    assert "crash-rank3.json could not be written: No such file" in said.text


def test_a_step_that_takes_too_long_is_written_down_while_it_lasts(tmp_path: Path) -> None:
    with CrashReport(tmp_path, 0, 0.1) as report:
        report.note(5, MICROS)
        deadline = time.monotonic() + 10
        while not report.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        left = json.loads(report.path.read_text())
    assert left["step"] == 5
    assert left["error"].startswith("no progress for ")
    assert "in test_a_step_that_takes_too_long" in left["error"]   # where the thread is


@pytest.mark.parametrize("end", [None, Terminated, KeyboardInterrupt])
def test_a_run_that_ends_or_is_stopped_leaves_nothing(tmp_path: Path, end) -> None:
    try:
        with CrashReport(tmp_path, 0, 60) as report:
            report.note(1, MICROS)
            if end is not None:
                raise end
    except (Terminated, KeyboardInterrupt):
        pass
    assert not list(tmp_path.iterdir())


def test_the_runner_tells_which_rows_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(runner_module, "train_step", fail)
    config = make_config(make_corpus(tmp_path / "data"), tmp_path / "run")
    with toy.single_mesh() as mesh, pytest.raises(RuntimeError, match="planted"):
        train(mesh, config)
    left = json.loads((tmp_path / "run" / "crash-rank0.json").read_text())
    assert left["step"] == 1
    assert len(left["micro_batches"]) == 2
    assert all(row.startswith("train-") for batch in left["micro_batches"] for row in batch["rows"])
