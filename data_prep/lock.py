"""One call at a time writes to an output."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits until no other call on this machine writes to `out`; its folder is made.

    The lock file beside it goes with the last holder, unless that one is killed. Whoever waited for a file
    that has been deleted since asks again, for the one that others now see.
    """
    path = out.parent / f".{out.name}.lock"
    out.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_there(file.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
