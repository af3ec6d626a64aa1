"""What training tests share: one data folder, and a process group of one."""

from __future__ import annotations

import logging
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


@pytest.fixture
def said(caplog, monkeypatch):
    """What the engine logs, also after a command in this process has set its logging up."""
    logger = logging.getLogger("lmms_engine")
    monkeypatch.setattr(logger, "propagate", True)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(before)
