"""Long work in parts: each is written whole, by any process in any order, and one that is there is not done
again. So a call that was killed is repeated and goes on, with the result of one that was not disturbed.

    folder = work_folder(out, key)        # what a call with another key left there is gone
    result = run(work, workers)           # or executors.submit(work, …)
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from data_prep.rows import in_order, progress_bar
from data_prep.write import whole

if TYPE_CHECKING:
    from lmms_engine.datasets.sources import Source

T = TypeVar("T", covariant=True)
KEY = ".key"   # without a suffix that readers take for data
TEMPORARY = ".tmp"


class Stage(Protocol):
    """Parts that do not depend on one another; can be pickled."""

    title: str

    def count(self) -> int:
        """How many parts; asked when the stage before is done."""
        ...

    def make(self, number: int) -> None:
        """Writes a part unless it is there. Two processes may do so at once."""
        ...


class Work(Protocol, Generic[T]):
    """All that a command does; can be pickled."""

    @property
    def stages(self) -> Sequence[Stage]:
        """In their order."""
        ...

    def finish(self) -> T:
        """Makes the output of the parts; may be called again after it was cut off."""
        ...


def run(work: Work[T], workers: int = 1) -> T:
    """Does the work in this process, or in so many."""
    for stage in work.stages:
        count = stage.count()
        with progress_bar(stage.title, count) as advance:
            for _ in in_order(stage.make, range(count), workers):
                advance(1)
    return work.finish()


def work_folder(out: Path, key: Mapping[str, Any]) -> Path:
    """The folder beside `out` for the parts, as a call with the same key left it, else empty.

    key: everything that the parts depend on.
    """
    folder = out.resolve().parent / f".{out.name}.parts"
    text = json.dumps(key, indent=2, sort_keys=True, default=str) + "\n"
    if folder.exists() and _read(folder / KEY) != text:
        discard(folder)
    (folder / TEMPORARY).mkdir(parents=True, exist_ok=True)
    with put(folder, KEY) as path:
        path.write_text(text, encoding="utf-8")
    return folder


def discard(folder: Path) -> None:
    """Removes a work folder. First goes its key: what is left if this is cut off is never taken for whole."""
    (folder / KEY).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


@contextmanager
def put(folder: Path, name: str, home: Path | None = None) -> Iterator[Path]:
    """A path to write to, of this process alone; renamed to `name` when the block ends well.

    home: where it goes, on the same disk; None: the work folder itself. What a killed process leaves goes
    with the work folder.
    """
    temporary = folder / TEMPORARY / f"{socket.gethostname()}-{os.getpid()}-{name}"
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        (home or folder).mkdir(parents=True, exist_ok=True)
        temporary.replace((home or folder) / name)
    finally:
        temporary.unlink(missing_ok=True)


def joined(folder: Path, names: Sequence[str], out: Path) -> None:
    """Puts files of a work folder one after the other to `out`, which appears when it is whole."""
    with whole(out) as path, open(path, "wb") as file:
        for name in names:
            with open(folder / name, "rb") as part:
                shutil.copyfileobj(part, file)


def stamp(*paths: Path) -> list[Any]:
    """Sizes and times of files, and of the files in folders: what a half-done call compares."""
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file()
    ]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def stamp_source(source: Source) -> list[Any]:
    """The same of the files of a source; those that lie elsewhere count by their ends."""
    files = dict.fromkeys(file.where for file in getattr(source, "files", ()))
    return [source.fingerprint, str(source.folder(0)), *stamp(*map(Path, files))]
