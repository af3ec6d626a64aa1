"""Parts of `scaling.py` that start real runs: a rank is killed and the run resumed; `lmms-engine verify`.

Both take the smoke preset of the recipe qwen3_vl, started as a user starts it.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECIPE = Path("recipes/qwen3_vl")
ALONE_S = 60     # within which all processes must have ended after one was killed
KEPT = ("case", "ranks", "status", "loss_difference", "norm_difference", "gradient_difference", "reason")
START_S = 600    # until the steps before that must be done


def kill(ranks: int, folder: Path, *, steps: int, packing_length: int) -> dict[str, Any]:
    """SIGKILL for the last rank of a running launch.sh; then the same run on half the ranks, to its end."""
    run_dir = folder / f"kill-{ranks}"
    settings = [
        f"trainer_args.output_dir={run_dir}", f"trainer_args.max_steps={steps}", "trainer_args.save_steps=2",
        "trainer_args.logging_steps=1", "trainer_args.eval_steps=null", "trainer_args.report_to=none",
        "dataset_config.eval_datasets=[]", f"dataset_config.packing_length={packing_length}",
    ]  # fmt: skip
    killed = kill_one(launch(ranks, folder / "killed.log", settings), ranks, run_dir, folder / "killed.log")
    row = {"ranks": ranks, **killed, "resumed_on": ranks // 2}
    if not killed["ended_in_time"]:
        return row | {"ok": False}
    again = [*settings, "trainer_args.gradient_accumulation_steps=2"]   # the global batch stays the same
    code = launch(ranks // 2, folder / "resumed.log", again).wait()
    said = re.search(r"resumed from step (\d+)", (folder / "resumed.log").read_text())
    losses = [line["loss"] for line in metrics(run_dir)]
    row |= {
        "resumed_from": int(said[1]) if said else None, "resume_code": code, "steps": len(losses),
        "finite": all(loss is not None and math.isfinite(loss) for loss in losses),
    }  # fmt: skip
    reported = row["crash_reports"] == list(range(ranks - 1))
    finished = code == 0 and said is not None and len(losses) == steps and row["finite"]
    return row | {"ok": reported and finished}


def launch(ranks: int, log: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    """launch.sh on so many ranks, its output in `log`."""
    env = {
        **os.environ, "PRESET": "smoke", "NGPU": str(ranks),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    with log.open("wb") as file:
        return subprocess.Popen(
            [str(ROOT / RECIPE / "launch.sh"), *settings],
            stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env,
        )  # fmt: skip


def kill_one(launcher: subprocess.Popen[bytes], ranks: int, run_dir: Path, log: Path) -> dict[str, Any]:
    """Waits for three steps, kills the last rank, and sees how the others end."""
    deadline = time.monotonic() + START_S
    while len(metrics(run_dir)) < 3:
        if launcher.poll() is not None or time.monotonic() > deadline:
            end_all(launcher)
            raise RuntimeError(f"the run to be killed did not get to step 3; its output ends:\n{tail(log)}")
        time.sleep(0.02)
    everyone = psutil.Process(launcher.pid).children(recursive=True)
    of_rank = {rank_of(process): process for process in psutil.Process(launcher.pid).children()}
    victim = of_rank[ranks - 1]
    step = len(metrics(run_dir))
    began = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    try:
        code = launcher.wait(timeout=ALONE_S)   # torchrun waits for its ranks
    except subprocess.TimeoutExpired:
        code = None
    ranks_ended = time.monotonic() - began
    # loader workers outlive their rank for a while
    _, left = psutil.wait_procs(everyone, timeout=max(1.0, ALONE_S - ranks_ended))
    if code is None:
        left.append(psutil.Process(launcher.pid))
    seconds = time.monotonic() - began
    end(left)
    reports = sorted(int(re.sub(r"\D", "", path.stem)) for path in run_dir.glob("crash-rank*.json"))
    return {
        "killed": ranks - 1, "at_step": step, "ranks_ended_s": ranks_ended, "all_ended_s": seconds,
        "ended_in_time": not left, "code": code, "crash_reports": reports, "said": last_line(log),
    }  # fmt: skip


def rank_of(process: psutil.Process) -> int:
    """The rank that torchrun gave the process; -1 for a process of another kind."""
    return int(process.environ().get("RANK", -1))


def end_all(launcher: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and, as it can no longer do so, its ranks and their loader workers."""
    if launcher.poll() is None:
        end([*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)])
        launcher.wait()


def end(processes: list[psutil.Process]) -> None:
    """Ends what should have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The training rows of a run so far; a line that is just being written is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0].splitlines()
    return [row for row in map(json.loads, whole) if row["split"] == "train"]


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def last_line(log: Path) -> str:
    """The last line that says something."""
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")


def verify(folder: Path, only: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(rows, what was not run) of `lmms-engine verify` on the smoke model."""
    subprocess.run([sys.executable, str(RECIPE / "prepare.py"), "--if-missing"], cwd=ROOT, check=True)
    words = [
        "--config", str(RECIPE / "config.yaml"), "--config", str(RECIPE / "smoke.yaml"),
        "--out", str(folder / "verify"), *(word for case in only for word in ("--only", case)),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "lmms_engine", "verify", *words], cwd=ROOT, check=False)
    certificate = folder / "verify" / "verify.json"
    if not certificate.exists():
        raise RuntimeError(f"lmms-engine verify ended with {done.returncode} and wrote no certificate")
    return split_certificate(json.loads(certificate.read_text(encoding="utf-8")))


def split_certificate(certificate: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(rows of the cases that ran, what was not run and why)."""
    rows, left_out = [], []
    for result in certificate["results"]:
        if result["status"] == "not run":
            left_out.append({"what": f"verify: {result['case']}", "reason": result["reason"]})
            continue
        rows.append({key: result[key] for key in KEPT} | {"ok": result["status"] == "ok"})
    return rows, left_out
