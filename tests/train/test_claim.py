"""One process at a time writes to a run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train import TrainRunner
from lmms_engine.train.claim import CLAIM_FILE, Claim
from tests.runs import make_config

HOLD = """
import sys
from pathlib import Path
from lmms_engine.train.claim import Claim
claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read(1)
if sys.argv[2] == "close":
    claim.close()
"""


def test_a_run_is_refused_before_anything_is_built(tmp_path: Path, mesh: Mesh) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "close"]
    job = Job.from_dict(make_config(tmp_path / "no-such-corpus", tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        for fresh in (False, True):
            with pytest.raises(UserError, match=f"process {holder.pid} on .* is training in it"):
                TrainRunner(job, mesh, fresh=fresh).build()
        holder.stdin.close()
    with pytest.raises(UserError, match="no-such-corpus"):
        TrainRunner(job, mesh).build()
    assert not (tmp_path / CLAIM_FILE).exists()


@pytest.mark.parametrize("end", ["close", "die"])
def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"{tmp_path}: process {holder.pid} on .* is training in it"):
            Claim(tmp_path)
        assert f"process {holder.pid} " in (tmp_path / CLAIM_FILE).read_text()   # a refused one leaves it
        if end == "die":
            holder.kill()
        holder.stdin.close()
    assert (tmp_path / CLAIM_FILE).exists() == (end == "die")
    claim = Claim(tmp_path)
    claim.close()
    claim.close()
    assert not list(tmp_path.iterdir())
