"""Damage inside tables costs its own rows: they are named with the range that is lost, the stream goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.sources import open_source
from lmms_engine.datasets.sources.arrow_ipc import batches_of
from lmms_engine.datasets.sources.files import LocalFile
from lmms_engine.errors import BadRow, UserError
from tests.datasets.toy_data import ids_of, make_job, make_loader, steps_of_epoch, text_row

COUNT, GROUP = 90, 30
TABLE = pa.Table.from_pylist([text_row(f"r{i}", 12 + i % 20) for i in range(COUNT)])
KEYS = {"on_bad_row": "skip", "max_skip_fraction": 1.0}


def parquet(folder: Path, pages: int | None, **keys: object) -> Path:
    """Three row groups; in the second the ids' data page number `pages` is overwritten."""
    path = folder / "rows.parquet"
    pq.write_table(
        TABLE, path, row_group_size=GROUP, compression="zstd", use_dictionary=False, write_page_index=True,
        **{"data_page_size": 60, "write_batch_size": 4, **keys},
    )  # fmt: skip
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    begin = column.data_page_offset + column.total_compressed_size * (pages or 0) // 10
    data[begin + 25 : begin + 60] = b"\xa5" * 35
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("place", [0, 6])
def test_a_damaged_page_costs_the_rest_of_its_row_group(tmp_path: Path, place: int) -> None:
    path = parquet(tmp_path, place, write_page_checksum=True)
    loader = make_loader(make_job(path, **KEYS), stand_in=False)
    given = ids_of(steps_of_epoch(loader))
    skipped = loader.take_skipped()
    assert len(given) == len(set(given))
    assert sorted(int(i[1:]) for i in given if int(i[1:]) // GROUP != 1) == [*range(30), *range(60, 90)]
    lost = sorted((record.shard, record.row) for record in skipped)
    assert lost == [(1, row) for row in range(lost[0][1], GROUP)]
    assert len(given) + len(skipped) == COUNT
    first = 30 + lost[0][1] + 1
    span = f"{path}, rows {first} to 60, row group 1: cannot decode: "
    assert all(record.kind == "parquet" and record.reason.startswith(span) for record in skipped)
    with pytest.raises(UserError, match=rf"shard 1, row \d+ .*{re.escape(span)}.*on_bad_row=skip"):
        steps_of_epoch(make_loader(make_job(path), stand_in=False))
    source = open_source(DatasetEntry(path=str(path)))
    assert isinstance(source.read(1, GROUP - 1), BadRow)
    assert source.read(0, 5)["id"] == "r5"   # the file is opened anew after a failure


def ipc(path: Path, stream: bool, compression: str | None = None) -> list[tuple[int, int]]:
    """Three record batches; offset and size of each."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, TABLE.schema, options=options) as writer:
        writer.write_table(TABLE, max_chunksize=GROUP)
    return [(batch.offset, batch.size) for batch in batches_of(LocalFile(str(path))).batches]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_batch_costs_its_own_rows(tmp_path: Path, stream: bool, compression: str | None) -> None:
    path = tmp_path / "rows.arrow"
    (offset, size), following = ipc(path, stream, compression)[1:3]
    assert following[0] == offset + size
    data = bytearray(path.read_bytes())
    data[following[0] - size // 2 : following[0] - 8] = b"\xa5" * (size // 2 - 8)
    path.write_bytes(data)
    loader = make_loader(make_job(path, **KEYS), stand_in=False)
    given, skipped = ids_of(steps_of_epoch(loader)), loader.take_skipped()
    assert sorted(int(i[1:]) for i in given) == [*range(30), *range(60, 90)]
    assert sorted(record.row for record in skipped) == list(range(30, 60))
    span = f"{path}, rows 31 to 60, record batch 1: cannot decode: "
    assert all(record.reason.startswith(span) for record in skipped)
    with pytest.raises(UserError, match=re.escape(span)):
        steps_of_epoch(make_loader(make_job(path), stand_in=False))


def test_what_follows_a_damaged_header_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    offset, _ = ipc(path, stream=True)[1]
    data = bytearray(path.read_bytes())
    data[offset + 4 : offset + 8] = b"\xff\xff\xff\x7f"   # the header's length
    path.write_bytes(data)
    source = open_source(DatasetEntry(path=str(path)))
    assert source.num_rows == GROUP + 1
    assert source.read(0, GROUP - 1)["id"] == "r29"
    assert f"record batch 1: cannot decode: from byte {offset} on" in str(source.read(0, GROUP))


def test_dictionaries_and_empty_batches_are_read(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array(["a", "b", "a", "c"]).dictionary_encode(), "n": [1, 2, 3, 4]})
    for name, make in (("a.arrow", pa.ipc.new_stream), ("b.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
            writer.write_table(table.slice(0, 0))
        source = open_source(DatasetEntry(path=str(tmp_path / name)))
        assert [source.read(0, row) for row in (3, 0, 1, 2)] == [
            {"id": "c", "n": 4}, {"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "n": 3}
        ]  # fmt: skip
