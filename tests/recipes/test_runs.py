"""Recipes train on a CPU through their own launchers, give the recorded losses, and can be copied."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.shipped import RECIPES

REPO = Path(__file__).resolve().parents[2]
OTHERS = [path.name for path in RECIPES if path.name != "qwen3_vl"]   # test_smoke.py has that one
QUICK = (
    "trainer_args.max_steps=3",
    "trainer_args.dataloader_num_workers=0",
    "dataset_config.eval_datasets=[]",
    "trainer_args.eval_steps=null",
)
Start = Callable[..., subprocess.Popen[str]]


def finish(process: subprocess.Popen[str]) -> str:
    """What a launcher printed, once it has ended well."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def steps(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # without one that is still being written
    rows = [json.loads(line) for line in lines]
    return [row["step"] for row in rows if row["split"] == "train"]


@pytest.mark.parametrize("recipe", OTHERS)
def test_first_steps_are_as_recorded(
    recipe: str, clone: Path, start: Start, expected_tool: ModuleType
) -> None:
    """The smoke preset as it is, stopped once the first recorded steps are there."""
    expected = json.loads((REPO / "recipes" / recipe / "expected.json").read_text())
    assert expected["lock_sha256"] == expected_tool.lock_sha256(), (
        f"record anew: make expected RECIPE={recipe}"
    )
    metrics = clone / "runs" / f"{recipe}-smoke/metrics.jsonl"
    process = start(recipe, "trainer_args.logging_steps=1", "trainer_args.eval_steps=null", PRESET="smoke")
    deadline = time.monotonic() + 240
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and max(steps(metrics.parent), default=0) >= expected_tool.FIRST_STEPS:
                break
            time.sleep(0.3)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output = process.communicate()[0]
    assert process.returncode == 143, output  # saved, then left
    rows = expected_tool.read_rows(metrics.parent)
    assert len(steps(metrics.parent)) >= expected_tool.FIRST_STEPS, output
    assert not expected_tool.differences(expected, rows)


@pytest.mark.timeout(900)
def test_a_copy_trains_its_own_run(clone: Path, start: Start) -> None:
    """A copy without an edit: trains a run of its own, and begins anew when asked."""
    shutil.copytree(clone / "recipes/qwen3_vl", clone / "recipes/mine")
    first = finish(start("mine", *QUICK))
    assert "preset smoke: " in first  # and why
    assert steps(clone / "runs/mine-smoke") == [1, 2, 3]
    assert not (clone / "runs/qwen3_vl-smoke").exists()
    finish(start("mine", *QUICK, FRESH="1"))
    assert steps(clone / "runs/mine-smoke") == [1, 2, 3]
    (old,) = (clone / "runs").glob("mine-smoke.*")
    assert steps(old) == [1, 2, 3]


@pytest.mark.parametrize(
    ("override", "env", "said"),
    [
        ("trainer_args.max_step=3", {"PRESET": "smoke"}, "trainer_args.max_step"),
        (
            "trainer_args.max_steps=3",
            {"PRESET": "full"},
            "PRESET=full cannot run: the real model needs GPU memory",
        ),
        (
            "trainer_args.max_steps=3",
            {"PRESET": "large"},
            "PRESET=large: unknown preset (legal: auto, smoke, full)",
        ),
        ("trainer_args.max_steps=3", {"NGPU": "two"}, "NGPU=two: "),
    ],
)
def test_refusals(clone: Path, start: Start, override: str, env: dict[str, str], said: str) -> None:
    """What cannot run stops with one line and without a traceback, before any process group is made."""
    process = start("qwen3_vl", override, **env)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said in output.splitlines()[-1]
    assert "Traceback" not in output
    assert not (clone / "runs").exists()


def rows_of(losses: dict[int, float], eval_loss: float | None = None) -> list[dict[str, Any]]:
    rows = [{"step": step, "split": "train", "loss": loss} for step, loss in losses.items()]
    return rows + (
        [{"step": max(losses), "split": "eval", "loss": eval_loss}] if eval_loss is not None else []
    )


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (rows_of({1: 6.0, 2: 5.0}), 0),
        (rows_of({1: 6.0 * (1 + 2e-4), 2: 5.0}), 1),
        (rows_of({1: 6.0, 2: 5.0, 30: 1.04}, 1.1), 0),
        (rows_of({1: 6.0, 2: 5.0, 30: 1.1}, 1.1), 1),
        (rows_of({1: 6.0, 2: 5.0, 30: 1.0}, 1.2), 1),
        (rows_of({1: float("nan")}), 1),
    ],
)
def test_the_comparison_sees(expected_tool: ModuleType, rows: list[dict[str, Any]], count: int) -> None:
    steps = {"1": 6.0, "2": 5.0, "30": 1.0}
    expected = {"steps": steps, "eval_loss": 1.1, "rtol_first": 1e-4, "rtol_last": 0.05}
    assert len(expected_tool.differences(expected, rows)) == count


def test_a_recipe_without_held_out_rows_can_be_recorded(expected_tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer_args: {seed: 3}\n")
    lines = [json.dumps(row) + "\n" for row in rows_of({1: 6.0, 2: 5.0})]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    recorded = expected_tool.record(tmp_path)
    assert (recorded["steps"], recorded["eval_loss"]) == ({"1": 6.0, "2": 5.0}, None)
    assert not expected_tool.differences(recorded, rows_of({1: 6.0, 2: 5.0}))
    assert len(expected_tool.differences(recorded, rows_of({1: 6.0, 2: 5.0}, 1.0))) == 1
    assert len(expected_tool.differences({**recorded, "eval_loss": 1.0}, rows_of({1: 6.0, 2: 5.0}))) == 1


def test_a_comparison_says_what_is_not_there_yet(clone: Path) -> None:
    """Of a copy without a record, and of one with a record and without a run."""
    (clone / "tools").mkdir()
    shutil.copy(REPO / "tools/expected.py", clone / "tools")
    shutil.copytree(clone / "recipes/qwen3_vl", clone / "recipes/mine")
    command = [sys.executable, "tools/expected.py", "mine", "--check"]
    for said in (
        "there is no runs/mine-smoke yet: make train RECIPE=mine PRESET=smoke\n",
        "recipes/mine has no expected.json yet: record it with make expected RECIPE=mine\n",
    ):
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, said)
        (clone / "recipes/mine/expected.json").unlink(missing_ok=True)
