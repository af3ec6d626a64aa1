"""One small sample data set for all tests of this folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
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


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`killed(arguments, parts, count)`: runs the command in a process and kills it (`kill -9`) soon after
    the folder `parts` holds `count` finished files: at work on the next, or with that one written and not
    yet in its place. Gives how many it held in the end.

    Sets are cut into parts of 8 rows, so that small ones have several.
    """
    monkeypatch.setattr("data_prep.rows.CHUNK_ROWS", 8)

    def run(arguments: list[object], parts: Path, count: int) -> int:
        from data_prep.cli import app

        def done() -> int:
            return len(list(parts.rglob("part-*")))

        def work() -> None:
            put_in_place = Path.replace

            def replace(self: Path, target: Path) -> Path:
                if done() >= count:   # it does not run away from a slow killer
                    time.sleep(60)
                return put_in_place(self, target)

            Path.replace = replace   # in the process to be killed alone
            app([*map(str, arguments)])

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        deadline = time.monotonic() + 60
        while process.is_alive() and done() < count and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was done before it could be killed"
        return done()

    return run
