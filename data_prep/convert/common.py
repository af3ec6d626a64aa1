"""What the formats share: options, records of tables with their places, columns by usual names."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.rows import chunks_of, open_data, rows_of
from lmms_engine.errors import BadRow, UserError

TABLES = (".csv", ".tsv")

# (where a person finds it, what stands there)
Record = tuple[str, dict[str, Any] | BadRow]


@dataclass(frozen=True)
class Options:
    """Of a conversion. prompt: the question for data that has none; None: the format's own.

    columns: what a format calls it -> what this file calls it.
    """

    prompt: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def read_records(path: Path) -> Iterator[Record]:
    """The rows of CSV or TSV with a header, or of JSONL, JSON, Parquet or Arrow files."""
    if path.suffix.lower() in TABLES:
        yield from _read_csv(path)
        return
    source = open_data(path)
    for chunk in chunks_of(source):
        for row, raw in rows_of(source, chunk):
            yield source.place(chunk.shard, row), raw


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)   # pictures in base64 are long fields
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            while True:
                try:
                    record = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield f"{path}, line {reader.line_num}", BadRow("csv", f"is no row of a table: {error}")
                    continue
                place = f"{path}, line {reader.line_num}"
                names = reader.fieldnames or ()
                if None in record or None in record.values():
                    found = "more" if None in record else "fewer"
                    yield place, BadRow("csv", f"has {found} fields than the {len(names)} of the header")
                else:
                    yield place, record
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None


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
        where = f"any of {', '.join(usual)}; or name it by --columns {name}=…"
        raise BadRow("column", f"no {name}: it is looked for in {options.columns.get(name) or where}")
    return value


def as_text(value: Any, name: str) -> str:
    """A string or a number as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow("column", f"the {name} must be text, got a {type(value).__name__}")
    return str(value)


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
