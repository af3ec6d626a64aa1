"""Damaged rows and files: only BadRow and UserError come out, nothing hangs, every row is given or named.

Media have a file of their own, test_fuzz_media.py.

Suite: a few hundred cases, always the same. `FUZZ_CASES=2000 pytest tests/datasets/test_fuzz.py` runs so many
new ones of each test.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.schema import Row, dump_row, parse_row
from lmms_engine.datasets.sources import open_source, text
from lmms_engine.errors import BadRow, UserError
from tests.datasets.fuzzing import cases, damaged, limited
from tests.datasets.toy_data import ids_of, make_job, make_loader, steps_of_epoch

FOLDER = Path("/data")

# Rows -------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "y", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": {"b": 2}, "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "meta": {"k": [1, 2]},
    },
    {
        "id": 7, "image": ["a.png", {"bytes": b"123", "path": "b.png"}], "system": "s",
        "conversations": [{"from": "human", "value": "<image>\nsee <image>"}, {"from": "gpt", "value": "ok"}],
    },
    {
        "messages": [
            {"role": "user", "content": [
                {"type": "video", "video": "data:video/mp4;base64,AAAA", "start": 1, "end": 2.5, "fps": 1},
                {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                {"type": "image"}, "text"]},
            {"role": "assistant", "content": "z"},
        ],
        "images": ["file:///x%20y.png"], "tools": '[{"name": "g"}]', "source": "w",
    },
]  # fmt: skip
WORDS = [
    "", "<image>", "<video>", "http://[", "data:image/png;base64,!", "data:,", "file://", "file://[",
    "\ud800", "\0", "{", "[]", "null", "text", "user", "function_call", "/9j/" + "A" * 70, "[" * 3000,
    "x" * 5000, "1e999",
]  # fmt: skip


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What `call` gives, or its BadRow, or its error of one of these types."""
    with limited():
        try:
            return call()
        except (BadRow, *errors) as error:
            return error


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.just(10**400) | st.floats()
    | st.binary(max_size=4) | st.sampled_from(WORDS) | st.text(max_size=6)
)  # fmt: skip
KEYS = st.sampled_from(
    ["id", "messages", "conversations", "role", "from", "content", "value", "type", "text", "image", "images",
     "video", "audio", "url", "path", "bytes", "data", "detail", "tools", "tool_calls", "function", "name",
     "function_call", "arguments", "parameters", "start", "end", "fps", "meta", "source", "system"]
) | st.text(max_size=4)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def keys_of(value: dict | list) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


@st.composite
def odd_rows(draw: st.DrawFn) -> Any:
    """A good row in which some places hold something else, are missing, or are there twice."""
    row = copy.deepcopy(draw(st.sampled_from(ROWS)))
    for _ in range(draw(st.integers(1, 4))):
        at: Any = row
        while True:
            inner = [key for key in keys_of(at) if isinstance(at[key], dict | list)]
            if not inner or draw(st.booleans()):
                break
            at = at[draw(st.sampled_from(inner))]
        here = keys_of(at)
        how = draw(st.sampled_from(["change", "change", "add", "remove"]))
        if how == "add" or not here:
            at.append(draw(VALUES)) if isinstance(at, list) else at.update({draw(KEYS): draw(VALUES)})
        elif how == "change":
            at[draw(st.sampled_from(here))] = draw(VALUES)
        else:
            del at[draw(st.sampled_from(here))]
    return row


@cases(200)
@given(odd_rows())
def test_any_object_is_a_row_or_a_bad_row(obj: Any) -> None:
    row = outcome(lambda: parse_row(obj, FOLDER))
    if isinstance(row, BadRow):
        return
    assert isinstance(row, Row)
    pickle.dumps(row)
    json.dumps(dump_row(row.model_copy(update={"meta": {}})), ensure_ascii=False).encode()
    for part in row.media():
        assert sum(source is not None for source in (part.path, part.url, part.bytes, part.frames)) == 1


@cases(100)
@given(VALUES)
def test_any_value_is_a_row_or_a_bad_row(value: Any) -> None:
    row = outcome(lambda: parse_row(value, FOLDER))
    assert isinstance(row, BadRow) or row.messages


@cases(100)
@given(odd_rows())
def test_a_row_that_was_read_can_be_written_and_read_again(obj: Any) -> None:
    row = outcome(lambda: parse_row(obj, FOLDER))
    if isinstance(row, Row):
        assert parse_row(dump_row(row), FOLDER).messages == row.messages


# Files ------------------------------------------------------------------------------------------------

COUNT = 12
TABLE = pa.table(
    {
        "id": [f"r{i}" for i in range(COUNT)],
        "messages": [
            [{"role": "user", "content": f"{i} plus {i}"}, {"role": "assistant", "content": str(2 * i)}]
            for i in range(COUNT)
        ],
    }
)


def written(write: Callable[[Any], Any]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def write_ipc(make: Callable[..., Any], compression: str | None = None) -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=compression)

    def write(out: io.BytesIO) -> None:
        with make(out, TABLE.schema, options=options) as writer:
            for batch in TABLE.to_batches(max_chunksize=5):
                writer.write_batch(batch)

    return written(write)


LINES = [json.dumps(row).encode() for row in TABLE.to_pylist()]
CELLS = "".join(
    f'r{i},"{json.dumps(row["messages"]).replace(chr(34), chr(34) * 2)}"\r\n'
    for i, row in enumerate(TABLE.to_pylist())
)
FILES = {
    "lines.jsonl": b"\n".join(LINES) + b"\n",
    "list.json": b"[" + b",\n".join(LINES) + b"]",
    "plain.parquet": written(lambda out: pq.write_table(TABLE, out, row_group_size=5)),
    "packed.parquet": written(lambda out: pq.write_table(TABLE, out, row_group_size=5, compression="zstd")),
    "checked.parquet": written(
        lambda out: pq.write_table(TABLE, out, row_group_size=5, write_page_checksum=True)
    ),
    "cells.csv": b"id,messages\r\n" + CELLS.encode(),
    "file.arrow": write_ipc(pa.ipc.new_file),
    "stream.arrow": write_ipc(pa.ipc.new_stream),
    "packed.arrow": write_ipc(pa.ipc.new_file, "zstd"),
}
FILES["slots.jsonl"] = FILES["lines.jsonl"]


def read_epoch(path: Path) -> tuple[int, int]:
    """Rows of the file; rows given, skipped by name, or blank."""
    source = open_source(DatasetEntry(path=str(path)), by_line=False)
    rows = [raw for shard in range(source.num_shards) for _, raw in source.rows(shard)]
    assert source.slotted or source.num_rows == len(rows)
    blank = sum(raw is None for raw in rows)
    job = make_job(path, on_bad_row="skip", max_skip_fraction=1.0, num_logical_shards=2)
    loader = make_loader(job, stand_in=False)
    given = ids_of(steps_of_epoch(loader))
    return len(rows), len(given) + len(loader.take_skipped()) + blank


@pytest.mark.parametrize("name", list(FILES))
@cases(40)
@given(data=st.data())
def test_of_a_damaged_file_every_row_is_given_or_named(name: str, data: st.DataObject) -> None:
    large = 0 if name.startswith("slots") else text.NUMBERED_BYTES
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "NUMBERED_BYTES", large)
        path = Path(folder) / name
        path.write_bytes(data.draw(damaged(FILES[name])))
        result = outcome(lambda: read_epoch(path), UserError)
    if isinstance(result, UserError):
        assert name in str(result)
    else:
        assert result[0] == result[1]
