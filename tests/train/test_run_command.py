"""The training command as a process: stopped by SIGTERM, run again, and on a full disk."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from lmms_engine.train import checkpoint
from tests.runs import launch, logged, make_config

pytestmark = pytest.mark.timeout(240)


def _wait_for(process, text: str) -> str:
    """The output up to and with the first line that holds `text`."""
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}")


def test_sigterm_saves_after_the_step_and_exits_143(corpus, tmp_path):
    config = make_config(corpus, tmp_path / "run", trainer__max_steps=9999, trainer__dataloader_num_workers=1)
    process = launch(config, tmp_path)
    before = _wait_for(process, "step 2/")
    assert "global batch: 1 data ranks x 2 micro-batches x 1 packs of 96 tokens = 192 tokens" in before
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    saved = checkpoint.latest(tmp_path / "run")
    step = checkpoint.read_state(saved)["step"]
    assert f"saved step {step}" in output
    assert logged(tmp_path / "run")[-1]["step"] == step >= 2


def test_a_full_disk_is_one_message_and_keeps_what_was_there(corpus, tmp_path):
    run_dir = tmp_path / "run"
    limit = 300_000   # bytes of a file: logs fit, the weights do not
    process = launch(
        make_config(corpus, run_dir, trainer__max_steps=1),
        tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    assert "Traceback" not in output
    (message,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "checkpoint of step 1 could not be written" in message
    assert "File too large" in message
    assert checkpoint.latest(run_dir) is None
    assert [path.name for path in Path(run_dir, "checkpoints").iterdir()] == []
    assert len(logged(run_dir)) == 1   # the step's numbers are there
