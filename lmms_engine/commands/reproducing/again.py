"""Runs a run again, in a folder beside it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from lmms_engine.commands.reproducing.origin import Origin, on_gpu
from lmms_engine.errors import UserError
from lmms_engine.train.metrics import METRICS_FILE, read_lines
from lmms_engine.train.rundir import CONFIG_FILE

STOPPED = 143   # the exit code of a run that was told to stop, and saved


def folder_beside(run: Path) -> Path:
    """`<run>-again`, or with a number if that is taken."""
    names = itertools.chain(["again"], (f"again-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := Path(f"{run}-{name}")).exists())


def run_again(origin: Origin, folder: Path, last_step: int) -> None:
    """Trains as the run did, with as many processes and threads; stopped where it would go on for longer."""
    process = subprocess.Popen(command(origin, folder), env=environment(origin))
    stops = not origin.finished or last_step < origin.last_step
    try:
        if stops:
            _wait_for(process, folder, last_step)
            process.terminate()
        code = process.wait()
    except BaseException:   # Ctrl-C: the run does not outlive us
        process.terminate()
        process.wait()
        raise
    if code not in ((0, STOPPED) if stops else (0,)):
        raise UserError(f"{folder}: the run ended with code {code}; what it said is above")


def _wait_for(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    while process.poll() is None:
        rows = read_lines(folder / METRICS_FILE)
        if any(row["step"] >= step and row["split"] == "train" for row in rows):
            return
        time.sleep(0.5)


def command(origin: Origin, folder: Path) -> list[str]:
    """The training command."""
    ranks = origin.manifest["world_size"]
    module = ["-m", "lmms_engine.launch.cli"]
    if ranks > 1:
        options = ["--standalone", "--nproc-per-node", str(ranks), "--logs-specs", "lmms_engine"]
        options += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
        module = ["-m", "torch.distributed.run", *options, *module]
    return [
        sys.executable, *module,
        "--config", str(origin.folder / CONFIG_FILE), *origin.overrides,
        f"trainer_args.output_dir={folder}",
        "trainer_args.report_to=none",
        "trainer_args.save_total_limit=1",
        "trainer_args.logging_steps=1",   # so that it can be watched; these change no number
    ]  # fmt: skip


def environment(origin: Origin) -> dict[str, str]:
    """The environment of a rank's process: as many threads as then, and no GPU if there was none."""
    if on_gpu(origin.manifest) and torch.cuda.device_count() < origin.manifest["world_size"]:
        raise UserError(
            f"{origin.folder} ran on {origin.manifest['world_size']} GPUs and here are "
            f"{torch.cuda.device_count()}: run it again where there are enough, or on several nodes with "
            "launch.sh, and compare with `lmms-engine reproduce RUN --against OTHER`"
        )
    env = {**os.environ, "OMP_NUM_THREADS": str(origin.manifest["threads"])}
    if not on_gpu(origin.manifest):
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
