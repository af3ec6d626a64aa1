"""What training tests share: a process group of one."""

from __future__ import annotations

import logging

import pytest

from lmms_engine.parallel.mesh import build_mesh, leave_mesh


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    yield build_mesh()
    leave_mesh()


@pytest.fixture
def said(caplog, monkeypatch):
    """What the engine logs, also after a command in this process has set its logging up."""
    logger = logging.getLogger("lmms_engine")
    monkeypatch.setattr(logger, "propagate", True)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(before)
