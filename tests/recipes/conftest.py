"""A small stand-in for a clone: the recipes copied, the code linked, data and runs of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `data` folder, shared by all test processes; the launchers fill it under their own lock."""
    root = tmp_path_factory.getbasetemp()
    data = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "recipe-data"
    data.mkdir(exist_ok=True)
    return data


@pytest.fixture
def clone(repo: Path, tmp_path: Path, sample_data: Path) -> Path:
    """Something like a fresh clone, whose data are shared with the other tests."""
    for name in ("lmms_engine", "data_prep", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).symlink_to(repo / name)
    shutil.copytree(repo / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").symlink_to(sample_data)
    return tmp_path


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(clone: Path) -> Start:
    """Starts a recipe's launcher in the clone, in a process group of its own."""

    def started(recipe: str, *overrides: str, **env: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        fixed = {"PATH": path, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        dropped = ("PRESET", "NGPU", "FRESH", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        return subprocess.Popen(
            [clone / "recipes" / recipe / "launch.sh", *overrides],
            env={**inherited, **fixed, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return started
