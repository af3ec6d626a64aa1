"""Commands that stand in for an engine and a driver: what they answer is the input of the scripts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder for commands, first on PATH of `call`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def command(bin_folder: Path) -> Callable[[str, str], None]:
    """`command(name, body)`: a shell script on PATH under that name."""

    def write(name: str, body: str) -> None:
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)

    return write


@pytest.fixture
def call(bin_folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs words in a folder, with the stand-in commands first on PATH and little else in the environment."""

    def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
        path = f"{bin_folder}:{os.environ['PATH']}"
        return subprocess.run(
            words, cwd=cwd, env={**kept, "PATH": path, **env}, capture_output=True, text=True, check=False
        )

    return run
