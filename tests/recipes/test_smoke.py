"""A whole smoke run learns from the pictures, as recorded; and everything that comes after a run works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.train.metrics import read_lines

MIN_RIGHT, MIN_RATIO = 0.75, 2.0
INSPECTED = 60  # steps: over the end of the first pass

# One process runs all of these, as they share the trained run.
pytestmark = [pytest.mark.xdist_group("smoke"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def exported(trained: Any) -> Path:
    done = CliRunner().invoke(app, ["export", str(trained.run), "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    return trained.run / "export"


@pytest.fixture(scope="module")
def reader(exported: Path, looked_tool: ModuleType) -> Any:
    return looked_tool.Reader(exported)


def test_losses_are_as_recorded(trained: Any, repo: Path, expected_tool: ModuleType) -> None:
    expected = json.loads((repo / "recipes/qwen3_vl/expected.json").read_text())
    stale = "record anew: make expected RECIPE=qwen3_vl"
    assert expected["lock_sha256"] == expected_tool.lock_sha256(), stale
    rows = expected_tool.read_rows(trained.run)
    assert max(expected_tool.train_losses(rows)) == max(map(int, expected["steps"]))
    assert not expected_tool.differences(expected, rows)


def test_the_held_out_loss_falls(trained: Any) -> None:
    rows = read_lines(trained.run / "metrics.jsonl")
    first = next(row["loss"] for row in rows if row["split"] == "train")
    last = [row["loss"] for row in rows if row["split"] == "eval"][-1]
    assert last <= 0.6 * first


def test_it_looked(trained: Any, reader: Any, looked_tool: ModuleType) -> None:
    findings = looked_tool.look(reader, looked_tool.read_questions(trained.clone / "data/shapes"))
    assert findings["all"].rows >= 150
    assert findings["all"].answered >= 140
    assert not looked_tool.shortfalls(findings, MIN_RIGHT, MIN_RATIO), looked_tool.table(findings)


def test_a_blind_model_falls_short(
    trained: Any, reader: Any, looked_tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights, shown a grey picture every time: both thresholds notice."""
    from PIL import Image

    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    monkeypatch.setattr(looked_tool.Image, "open", lambda path: grey.copy())
    questions = looked_tool.read_questions(trained.clone / "data/shapes")
    some = [question for question in questions if question.kind == "colour"][:24]
    findings = looked_tool.look(reader, some)
    assert findings["all"].ratio == pytest.approx(1)
    assert len(looked_tool.shortfalls(findings, MIN_RIGHT, MIN_RATIO)) == 2


def test_swapped_pictures_belong_to_other_answers(trained: Any, looked_tool: ModuleType) -> None:
    questions = looked_tool.read_questions(trained.clone / "data/shapes")
    assert {question.kind for question in questions} == {"colour", "shape", "count", "position"}
    by_picture = {question.picture: question for question in questions}
    swapped = looked_tool.swapped_pictures(questions)
    assert sorted(swapped) == sorted(by_picture)
    for question, picture in zip(questions, swapped, strict=True):
        assert by_picture[picture].kind == question.kind
        assert by_picture[picture].answer != question.answer
    alike = [question for question in questions if question.answer == "red"]
    with pytest.raises(ValueError, match="more than half"):
        looked_tool.swapped_pictures(alike)


@pytest.mark.parametrize(
    ("right", "swapped", "count"),
    [(0.75, 2.0, 0), (0.74, 2.0, 1), (0.75, 1.99, 1), (0.1, 1.0, 2), (float("nan"), float("nan"), 2)],
)
def test_the_thresholds_see(looked_tool: ModuleType, right: float, swapped: float, count: int) -> None:
    found = looked_tool.Findings(rows=8, loss=1.0, loss_swapped=swapped, answered=8, right=right)
    assert len(looked_tool.shortfalls({"all": found}, MIN_RIGHT, MIN_RATIO)) == count


def test_inspect_shows_the_batches_that_were_trained_on(trained: Any, repo: Path) -> None:
    files = [f"--config=recipes/qwen3_vl/{name}.yaml" for name in ("config", "smoke")]
    command = [sys.executable, "-m", "lmms_engine", "inspect", *files, "--steps", str(INSPECTED), "--json"]
    env = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=trained.clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(shown) == INSPECTED
    assert shown == read_lines(trained.run / "rows-0.jsonl")[:INSPECTED]


def test_the_report_is_there_and_needs_nothing_else(trained: Any) -> None:
    page = (trained.run / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 4
    assert "<mark>" in page  # supervised text of a sample
    assert "data:image/" in page
    for reference in ('src="http', "href=", "<script", "<link", "@import"):
        assert reference not in page.replace('xlink:href="#', "")


def test_run_again_is_finished(trained: Any, expected_tool: ModuleType) -> None:
    before = (trained.run / "metrics.jsonl").read_bytes()
    last = max(expected_tool.train_losses(expected_tool.read_rows(trained.run)))
    process = trained.start("qwen3_vl", "trainer_args.log_rows=true", PRESET="smoke")
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert f"finished at step {last}: nothing to do" in said
    assert (trained.run / "metrics.jsonl").read_bytes() == before
