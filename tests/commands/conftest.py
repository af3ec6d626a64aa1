"""What the tests of commands share: one data folder, and a process group of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmms_engine.parallel.mesh import build_mesh, leave_mesh
from tests.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Rows with text and pictures, held-out ones, a processor folder. Read only."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    yield build_mesh()
    leave_mesh()
