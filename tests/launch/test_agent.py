"""torchrun with our agent: the ranks' exit codes come through, and SIGTERM leaves them their time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

AGENT = ("--logs-specs", "lmms_engine", "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT")
SAVES_ON_SIGTERM = r"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])   # like a loader's worker: not to be killed under the rank
def save(*_):
    time.sleep(1.0)
    state = "alive" if child.poll() is None else "dead"
    child.kill()
    os.write(1, f"saved {os.environ['RANK']}, child {state}\n".encode())
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\n")
time.sleep(60)
"""


def launch(folder: Path, script: str, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, *AGENT, str(folder / "rank.py"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_sigterm_lets_every_rank_save(tmp_path: Path) -> None:
    process = launch(tmp_path, SAVES_ON_SIGTERM, ranks=2)
    for _ in range(2):
        assert process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert sorted(output.splitlines()) == ["saved 0, child alive", "saved 1, child alive"]


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("print('error: the reason'); raise SystemExit(2)", 2, "error: the reason"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "error: rank 0 was killed by SIGKILL: out of host memory? "
            "A new start goes on from the last checkpoint",
        ),
        ("pass", 0, ""),
    ],
)
def test_exit_code_and_at_most_one_line(tmp_path: Path, script: str, code: int, said: str) -> None:
    process = launch(tmp_path, script)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert output.strip() == said


def test_debug_shows_all(tmp_path: Path) -> None:
    output, _ = launch(tmp_path, "raise SystemExit(2)", "--debug").communicate(timeout=60)
    assert "ChildFailedError" in output


def test_interrupt(tmp_path: Path) -> None:
    process = launch(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline().strip() == "ready"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "stopped by SIGINT"
