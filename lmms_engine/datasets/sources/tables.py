"""Sources of tables: Arrow IPC files and Parquet. What is damaged costs its own rows, not the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmms_engine.datasets.sources.arrow_ipc import batches_of
from lmms_engine.datasets.sources.base import FileSource, Raw, drop_nulls, one_line
from lmms_engine.datasets.sources.files import File, LocalFile
from lmms_engine.errors import BadRow, UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 64
BUFFER_BYTES = 1024 * 1024


class ArrowSource(FileSource):
    """Arrow IPC files, in the file or the stream format; memory-mapped where they lie on this machine."""

    def __init__(self, files: Sequence[File]) -> None:
        self._tables = [batches_of(file) for file in files]
        counts = [sum(batch.rows for batch in table.batches) for table in self._tables]
        super().__init__(files, counts, sum(file.size for file in files) // max(sum(counts), 1))

    def read(self, shard: int, row: int) -> Raw | None:
        return self._opened(shard).row(row)

    def _open_shard(self, shard: int) -> _ArrowReader:
        return _ArrowReader(self, shard)


class _ArrowReader:
    """The record batches of a file, one in hand. Each is checked when it is read: damaged offsets would
    otherwise read memory outside it."""

    def __init__(self, source: ArrowSource, shard: int) -> None:
        import pyarrow as pa

        self._file = source.files[shard]
        self._table = source._tables[shard]
        self._ends = np.cumsum([batch.rows for batch in self._table.batches], dtype=np.int64)
        local = isinstance(self._file, LocalFile)
        self._stream = pa.memory_map(str(self._file)) if local else pa.PythonFile(self._file.open(), "r")
        self._held: tuple[int, pa.RecordBatch | str] | None = None  # number, batch or why it is none

    def row(self, row: int) -> Raw:
        """One row, or the BadRow of its batch."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        if self._held is None or self._held[0] != number:
            self._held = (number, self._batch(number))
        batch = self._held[1]
        first = int(self._ends[number]) - self._table.batches[number].rows
        if not isinstance(batch, str):
            try:
                return drop_nulls(batch.slice(row - first, 1).to_pylist()[0]) or {}
            except table_errors() as error:
                return BadRow("arrow", f"{self._file.where}, row {row + 1}: cannot decode: {one_line(error)}")
        span = f"rows {first + 1} to {int(self._ends[number])}"
        return BadRow("arrow", f"{self._file.where}, {span}, record batch {number}: cannot decode: {batch}")

    def _batch(self, number: int) -> pa.RecordBatch | str:
        damage = self._table.batches[number].damage
        if damage:
            return damage
        try:
            batch = self._table.read(self._stream, number)
            batch.validate(full=True)
        except UserError:
            raise
        except table_errors() as error:
            return one_line(error)
        rows = self._table.batches[number].rows
        return batch if batch.num_rows == rows else f"{batch.num_rows} rows where its header says {rows}"


def table_errors() -> tuple[type[Exception], ...]:
    """What reading damaged Arrow and Parquet files raises."""
    import pyarrow as pa

    return (OSError, ValueError, MemoryError, OverflowError, pa.ArrowException)


class ParquetSource(FileSource):
    """Parquet files; a shard is a row group, and is decoded a few rows at a time."""

    random_access = False

    def __init__(self, files: Sequence[File]) -> None:
        shards: list[File] = []
        counts: list[int] = []
        self._groups: list[tuple[int, int]] = []  # row group in its file, rows of the file before it
        size = 0
        for file in files:
            with _open_parquet(file) as opened:
                before = 0
                for group in range(opened.metadata.num_row_groups):
                    meta = opened.metadata.row_group(group)
                    shards.append(file)
                    counts.append(meta.num_rows)
                    self._groups.append((group, before))
                    before += meta.num_rows
                    size += meta.total_byte_size
        if not shards:
            raise UserError(f"dataset is empty: {', '.join(map(str, files))} hold no row group")
        super().__init__(shards, counts, size // max(sum(counts), 1))

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        import pyarrow as pa

        try:
            yield from self._decoded(shard, start)
        finally:
            # Else the allocator keeps what was decoded: 100 MB in each worker where rows hold pictures.
            pa.default_memory_pool().release_unused()

    def _decoded(self, shard: int, start: int) -> Iterator[tuple[int, Raw]]:
        row = 0
        try:
            batches = self._opened(shard).iter_batches(
                batch_size=BATCH_ROWS, row_groups=[self._groups[shard][0]], use_threads=False
            )
            for batch in batches:
                skip = min(max(start - row, 0), batch.num_rows)
                row += skip
                for raw in batch.slice(skip).to_pylist():
                    if row >= self._counts[shard]:
                        return
                    yield row, drop_nulls(raw) or {}
                    row += 1
            error: Exception = ValueError("the row group holds fewer rows than the footer says")
        except UserError:
            raise
        except table_errors() as caught:
            error = caught
            self._open = None
        # Pages cannot be left out one by one: what follows the damage in the row group is lost with it.
        for lost in range(max(row, start), self._counts[shard]):
            yield lost, self._lost(shard, row, error)

    def _lost(self, shard: int, row: int, error: Exception) -> BadRow:
        group, before = self._groups[shard]
        span = f"rows {before + row + 1} to {before + self._counts[shard]}, row group {group}"
        return BadRow("parquet", f"{self.files[shard].where}, {span}: cannot decode: {one_line(error)}")

    def read(self, shard: int, row: int) -> Raw | None:
        return next(self.rows(shard, row))[1]

    def place(self, shard: int, row: int) -> str:
        group, before = self._groups[shard]
        return f"{self.files[shard].where}, row {before + row + 1}, row group {group}"

    def _open_shard(self, shard: int) -> pq.ParquetFile:
        return _open_parquet(self.files[shard])


def _open_parquet(file: File) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not memory-mapped: mapped pages count as this process's memory, up to the size of the file.
        source = str(file) if isinstance(file, LocalFile) else pa.PythonFile(file.open(), "r")
        return pq.ParquetFile(
            source,
            memory_map=False,
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,   # of a column: else all of a row group's lies in memory
            page_checksum_verification=True,
        )
    except UserError:
        raise
    except table_errors() as error:
        raise UserError(f"cannot read {file} as Parquet: {one_line(error)}") from None
