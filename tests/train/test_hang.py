"""Two ranks under torchrun, one of which stops giving batches: both end soon, and the files tell which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, make_config

pytestmark = pytest.mark.timeout(240)

TIMEOUT_S = 8   # of the collectives
LIMIT_S = 60     # in which all ranks have to end
ROWS = 200
PLUGIN = f"""
import os, time
from lmms_engine.datasets import BaseDataset, register_dataset

@register_dataset("stumbling")
class Stumbling(BaseDataset):
    def __init__(self, config):
        self.given = 0
    def __len__(self):
        return {ROWS}
    def __getitem__(self, index):
        self.given += 1
        if os.environ["RANK"] == "1" and self.given > 60:
            {{fault}}
        words = "one two three four five six seven eight nine ten " * 2
        return {{{{"id": f"r{{{{index}}}}", "messages": [
            {{{{"role": "user", "content": "say"}}}}, {{{{"role": "assistant", "content": words}}}}]}}}}
"""


def run(corpus: Path, folder: Path, fault: str) -> tuple[int, str, float, list[dict[str, Any]]]:
    """(exit code, output, seconds from the fault to the end, what each rank left)."""
    plugin = folder / "stumbling.py"
    plugin.write_text(PLUGIN.format(fault=f"open({str(folder / 'fault')!r}, 'w').close(); {fault}"))
    config = make_config(corpus, folder / "run", data__dataset_type="stumbling", data__datasets=[])
    config["trainer_args"] |= {"ddp_timeout": TIMEOUT_S, "max_steps": 50, "gradient_accumulation_steps": 1}
    (folder / "c.yaml").write_text(json.dumps({**config, "plugins": [str(plugin)]}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--logs-specs", "lmms_engine", "-m", "lmms_engine.launch.cli", "--config", folder / "c.yaml"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert (folder / "fault").exists(), done.stdout
    seconds = time.time() - (folder / "fault").stat().st_mtime
    left = [json.loads(path.read_text()) for path in sorted((folder / "run").glob("crash-rank*.json"))]
    return done.returncode, done.stdout, seconds, left


def test_a_rank_that_hangs_is_named_and_ends_with_the_others(corpus: Path, tmp_path: Path) -> None:
    code, output, seconds, left = run(corpus, tmp_path, "time.sleep(1000)")
    assert code == 1, output
    assert seconds < LIMIT_S
    waiting, hanging = left
    assert waiting["step"] == hanging["step"] > 1
    assert waiting["micro_batches"][0]["rows"]
    last = waiting["collectives"][-1]
    assert last["name"] == "gloo:all_reduce"        # how many micro-batches the ranks have
    assert not last["done"]
    assert hanging["error"].startswith("no progress for ")
    assert "time.sleep(1000)" in hanging["error"]   # the place in the user's own code
    assert hanging["collectives"][-1]["number"] == last["number"] - 1
    (message,) = [line for line in output.splitlines() if "error: " in line]
    assert message.startswith("error: another rank is gone or does not answer (")


def test_the_error_of_one_rank_ends_all_with_one_message(corpus: Path, tmp_path: Path) -> None:
    code, output, seconds, left = run(corpus, tmp_path, "raise RuntimeError('planted')")
    assert code == 1, output
    assert seconds < LIMIT_S
    (message,) = [line for line in output.splitlines() if "error: " in line or "warning" in line.lower()]
    assert message.startswith("[rank 1] error: ")
    assert "planted" in message
    assert left[-1]["rank"] == 1
    assert "planted" in left[-1]["error"]
