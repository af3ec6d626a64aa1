"""A cache of blocks of files that lie elsewhere, on this machine's disk, never larger than it may be.

One file a block, written under another name first: what can be read is whole. All processes of a machine
share the folder. When it is nearly full the blocks that were not used for longest go.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lmms_engine.errors import UserError

FULL, KEPT = 0.9, 0.8   # of its size, from where and down to which blocks are dropped
CHECKS = 128            # a process looks at the size of the folder after each such part of it that it writes
UNFINISHED_SECONDS = 3600   # after which a file that is not whole is of a process that died
DEFAULT_BYTES = 20 * 10**9


@dataclass(frozen=True)
class CacheSettings:
    """`dataset_config.remote_cache`. folder: None for the user's own cache folder."""

    folder: str | None = None
    size: int = DEFAULT_BYTES


class BlockCache:
    """See the module. One object in each process."""

    def __init__(self, settings: CacheSettings) -> None:
        default = Path.home() / ".cache" / "lmms_engine" / "remote"
        self.folder = Path(settings.folder).expanduser() if settings.folder else default
        self.size = settings.size
        self._unchecked = self.size   # bytes written since the last look; at once after the first

    def get(self, key: str, number: int, length: int) -> bytes | None:
        """A block, if it is here and whole."""
        path = self._path(key, number)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:   # not here, or dropped by another process this moment
            return None
        return data if len(data) == length else None

    def put(self, key: str, number: int, data: bytes) -> None:
        """Keeps a block."""
        path = self._path(key, number)
        # In two containers processes may have one number.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(data)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise UserError(
                f"the cache of remote data cannot be written: {unfinished}: {error.strerror}; set"
                " dataset_config.remote_cache.folder to a folder with room, or a smaller remote_cache.size_gb"
            ) from None
        self._unchecked += len(data)
        if self._unchecked * CHECKS >= self.size:
            self._unchecked = 0
            self._shrink()

    def _path(self, key: str, number: int) -> Path:
        return self.folder / key[:2] / f"{key}-{number}"

    def _shrink(self) -> None:
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:   # another process is at it
                return
            found = []
            for part in self.folder.iterdir():
                if part.is_dir():
                    with os.scandir(part) as entries:
                        for entry in entries:
                            with suppress(OSError):   # dropped or renamed this moment
                                stat = entry.stat()
                                if "." in entry.name and stat.st_mtime > time.time() - UNFINISHED_SECONDS:
                                    continue   # being written
                                found.append((stat.st_mtime_ns, stat.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            if total <= FULL * self.size:
                return
            for _, size, path in sorted(found):
                if total <= KEPT * self.size:
                    break
                with suppress(OSError):
                    os.unlink(path)
                total -= size
