"""Chunks cover every row once, and processes share them without loss of order or of errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.rows import Chunk, chunks_of, in_order, open_data, placed, rows_of
from lmms_engine.errors import UserError


def ids(path: Path, limit: int | None = None) -> list[str]:
    source = open_data(path, limit=limit)
    return [raw["id"] for chunk in chunks_of(source) for _, raw in rows_of(source, chunk)]


def test_chunks_cover_every_row_once_in_order(tmp_path: Path) -> None:
    rows = [{"id": str(n), "messages": "[]"} for n in range(150)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:70], "", *lines[70:]]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=40)
    expected = [row["id"] for row in rows]
    assert ids(tmp_path / "a.jsonl") == expected   # without the blank line
    assert ids(tmp_path / "a.parquet") == expected
    assert ids(tmp_path / "a.parquet", limit=50) == expected[:50]
    assert [chunk[:3] for chunk in chunks_of(open_data(tmp_path / "a.parquet"))][-1] == (3, 0, 30)


def slow_first(chunk: Chunk) -> int:
    if chunk.start == 0:
        sum(range(2_000_000))   # the others are done before
    return chunk.start


def dies(chunk: Chunk) -> int:
    if chunk.start == 2:
        os._exit(9)
    return chunk.start


def fails(chunk: Chunk) -> int:
    raise UserError(f"row {chunk.start}")


CHUNKS = [Chunk(0, n, n + 1) for n in range(8)]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(in_order(slow_first, CHUNKS, workers)) == [(chunk, chunk.start) for chunk in CHUNKS]


def test_a_process_that_dies_is_said_and_does_not_hang() -> None:
    with pytest.raises(UserError, match="a worker process died"):
        list(in_order(dies, CHUNKS, 2))


def test_an_error_in_a_process_is_the_callers() -> None:
    with pytest.raises(UserError, match=r"^row 0$"):
        list(in_order(fails, CHUNKS, 2))


def test_a_place_is_named_once() -> None:
    assert placed("a.jsonl, line 1", "is bad") == "a.jsonl, line 1: is bad"
    assert placed("a.jsonl, line 1", "a.jsonl, line 1 is not JSON") == "a.jsonl, line 1 is not JSON"
