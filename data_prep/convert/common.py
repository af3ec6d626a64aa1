"""What the formats share: options, records of tables with their places, columns by usual names."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from data_prep.parts import stamp, stamp_source
from data_prep.rows import Chunk, open_data, parts_of, rows_of
from lmms_engine.errors import BadRow, UserError

if TYPE_CHECKING:
    from lmms_engine.datasets.sources import Source

TABLES = (".csv", ".tsv")
BOM = b"\xef\xbb\xbf"
CSV_ROWS = 1024   # of a part of a table
CSV_BYTES = 16 << 20

# (where a person finds it, what stands there)
Record = tuple[str, dict[str, Any] | BadRow]


@dataclass(frozen=True)
class Options:
    """Of a conversion. prompt: the question for data that has none; None: the format's own.

    columns: what a format calls it -> what this file calls it. draw: the text asks for the picture, which is
    the answer; for models that draw.
    """

    prompt: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    draw: bool = False


@dataclass(frozen=True)
class Records:
    """What stands in files, in parts that processes can share; can be pickled.

    parts: what `read` takes, each so small that to do it again costs little. stamp: equal for equal files.
    """

    parts: Sequence[Any]
    read: Callable[[Any], Iterator[Record]]
    stamp: Sequence[Any]


def read_records(path: Path) -> Records:
    """The rows of CSV or TSV with a header, or of JSONL, JSON, Parquet or Arrow files."""
    if path.suffix.lower() in TABLES:
        tables = [_csv_records(table) for table in _tables(path)]
        parts = [(table.read, part) for table in tables for part in table.parts]
        return Records(parts, _read_part, [table.stamp for table in tables])
    source = open_data(path)
    return Records(parts_of(source), partial(_read_chunks, source), stamp_source(source))


def _tables(path: Path) -> list[Path]:
    """The files that a name or a glob means."""
    found = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = [file for file in found if file.is_file()]
    if not files:
        raise UserError(f"{path} does not exist: give a table on this machine, or a glob of tables")
    return files


def _read_part(part: tuple[Callable[[Any], Iterator[Record]], Any]) -> Iterator[Record]:
    read, inner = part
    return read(inner)


def _read_chunks(source: Source, chunks: Sequence[Chunk]) -> Iterator[Record]:
    for chunk in chunks:
        for row, raw in rows_of(source, chunk):
            yield source.place(chunk.shard, row), raw


class Span(NamedTuple):
    """Bytes of a table that hold whole records. line: lines before it."""

    start: int
    stop: int
    line: int


def _csv_records(path: Path) -> Records:
    """Cut where a reader of the whole table ends a record: quotes may hold line breaks."""
    csv.field_size_limit(1 << 30)   # pictures in base64 are long fields
    end = 0

    def lines(file: TextIO) -> Iterator[str]:
        nonlocal end
        for line in file:
            end += len(line.encode())
            yield line

    spans: list[Span] = []
    try:
        with open(path, "rb") as raw:
            end = len(BOM) if raw.read(len(BOM)) == BOM else 0
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(lines(file), delimiter=_delimiter(path), strict=True)
            names = next(reader, [])
            start, line, rows = end, reader.line_num, 0
            while True:
                try:
                    next(reader)
                except csv.Error:
                    pass   # a bad record is named when it is read
                except StopIteration:
                    break
                rows += 1
                if rows == CSV_ROWS or end - start >= CSV_BYTES:
                    spans.append(Span(start, end, line))
                    start, line, rows = end, reader.line_num, 0
            if end > start:
                spans.append(Span(start, end, line))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None
    except csv.Error as error:
        raise UserError(f"{path}, line 1 is no header of a table: {error}") from None
    return Records(spans, partial(_read_span, path, names), stamp(path))


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _read_span(path: Path, names: Sequence[str], span: Span) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)
    with open(path, "rb") as file:
        file.seek(span.start)
        text = io.StringIO(file.read(span.stop - span.start).decode("utf-8"), newline="")
    reader = csv.DictReader(text, names, delimiter=_delimiter(path), strict=True)
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            place = f"{path}, line {span.line + reader.line_num}"
            yield place, BadRow("csv", f"is no row of a table: {error}")
            continue
        place = f"{path}, line {span.line + reader.line_num}"
        if None in record or None in record.values():
            found = "more" if None in record else "fewer"
            yield place, BadRow("csv", f"has {found} fields than the {len(names)} of the header")
        else:
            yield place, record


def pick(record: Mapping[str, Any], name: str, usual: Sequence[str], options: Options) -> Any:
    """The value of what a format calls `name`: of the column given by `--columns`, else of a usual one.

    None where there is none; empty strings and lists count as none.
    """
    given = options.columns.get(name)
    if given is not None and given not in record:
        raise UserError(f"--columns {name}={given}: there is no such column (there are: {', '.join(record)})")
    for column in (given,) if given is not None else usual:
        if (value := record.get(column)) not in (None, "", []):
            return value
    return None


def need(record: Mapping[str, Any], name: str, usual: Sequence[str], options: Options) -> Any:
    """`pick`, where a row without it is of no use."""
    value = pick(record, name, usual, options)
    if value is None:
        there = ", ".join(str(key) for key in record)
        where = f"any of {', '.join(usual)}; or name it by --columns {name}=… (there are: {there})"
        raise BadRow("column", f"no {name}: it is looked for in {options.columns.get(name) or where}")
    return value


def as_text(value: Any, name: str) -> str:
    """A string or a number as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow("column", f"the {name} must be text, got a {type(value).__name__}")
    return str(value)


def number(value: Any, name: str) -> float:
    """A number, or text of one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadRow("column", f"the {name} must be a number, got {value!r}") from None


def as_list(value: Any) -> list[Any] | None:
    """A list, or JSON text of one; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def ask(*content: dict[str, Any]) -> dict[str, Any]:
    """A user turn."""
    return {"role": "user", "content": list(content)}


def answer(text: str) -> dict[str, Any]:
    """An assistant turn; marks such as <image> in it stay text."""
    return {"role": "assistant", "content": [part(text)]}


def told(item: dict[str, Any], text: str, prompt: str, options: Options) -> list[dict[str, Any]]:
    """A medium and the prompt, answered by the text; with `draw` the text, answered by the medium."""
    if options.draw:
        return [ask(part(text)), {"role": "assistant", "content": [item]}]
    return [ask(item, part(prompt)), answer(text)]


def part(text: str) -> dict[str, Any]:
    """A part of text."""
    return {"type": "text", "text": text}


def medium(kind: str, value: Any) -> dict[str, Any]:
    """A part for a path, URL, base64, bytes, or a table's {"bytes", "path"}."""
    return {"type": kind, kind: value}


def identified(record: Mapping[str, Any], usual: Sequence[str], options: Options) -> dict[str, str]:
    """`{"id": …}` if the record has one."""
    value = pick(record, "id", usual, options)
    return {} if value is None else {"id": as_text(value, "id")}
