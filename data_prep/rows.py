"""Rows of a data set with their addresses, read in chunks that processes can share.

    source = open_data(Path("data/mine/train.jsonl"))
    for chunk in chunks_of(source):
        for row, raw in source.rows(chunk.shard, chunk.start): ...     # until chunk.stop
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.sources import ENCODED, Raw, Source, open_source
from lmms_engine.errors import UserError

CHUNK_ROWS = 64
MOST_PARTS = 1024   # that a set is cut into, until a part has so many rows:
PART_ROWS = 4096
PLAIN_SECONDS = 30   # between lines of progress where there is no terminal

# What a verb reads. Not a Path, which would make `s3:/` of `s3://`.
DATA_HELP = "File, folder or glob of JSONL, JSON, CSV, Parquet or Arrow, here or at an address; or a hub id."
Data = Annotated[str, typer.Argument(help=DATA_HELP)]

T = TypeVar("T")
Work = TypeVar("Work")


class Chunk(NamedTuple):
    """Rows start to stop - 1 of one shard of a source."""

    shard: int
    start: int
    stop: int


def open_data(path: str | Path, data_folder: Path | None = None, limit: int | None = None) -> Source:
    """The rows of a file, folder, glob, address or hub id, read as training reads them.

    data_folder: what relative media paths resolve against; None: the folder of the data file.
    """
    if (Path(path) / ENCODED).is_file():
        raise UserError(f"{path} is an encoded data set: look at the rows that it was made from")
    folder = "" if data_folder is None else str(data_folder.resolve())
    return open_source(DatasetEntry(path=str(path), data_folder=folder, limit=limit))


def chunks_of(source: Source) -> Iterator[Chunk]:
    """All rows. A shard that cannot be entered in the middle, a row group of Parquet, is one chunk."""
    for shard in range(source.num_shards):
        total = source.shard_rows(shard)
        step = CHUNK_ROWS if source.random_access else max(total, 1)
        for start in range(0, total, step):
            yield Chunk(shard, start, min(start + step, total))


def parts_of(source: Source) -> list[list[Chunk]]:
    """All rows in order, in runs of neighbouring chunks: a function of the source alone."""
    size = min(max(-(-(source.num_rows or 0) // MOST_PARTS), CHUNK_ROWS), PART_ROWS)
    parts: list[list[Chunk]] = []
    rows = size
    for chunk in chunks_of(source):
        if rows >= size:
            parts.append([])
            rows = 0
        parts[-1].append(chunk)
        rows += chunk.stop - chunk.start
    return parts


def rows_of(source: Source, chunk: Chunk) -> Iterator[tuple[int, Raw]]:
    """(row, content) of a chunk, without blank lines."""
    for row, raw in source.rows(chunk.shard, chunk.start):
        if row >= chunk.stop:
            return
        if raw is not None:
            yield row, raw


def placed(place: str, message: str) -> str:
    """Message with its place; what says of a row that it cannot be decoded names the place itself."""
    return message if message.startswith(place) else f"{place}: {message}"


# Sharing the work ------------------------------------------------------------------------------------

_task: Callable[[Any], Any] | None = None


def _start(task: Callable[[Any], Any]) -> None:
    global _task
    _task = task


def _call(chunk: Any) -> Any:
    assert _task is not None, "the pool's initializer has run"
    return _task(chunk)


def in_order(
    task: Callable[[Work], T], chunks: Iterable[Work], workers: int
) -> Iterator[tuple[Work, T]]:
    """(chunk, task(chunk)) in the order of the chunks; with workers > 1 in that many processes.

    A chunk is any small piece of work that can be pickled.

    task: picklable; each process gets one copy. Only a few results wait at a time. A process that dies is a
    UserError.
    """
    if workers <= 1:
        for chunk in chunks:
            yield chunk, task(chunk)
        return
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    waiting: deque[tuple[Work, Future]] = deque()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(task,))
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_call, chunk)))
            if len(waiting) > 2 * workers:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died, perhaps for want of memory; use fewer --workers, or --workers 1 to see at"
            " which row"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where it is a terminal, else a plain line now and then.

    Call what it gives with how much more is done.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda more: progress.advance(bar, more)


def _plain(title: str, total: int | None) -> Callable[[int], None]:
    began = said = time.monotonic()
    done = 0

    def advance(more: int) -> None:
        nonlocal done, said
        done += more
        now = time.monotonic()
        if now - said >= PLAIN_SECONDS:
            said = now
            of = "" if total is None else f" of {total}"
            print(f"{title}: {done}{of}, {now - began:.0f} s", file=sys.stderr, flush=True)

    return advance
