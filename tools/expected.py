"""Run a recipe's smoke preset on the CPU and record its losses, or compare a run with the record.

python tools/expected.py qwen3_vl             # trains afresh, writes recipes/qwen3_vl/expected.json
python tools/expected.py qwen3_vl --check     # compares runs/qwen3_vl-smoke with it
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

REPO = Path(__file__).resolve().parents[1]
STEPS = (1, 2, 5, 20)  # and the last
FIRST_STEPS = 5  # up to here losses agree to rtol_first; rounding grows with every update
RTOL_FIRST, RTOL_LAST = 1e-4, 0.05


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, without a line that is still being written."""
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def train_losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Step -> training loss."""
    return {row["step"]: row["loss"] for row in rows if row["split"] == "train"}


def lock_sha256(repo: Path = REPO) -> str:
    """Hash of the lock that the environment is made of."""
    return hashlib.sha256((repo / "requirements.lock").read_bytes()).hexdigest()


def record(run: Path) -> dict[str, Any]:
    """The content of expected.json for a finished smoke run in one process."""
    rows = read_rows(run)
    losses = train_losses(rows)
    last = max(losses)
    wanted = [step for step in STEPS if step < last]
    evals = [row["loss"] for row in rows if row["split"] == "eval"]
    return {
        "preset": "smoke",
        "num_processes": 1,
        "seed": yaml.safe_load((run / "config.yaml").read_text())["trainer_args"]["seed"],
        "steps": {str(step): losses[step] for step in [*wanted, last]},
        "eval_loss": evals[-1] if evals else None,   # a recipe may have no held-out rows
        "rtol_first": RTOL_FIRST,
        "rtol_last": RTOL_LAST,
        "lock_sha256": lock_sha256(),
        "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def differences(expected: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What in a run's rows disagrees with the record; steps that the run has not reached are not compared."""
    found = []
    losses = train_losses(rows)
    for name, loss in expected["steps"].items():
        step = int(name)
        rtol = expected["rtol_first"] if step <= FIRST_STEPS else expected["rtol_last"]
        if step in losses and not math.isclose(losses[step], loss, rel_tol=rtol):
            found.append(f"step {step}: loss {losses[step]:.7f}, expected {loss:.7f} (rtol {rtol:g})")
    evals = [row["loss"] for row in rows if row["split"] == "eval"]
    finished = max(losses, default=0) >= max(map(int, expected["steps"]))
    if finished and evals and expected["eval_loss"] is not None:
        if not math.isclose(evals[-1], expected["eval_loss"], rel_tol=expected["rtol_last"]):
            found.append(f"eval: loss {evals[-1]:.7f}, expected {expected['eval_loss']:.7f}")
    elif finished and bool(evals) != (expected["eval_loss"] is not None):
        found.append(f"eval: {'a' if evals else 'no'} loss, {'none' if evals else 'one'} is recorded")
    return found


def main(
    recipe: Annotated[str, typer.Argument(help="Name of the recipe's folder.")],
    check: Annotated[
        bool, typer.Option("--check", help="Compare the last smoke run; train nothing.")
    ] = False,
) -> None:
    """Record, or check, the losses of a recipe's smoke preset."""
    folder, run = REPO / "recipes" / recipe, REPO / "runs" / f"{recipe}-smoke"
    if check:
        if not (folder / "expected.json").is_file():
            remedy = f"record it with make expected RECIPE={recipe}"
            sys.exit(f"recipes/{recipe} has no expected.json yet: {remedy}")
        if not (run / "metrics.jsonl").is_file():
            sys.exit(f"there is no {run.relative_to(REPO)} yet: make train RECIPE={recipe} PRESET=smoke")
        found = differences(json.loads((folder / "expected.json").read_text()), read_rows(run))
        print("\n".join(found) or f"{run.relative_to(REPO)} agrees with recipes/{recipe}/expected.json")
        raise typer.Exit(bool(found))
    env = {**os.environ, "PRESET": "smoke", "NGPU": "1", "FRESH": "1", "CUDA_VISIBLE_DEVICES": ""}
    status = subprocess.run([folder / "launch.sh"], env=env, check=False).returncode
    if status:
        sys.exit(status)
    (folder / "expected.json").write_text(json.dumps(record(run), indent=2) + "\n")
    print(f"wrote recipes/{recipe}/expected.json")


if __name__ == "__main__":
    typer.run(main)
