"""What the rules look at: the files of the repository, tracked or about to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(repo: Path) -> list[Path]:
    """Every file that git tracks or would add, relative to the root."""
    command = ["git", "-C", str(repo), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (repo / (path := Path(name))).is_file()]
