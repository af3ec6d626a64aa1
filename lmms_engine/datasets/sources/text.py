"""Sources of text: JSONL, JSON lists and CSV, at byte offsets.

Small JSONL files are numbered by line, which takes reading them once. Large ones are cut into slots of
bytes, so that a run over any number of them starts at once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

from lmms_engine.datasets.indexing import RowIndex, index_csv, index_json_list, index_lines
from lmms_engine.datasets.sources.base import FileSource, Raw
from lmms_engine.datasets.sources.files import File
from lmms_engine.errors import BadRow, UserError

CSV_TEXT = ("id", "system", "source")  # columns whose cells are text even where they look like JSON
NUMBERED_BYTES = 64 * 1024 * 1024      # JSONL files of a source with more bytes in all are cut into slots
SAMPLE_BYTES, SAMPLE_FILES = 256 * 1024, 16
MIN_SLOT_BYTES = 64

T = TypeVar("T")


class TextSource(FileSource):
    """JSON rows at byte offsets."""

    def __init__(self, files: Sequence[File], indices: list[RowIndex], unit: str) -> None:
        counts = [len(index) for index in indices]
        size = sum(file.size for file in files)
        super().__init__(files, counts, row_bytes=4 * size // max(sum(counts), 1))
        self.unit = unit
        self._indices = indices

    def read(self, shard: int, row: int) -> Raw | None:
        if not 0 <= row < self._counts[shard]:
            raise IndexError(f"{self.files[shard]} has {self._counts[shard]} rows, asked for {row}")
        data = self._indices[shard].read(self._opened(shard), row)
        if not data:
            return _shortened(self.place(shard, row))
        return None if not data.strip() else self._decode(data, shard, row)

    def _decode(self, data: bytes, shard: int, row: int) -> Raw:
        place = self.place(shard, row)
        return _json_row(data, place, row == 0, row == self._counts[shard] - 1)


def _shortened(place: str) -> BadRow:
    message = "the file has become shorter since the run began and ends before this row"
    return BadRow("json", f"{place}: {message}")


def _json_row(data: bytes, place: str, first: bool, last: bool) -> Raw:
    """A row of JSON; `place`, and whether it is the first or the last one of its file."""
    try:
        value = json.loads(data.decode("utf-8-sig" if first else "utf-8"))
    except ValueError as error:
        cut = " (the last one: the file may be cut off)" if last else ""
        return BadRow("json", f"{place}{cut} is not JSON: {error}")
    except RecursionError:
        return BadRow("json", f"{place} is nested too deeply")
    if isinstance(value, dict):
        return value
    found = "null" if value is None else {list: "a list", str: "a string"}.get(type(value), f"{value!r}"[:40])
    return BadRow("row_type", f"{place} holds {found}, not an object with `messages`")


class SlottedLines(FileSource):
    """JSONL of any size, which is not read before it starts.

    A line belongs to the slot in which it begins. Slots are about half as long as lines are on average in
    what the files begin with: most hold one line or none, so that shuffled slots are shuffled lines.
    """

    slotted = True
    random_access = False

    def __init__(self, files: Sequence[File]) -> None:
        line_bytes = _line_bytes(files)
        self.slot_bytes = max(int(line_bytes / 2), MIN_SLOT_BYTES)
        self.rows_each = self.slot_bytes / line_bytes
        self._sizes = [file.size for file in files]
        counts = [-(-size // self.slot_bytes) for size in self._sizes]
        super().__init__(files, counts, row_bytes=4 * self.slot_bytes)

    def place(self, shard: int, row: int) -> str:
        return f"{self.files[shard].where}, line at byte {row}"

    def read(self, shard: int, row: int) -> Raw | None:
        stream = self._opened(shard)
        stream.seek(max(row - 1, 0))
        if row and stream.read(1) != b"\n":
            raise IndexError(f"{self.files[shard]}: no line begins at byte {row}")
        return self._decode(stream.readline(), shard, row)

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        for _, rows in self.slots(shard, start // self.slot_bytes, self._counts[shard]):
            yield from ((row, raw) for row, raw in rows if row >= start)

    def slots(self, shard: int, first: int, stop: int) -> Iterator[tuple[int, list[tuple[int, Raw | None]]]]:
        """(slot, its rows with their addresses), for the slots first to stop - 1, in one pass."""
        stream, size = self._opened(shard), self.slot_bytes
        begin, end = first * size, min(stop * size, self._sizes[shard])
        at = 0
        if begin:
            # The line that reaches into the first slot belongs to an earlier one, unless it ends just before.
            stream.seek(begin - 1)
            at = begin - 1 + len(stream.readline(end - begin + 1))
        stream.seek(at)
        slot, rows = first, []
        while at < end and (line := stream.readline()):
            while slot < at // size:
                yield slot, rows
                slot, rows = slot + 1, []
            rows.append((at, self._decode(line, shard, at)))
            at += len(line)
        if at < end:
            at = max(at, begin)
            while slot < at // size:
                yield slot, rows
                slot, rows = slot + 1, []
            rows.append((at, _shortened(self.place(shard, at))))
        for last in range(slot, stop):
            yield last, rows
            rows = []

    def _decode(self, line: bytes, shard: int, row: int) -> Raw | None:
        if not line.strip():
            return None
        last = row + len(line) >= self._sizes[shard]
        return _json_row(line, self.place(shard, row), row == 0, last)


def _line_bytes(files: Sequence[File]) -> float:
    """What a line takes on average, by what the files begin with."""
    size = lines = 0
    for file in files[:: -(-len(files) // SAMPLE_FILES)]:
        with file.open() as stream:
            data = stream.read(SAMPLE_BYTES)
        size, lines = size + len(data), lines + data.count(b"\n")
    return max(size / lines if lines else 2 * size, 1)


class CsvSource(TextSource):
    """CSV records; the header of each file names the keys. Lists and objects stand in cells as JSON."""

    def __init__(self, files: Sequence[File]) -> None:
        headers, indices = zip(*(_indexed(index_csv, file) for file in files), strict=True)
        super().__init__(files, list(indices), "row")
        self._columns = [_csv_columns(header, file) for header, file in zip(headers, files, strict=True)]

    def _decode(self, data: bytes, shard: int, row: int) -> Raw:
        columns = self._columns[shard]
        try:
            (cells,) = _csv_records(data.decode("utf-8"))
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
        except (ValueError, csv.Error) as error:
            last = " (the last one: a quote may be open)" if row == self._counts[shard] - 1 else ""
            return BadRow("csv", f"{self.place(shard, row)}{last} is not CSV: {error}")
        pairs = zip(columns, cells, strict=True)
        return {key: cell if key in CSV_TEXT else _csv_value(cell) for key, cell in pairs if cell}


def _csv_columns(header: bytes, file: File) -> list[str]:
    try:
        records = _csv_records(header.decode("utf-8-sig"))
    except (ValueError, csv.Error) as error:
        raise UserError(f"cannot read {file} as CSV: its first line is no header ({error})") from None
    columns = [name.strip() for name in records[0]] if records else []
    if "" in columns or len({*columns}) < len(columns):
        raise UserError(f"cannot read {file} as CSV: its header has a column without a name or a name twice")
    return columns


def _csv_records(text: str) -> list[list[str]]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB would refuse a picture in base64
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def _csv_value(cell: str) -> Any:
    """The list or object that a cell holds as JSON, else its text."""
    if not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def open_jsonl(files: Sequence[File], limit: int | None, by_line: bool) -> FileSource:
    """by_line: lines are numbered also in large files, which are then read once. So they are with `limit`,
    as far as it goes."""
    if not by_line and limit is None and sum(file.size for file in files) > NUMBERED_BYTES:
        return SlottedLines(files)
    indices: list[RowIndex] = []
    for file in files:
        left = None if limit is None else limit - sum(map(len, indices))
        with file.open() as stream:
            indices.append(index_lines(stream, left))
    return TextSource(files, indices, "line")


def open_json(files: Sequence[File]) -> TextSource:
    """JSON lists; rows are their elements."""
    return TextSource(files, [_indexed(index_json_list, file) for file in files], "element")


def _indexed(index: Callable[[BinaryIO], T], file: File) -> T:
    with file.open() as stream:
        return index(stream)
