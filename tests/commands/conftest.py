"""What the tests of commands share: a process group of one."""

from __future__ import annotations

import pytest

from lmms_engine.parallel.mesh import build_mesh, leave_mesh


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    yield build_mesh()
    leave_mesh()
