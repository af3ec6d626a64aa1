"""One small sample data set for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_prep.sample import make_sample


@pytest.fixture(scope="session")
def sample(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A sample data set of 240 training rows; tests only read it."""
    return once("shapes", partial(make_sample, rows=240, seed=5))


@pytest.fixture(scope="session")
def rows(sample: Path) -> dict[str, list[dict[str, Any]]]:
    """File stem -> its rows, of all JSONL files."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(sample.glob("*.jsonl"))
    }
