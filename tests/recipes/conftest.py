"""A small stand-in for a clone: the recipes copied, the code linked, data and runs of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.shipped import not_shipped

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `data` folder, shared by all test processes; the launchers fill it under their own lock."""
    root = tmp_path_factory.getbasetemp()
    data = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "recipe-data"
    data.mkdir(exist_ok=True)
    return data


def make_clone(repo: Path, folder: Path, data: Path) -> Path:
    """Something like a fresh clone in `folder`, with the given data."""
    for name in ("lmms_engine", "data_prep", "requirements.lock", "pyproject.toml"):
        (folder / name).symlink_to(repo / name)
    shutil.copytree(repo / "recipes", folder / "recipes", ignore=not_shipped)
    (folder / "data").symlink_to(data)
    return folder


@pytest.fixture
def clone(repo: Path, tmp_path: Path, sample_data: Path) -> Path:
    """Something like a fresh clone, whose data are shared with the other tests."""
    return make_clone(repo, tmp_path, sample_data)


Start = Callable[..., subprocess.Popen[str]]


def launcher(clone: Path) -> Start:
    """A function that starts a recipe's launcher in a clone, in a process group of its own."""

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


@pytest.fixture
def start(clone: Path) -> Start:
    """Starts a recipe's launcher in the clone."""
    return launcher(clone)


@dataclass(frozen=True)
class Trained:
    """A recipe's smoke preset, run to its end. said: what the launcher printed."""

    clone: Path
    run: Path
    start: Start
    said: str


@pytest.fixture(scope="session")
def trained(repo: Path, tmp_path_factory: pytest.TempPathFactory, sample_data: Path) -> Trained:
    """The whole smoke run of qwen3_vl. Its tests are one group, so that only one process makes it."""
    clone = make_clone(repo, tmp_path_factory.mktemp("trained"), sample_data)
    start = launcher(clone)
    process = start("qwen3_vl", "trainer_args.log_rows=true", PRESET="smoke")
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return Trained(clone, clone / "runs/qwen3_vl-smoke", start, said)


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, REPO / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def expected_tool() -> ModuleType:
    """tools/expected.py."""
    return load_tool("expected")


@pytest.fixture(scope="session")
def looked_tool() -> ModuleType:
    """tools/looked.py."""
    return load_tool("looked")
