"""Where rows come from: JSONL, JSON, CSV, Parquet and Arrow files, and datasets of the user's own.

    source = open_source(entry)                   # an entry of dataset_config.datasets
    for row, raw in source.rows(shard=0): ...     # raw: a dict, or BadRow if the row cannot be read

A source is a list of physical shards, each a list of rows; (shard, row) addresses a row for good.

| format | shard | reading one row by address |
| --- | --- | --- |
| JSONL | file; rows are its lines, cut at newline bytes only; blank lines are rows without content | cheap |
| JSON list | file; rows are the elements | cheap |
| CSV | file; rows are the records after the header, which names the keys; an empty cell is no key | cheap |
| Arrow | file (a `save_to_disk` folder or IPC files), memory-mapped | cheap |
| Parquet | row group | decodes the group up to the row |

An entry's path is a file, a glob, or a folder; several files are taken in sorted order. Memory does not
grow with the data: JSONL keeps one offset per 64 KiB, JSON and CSV one per row, the rest stays on disk.
Sources can be pickled; open files are not carried over and are opened again where they are needed.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lmms_engine.datasets.indexing import RowIndex, index_csv, index_json_list, index_lines
from lmms_engine.datasets.registry import DATASETS, BaseDataset
from lmms_engine.errors import BadRow, UserError
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from lmms_engine.config import DatasetEntry, DatasetSection

Raw = dict[str, Any] | BadRow
SUFFIXES = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
ENCODED = "encoded.json"   # a folder that holds it is an encoded data set, see encoded.py
FILES = "vision_iterable"  # the dataset_type that reads `datasets`
LEGAL = "auto, json, jsonl, csv, parquet, arrow"
CSV_TEXT = ("id", "system", "source")  # columns whose cells are text even where they look like JSON
HEAD_BYTES = 64 * 1024
BATCH_ROWS = 64


class Source(Protocol):
    """Addressable rows."""

    name: str
    num_shards: int
    random_access: bool  # `read` costs about as much as the row itself
    streamed: bool  # True: has no addresses to jump to, is read from its start
    row_bytes: int  # rough size of a row in memory
    weight: float  # how often it is drawn, relative to the others
    fingerprint: str  # equal for equal content

    @property
    def num_rows(self) -> int | None:
        """All rows; None where a stream does not say."""
        ...

    def shard_rows(self, shard: int) -> int:
        """Number of rows of a shard."""
        ...

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        """(row, content) from row `start` on; None for a blank line."""
        ...

    def read(self, shard: int, row: int) -> Raw | None:
        """One row by its address."""
        ...

    def folder(self, shard: int) -> Path:
        """What relative media paths of the shard's rows resolve against."""
        ...

    def place(self, shard: int, row: int) -> str:
        """Where a person finds the row: file and line."""
        ...


def open_source(entry: DatasetEntry, default_format: str = "auto", name: str | None = None) -> Source:
    """The source of one dataset entry; raises UserError if it is missing, empty or unreadable.

    default_format: `dataset_config.dataset_format`, for entries whose own `data_type` is auto.
    """
    kind = entry.data_type if entry.data_type != "auto" else default_format
    kind = "auto" if kind == "yaml" else kind  # yaml is the form of the list, not of the rows
    path = Path(entry.path)
    if kind not in (*LEGAL.split(", "), "hf_dataset"):
        raise UserError(f"dataset '{entry.path}': data_type={kind}: not supported yet (legal: {LEGAL})")
    if os.path.isfile(path / ENCODED):
        from lmms_engine.datasets.encoded import EncodedSource  # brings torch

        return EncodedSource(entry, name or display_name(path))
    files, base = _files(entry.path, kind)
    kind = _kind(files, kind, entry.path)
    opened = _OPENERS[kind]([Path(file) for file in files])
    folder = None if base is None else base / entry.data_folder
    source = opened.located(name or display_name(path), folder, entry)
    blank = all(os.path.getsize(file) < HEAD_BYTES and not _first_character(file) for file in files)
    if not source.num_rows or (blank and kind in ("json", "jsonl")):
        raise UserError(f"dataset '{entry.path}' is empty: {len(files)} file(s) without a row")
    return source


def open_sources(dataset: DatasetSection, split: str) -> list[Source]:
    """All sources of a split, "train" or "eval", in the order of the config."""
    if split == "train" and dataset.dataset_type != FILES:
        if dataset.dataset_type not in DATASETS:
            legal = [FILES, *DATASETS]
            raise UserError(
                f"dataset_config.dataset_type={dataset.dataset_type}: unknown (legal: {', '.join(legal)};"
                f" one's own by register_dataset in a plugin){nearest(dataset.dataset_type, legal)}"
            )
        return [CustomSource(dataset.dataset_type, dataset)]
    entries = dataset.datasets if split == "train" else dataset.eval_datasets
    if not entries:
        key = "datasets" if split == "train" else "eval_datasets"
        raise UserError(f"dataset_config.{key} is empty: name at least one dataset ({{path: …}})")
    pairs = zip(entries, source_names(dataset, split), strict=True)
    return [open_source(entry, dataset.dataset_format, name) for entry, name in pairs]


def source_names(dataset: DatasetSection, split: str) -> list[str]:
    """What the sources of a split are called, in the order of `open_sources`; opens nothing."""
    if split == "train" and dataset.dataset_type != FILES:
        return [dataset.dataset_type]
    names: list[str] = []
    for entry in dataset.datasets if split == "train" else dataset.eval_datasets:
        name = display_name(Path(entry.path))
        twins = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{twins + 1}" if twins else name)
    return names


def display_name(path: Path) -> str:
    """The path relative to the working directory if it lies below, so that it reads the same on every
    machine."""
    try:
        return path.relative_to(Path.cwd()).as_posix() if path.is_absolute() else path.as_posix()
    except ValueError:
        return path.as_posix()


# Files -----------------------------------------------------------------------------------------------


def _files(path: str, kind: str) -> tuple[list[str], Path | None]:
    """The files of an entry, sorted, and the folder of its media: None where each file has its own."""
    if "://" in path:
        scheme = path.partition("://")[0]
        raise UserError(f"dataset '{path}': {scheme}:// is not supported yet; copy the files to a folder")
    if os.path.isfile(path):
        return [path], Path(path).parent
    if os.path.isdir(path):
        return _folder_files(Path(path), kind), Path(path)
    if any(mark in path for mark in "*?["):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if found:
            return found, None
        raise UserError(f"dataset '{path}': no file matches")
    parent = Path(path).parent
    near = sorted(item.name for item in parent.iterdir())[:20] if parent.is_dir() else []
    there = f"{parent} holds {', '.join(near)}" if near else f"{parent} does not exist or is empty"
    raise UserError(f"dataset '{path}' does not exist; {there}. (Hub datasets are not supported yet)")


def _folder_files(folder: Path, kind: str) -> list[str]:
    state = folder / "state.json"
    if state.is_file():  # the datasets library's save_to_disk, which lists its files in order
        try:
            names = [
                item["filename"] for item in json.loads(state.read_text(encoding="utf-8"))["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"dataset '{folder}': {state} is damaged ({error!r})") from None
        return [str(folder / name) for name in names]
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise UserError(
            f"dataset '{folder}' holds several splits; name one: {', '.join(f'{folder}/{n}' for n in names)}"
        )
    wanted = [suffix for suffix, of in SUFFIXES.items() if kind in ("auto", "hf_dataset", of)]
    files = sorted(str(file) for file in folder.rglob("*") if file.is_file() and file.suffix in wanted)
    if not files:
        raise UserError(f"dataset '{folder}': no file ending in {', '.join(wanted)} in this folder")
    return files


def _kind(files: list[str], kind: str, path: str) -> str:
    """The one format of all files: by suffix, for JSON also by the first character."""
    kinds = {
        SUFFIXES.get(Path(file).suffix.lower(), "?") if kind in ("auto", "hf_dataset") else kind
        for file in files
    }
    if "?" in kinds:
        odd = next(file for file in files if Path(file).suffix.lower() not in SUFFIXES)
        raise UserError(
            f"dataset '{path}': cannot tell the format of {odd}; set data_type (legal: {LEGAL}) or use one of"
            f" the suffixes {', '.join(SUFFIXES)}"
        )
    if kinds == {"json"} or kinds == {"jsonl"}:
        kinds = {"json" if _first_character(file) == b"[" else "jsonl" for file in files}
    if len(kinds) > 1:
        raise UserError(
            f"dataset '{path}' mixes formats ({', '.join(sorted(kinds))}); set data_type or name a glob"
        )
    return kinds.pop()


def _first_character(file: str) -> bytes:
    with open_bytes(file) as stream:
        return stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def open_bytes(file: str | Path) -> Any:
    """The file, opened for binary reading; UserError names it if that fails."""
    try:
        return open(file, "rb")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def file_mark(file: Path) -> str:
    """A cheap digest of a file: size, first and last 64 KiB. Name and time do not count."""
    size = file.stat().st_size
    with open_bytes(file) as stream:
        head = stream.read(HEAD_BYTES)
        stream.seek(max(size - HEAD_BYTES, 0))
        tail = stream.read(HEAD_BYTES)
    return hashlib.blake2b(b"%d" % size + head + tail, digest_size=16).hexdigest()


def drop_nulls(value: Any) -> Any:
    """Without the null fields that tables add to make rows alike; an object of nothing else is null
    itself."""
    if isinstance(value, dict):
        kept = {key: clean for key, item in value.items() if (clean := drop_nulls(item)) is not None}
        return kept if kept or not value else None
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


# Formats ---------------------------------------------------------------------------------------------


class _FileSource:
    """What the file formats share: addresses, limit, media folder, fingerprint.

    files: one per shard (Parquet: the file repeated for each row group); counts: rows per shard.
    """

    streamed = False
    random_access = True
    unit = "row"

    def __init__(self, files: list[Path], counts: list[int], row_bytes: int) -> None:
        self.name, self.weight = "", 1.0
        self.files = files
        self.row_bytes = max(row_bytes, 1)
        self.num_shards = len(files)
        self._counts = counts
        self._folder: Path | None = None
        self._data_folder = ""
        marks = [file_mark(file) for file in dict.fromkeys(files)]
        self.fingerprint = hashlib.blake2b(json.dumps([counts, marks]).encode(), digest_size=16).hexdigest()
        self._open: tuple[tuple[int, int], Any] | None = None  # (process, shard read last)

    def located(self, name: str, folder: Path | None, entry: DatasetEntry) -> _FileSource:
        """Gives the source its name, media folder and weight, and cuts it to its first `limit` rows.

        folder: None where each file's own folder counts.
        """
        self.name, self.weight = name, entry.weight
        self._folder, self._data_folder = folder, entry.data_folder
        limit = entry.limit
        if limit is not None and limit < sum(self._counts):
            left, counts = limit, []
            for count in self._counts:
                counts.append(min(count, left))
                left -= counts[-1]
            self._counts = counts
            self.fingerprint += f"-first-{limit}"
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def num_rows(self) -> int:
        return sum(self._counts)

    def shard_rows(self, shard: int) -> int:
        return self._counts[shard]

    def folder(self, shard: int) -> Path:
        return Path(os.path.abspath(self._folder or self.files[shard].parent / self._data_folder))

    def place(self, shard: int, row: int) -> str:
        return f"{os.path.abspath(self.files[shard])}, {self.unit} {row + 1}"

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        for row in range(start, self._counts[shard]):
            yield row, self.read(shard, row)

    def _opened(self, shard: int) -> Any:
        # A forked process shares the position of files that were open before: it opens its own.
        key = (os.getpid(), shard)
        if self._open is None or self._open[0] != key:
            self._open = (key, self._open_shard(shard))
        return self._open[1]

    def _open_shard(self, shard: int) -> Any:
        return open_bytes(self.files[shard])


class _TextSource(_FileSource):
    """JSON rows at byte offsets."""

    def __init__(self, files: list[Path], indices: list[RowIndex], unit: str) -> None:
        counts = [len(index) for index in indices]
        size = sum(file.stat().st_size for file in files)
        super().__init__(files, counts, row_bytes=4 * size // max(sum(counts), 1))
        self.unit = unit
        self._indices = indices

    def read(self, shard: int, row: int) -> Raw | None:
        if not 0 <= row < self._counts[shard]:
            raise IndexError(f"{self.files[shard]} has {self._counts[shard]} rows, asked for {row}")
        data = self._indices[shard].read(self._opened(shard), row)
        return None if not data.strip() else self._decode(data, shard, row)

    def _decode(self, data: bytes, shard: int, row: int) -> Raw:
        try:
            value = json.loads(data.decode("utf-8-sig" if row == 0 else "utf-8"))
        except ValueError as error:
            last = " (the last one: the file may be cut off)" if row == self._counts[shard] - 1 else ""
            return BadRow("json", f"{self.place(shard, row)}{last} is not JSON: {error}")
        except RecursionError:
            return BadRow("json", f"{self.place(shard, row)} is nested too deeply")
        return (
            value
            if isinstance(value, dict)
            else BadRow(
                "row_type",
                f"{self.place(shard, row)} holds a {type(value).__name__}, not an object with `messages`",
            )
        )


class _CsvSource(_TextSource):
    """CSV records; the header of each file names the keys. Lists and objects stand in cells as JSON."""

    def __init__(self, files: list[Path]) -> None:
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


def _csv_columns(header: bytes, file: Path) -> list[str]:
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


class _ArrowSource(_FileSource):
    """Arrow IPC files, in the file or the stream format, memory-mapped."""

    def __init__(self, files: list[Path]) -> None:
        counts = [_ArrowFile(file).num_rows for file in files]
        super().__init__(files, counts, sum(file.stat().st_size for file in files) // max(sum(counts), 1))

    def read(self, shard: int, row: int) -> Raw | None:
        try:
            return drop_nulls(self._opened(shard).row(row)) or {}
        except _arrow_errors() as error:
            return BadRow("arrow", f"{self.place(shard, row)}: cannot decode: {_one_line(error)}")

    def _open_shard(self, shard: int) -> _ArrowFile:
        return _ArrowFile(self.files[shard])


class _ArrowFile:
    """The record batches of a file. Each is checked when it is first read from: damaged offsets would
    otherwise read memory outside it."""

    def __init__(self, file: Path) -> None:
        import pyarrow as pa

        try:
            data = pa.memory_map(str(file))
            is_file = data.read(6) == b"ARROW1"
            data.seek(0)
            opened = pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)
            self._batches = opened.read_all().to_batches()
        except _arrow_errors() as error:
            raise UserError(f"cannot read {file} as Arrow: {_one_line(error)}") from None
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._checked: set[int] = set()

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, row: int) -> dict[str, Any]:
        """One row; raises one of the Arrow errors if its batch is damaged."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        batch = self._batches[number]
        if number not in self._checked:
            batch.validate(full=True)
            self._checked.add(number)
        return batch.slice(row - int(self._ends[number]) + batch.num_rows, 1).to_pylist()[0]


def _arrow_errors() -> tuple[type[Exception], ...]:
    """What reading damaged Arrow and Parquet files raises."""
    import pyarrow as pa

    return (OSError, ValueError, MemoryError, OverflowError, pa.ArrowException)


class _ParquetSource(_FileSource):
    """Parquet files; a shard is a row group, and is decoded a few rows at a time."""

    random_access = False

    def __init__(self, files: list[Path]) -> None:
        shards: list[Path] = []
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
        batches = self._opened(shard).iter_batches(
            batch_size=BATCH_ROWS, row_groups=[self._groups[shard][0]], use_threads=False
        )
        row = 0
        try:
            for batch in batches:
                skip = min(max(start - row, 0), batch.num_rows)
                row += skip
                for raw in batch.slice(skip).to_pylist():
                    if row >= self._counts[shard]:
                        return
                    yield row, drop_nulls(raw) or {}
                    row += 1
        except _arrow_errors() as error:
            raise UserError(f"{self.place(shard, row)}: cannot decode: {_one_line(error)}") from None

    def read(self, shard: int, row: int) -> Raw | None:
        return next(self.rows(shard, row))[1]

    def place(self, shard: int, row: int) -> str:
        group, before = self._groups[shard]
        return f"{os.path.abspath(self.files[shard])}, row {before + row + 1}, row group {group}"

    def _open_shard(self, shard: int) -> pq.ParquetFile:
        return _open_parquet(self.files[shard])


def _open_parquet(file: Path) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file, memory_map=True)
    except _arrow_errors() as error:
        raise UserError(f"cannot read {file} as Parquet: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _open_jsonl(files: list[Path]) -> _TextSource:
    return _TextSource(files, [_indexed(index_lines, file) for file in files], "line")


def _open_json(files: list[Path]) -> _TextSource:
    return _TextSource(files, [_indexed(index_json_list, file) for file in files], "element")


def _indexed(index: Any, file: Path) -> Any:
    with open_bytes(file) as stream:
        return index(stream)


_OPENERS = {
    "jsonl": _open_jsonl,
    "json": _open_json,
    "csv": _CsvSource,
    "arrow": _ArrowSource,
    "parquet": _ParquetSource,
}


# Datasets of the user's own --------------------------------------------------------------------------


class CustomSource:
    """A registered BaseDataset as a source of one shard. In a spawned worker the dataset is built again."""

    num_shards = 1
    row_bytes = 4096
    weight = 1.0

    def __init__(self, dataset_type: str, config: DatasetSection) -> None:
        self.name = dataset_type
        self._config = config
        self._dataset: BaseDataset | None = None
        cls = DATASETS.get(dataset_type)
        has_length = hasattr(cls, "__len__")
        self.random_access = has_length and hasattr(cls, "__getitem__")
        self.streamed = not self.random_access
        if self.streamed and not hasattr(cls, "__iter__"):
            raise UserError(f"dataset '{dataset_type}' needs `__len__` and `__getitem__`, or `__iter__`")
        self.num_rows = len(self.dataset) if has_length else None
        if self.num_rows == 0:
            raise UserError(f"dataset '{dataset_type}' is empty")
        ends = [self.read(0, row) for row in (0, self.num_rows - 1)] if self.random_access else []
        text = json.dumps([dataset_type, self.num_rows, ends], default=lambda value: type(value).__name__)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def dataset(self) -> BaseDataset:
        """The user's object, built on first use in each process."""
        if self._dataset is None:
            self._dataset = DATASETS.get(self.name)(self._config)
        return self._dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def shard_rows(self, shard: int) -> int:
        return self.num_rows or 0

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        if self.random_access:
            for row in range(start, self.shard_rows(0)):
                yield row, self.read(0, row)
            return
        for row, raw in enumerate(islice(iter(self.dataset), start, self.num_rows), start):
            yield row, self._checked(raw)

    def read(self, shard: int, row: int) -> Raw | None:
        if not self.random_access:
            return next(self.rows(shard, row))[1]
        try:
            return self._checked(self.dataset[row])
        except BadRow as bad:
            return bad

    def _checked(self, raw: Any) -> Raw:
        if isinstance(raw, dict):
            return raw
        return BadRow(
            "row_type", f"dataset '{self.name}' gave a {type(raw).__name__}; a row is a dict with `messages`"
        )

    def folder(self, shard: int) -> Path:
        return Path.cwd()

    def place(self, shard: int, row: int) -> str:
        return f"{self.name}[{row}]"
