"""Fixtures for the whole suite, and the closing list of what was skipped and why."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Test processes share the cores. Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return REPO


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which those that pytest makes are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: the folder that `make(folder)` fills, made by one test process for all of them."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / name).exists():
                partial = tmp_path_factory.mktemp(name) / "made"
                make(partial)
                partial.rename(root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def corpus(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Rows with text and pictures, held-out ones, a processor folder. Read only."""
    from tests.runs import make_corpus

    return once("corpus", make_corpus)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, by marker, with the reason."""
    import shutil

    import torch

    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if shutil.which("c++") is None:
        missing["compiler"] = "needs a C++ compiler"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, by reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] if isinstance(report.longrepr, tuple) else "?" for report in skipped)
    terminalreporter.write_line(f"skipped: {len(skipped)}")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"  {count:4d}  {reason}")
