"""What the rules look at: the files of the repository, tracked or about to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.shipped import is_own


@pytest.fixture(scope="session")
def files(repo: Path) -> list[Path]:
    """Every file that git tracks or would add, relative to the root; none of a user's own recipe."""
    command = ["git", "-C", str(repo), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = [Path(name) for name in listed.stdout.split("\0") if name]
    return [path for path in found if (repo / path).is_file() and not is_own(path)]
