"""Encoded sets: the same batches as the rows themselves, bit for bit, and refused when anything differs."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.encoded import (
    TOKEN_FIELDS,
    Content,
    EncodedRow,
    EncodedSource,
    identity,
    meta_of,
    pack_tensor,
    unpack_tensor,
    write_part,
)
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import parse_row
from lmms_engine.datasets.sources import ENCODED, open_source
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import (
    ByteProcessor,
    content,
    make_job,
    make_loader,
    steps_of_epoch,
    text_row,
    write_jsonl,
)


def encode(data: Path, out: Path, part_rows: int = 17) -> Path:
    """The set in `data` through the byte processor, in parts of a few rows."""
    source, processor = open_source(DatasetEntry(path=str(data))), ByteProcessor()
    contents: list[Content] = []
    for shard in range(source.num_shards):
        for row, raw in source.rows(shard):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                parsed = None if raw is None else parse_row(raw, source.folder(shard))
                sample = parsed and processor(parsed, RowRef("encode", shard, row, ""))
                contents.append(sample and EncodedRow.of(sample, parsed.id))
            except BadRow as bad:
                contents.append(bad)
    out.mkdir()
    parts = []
    for first in range(0, len(contents), part_rows):
        file = out / f"{first}.arrow"
        batches = write_part(file, contents[first : first + part_rows])
        mark = f"content {first}"
        parts.append({"file": file.name, "bytes": file.stat().st_size, "batches": batches, "content": mark})
    rows = [source.shard_rows(shard) for shard in range(source.num_shards)]
    (out / ENCODED).write_text(json.dumps(meta_of(identity(processor), rows, source.row_bytes, parts)))
    return out


@pytest.fixture(params=["jsonl", "parquet"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """70 rows of 10 to 100 tokens; some with a picture, some of no use, in JSONL some blank lines."""
    (tmp_path / "a.png").write_bytes(b"picture")
    made = [text_row(f"r{i}", 10 + i * 7 % 90) for i in range(70)]
    for row in made[::3]:
        row["image"] = "a.png"
    made[20]["image"] = "missing.png"
    made[5]["id"] = None
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(made), tmp_path / "rows.parquet", row_group_size=25)
        return tmp_path / "rows.parquet"
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    path.write_text(path.read_text().replace("\n", "\n\n", 3))
    return path


def batches(path: Path, workers: int = 0, **keys: Any) -> list[Any]:
    """Everything that a run sees of an epoch and a half, without the name of the source."""
    keys = {"on_bad_row": "skip", "gradient_accumulation_steps": 2, **keys}
    loader = make_loader(make_job(path, dataloader_num_workers=workers, **keys))
    steps = steps_of_epoch(loader)
    loader.next_epoch()
    steps += [loader.next_step(), loader.next_step()]
    seen = [[_without_name(content(micro)) for micro in micros] for micros in steps]
    skipped = [record._replace(source="", id="") for record in loader.take_skipped()]
    loader.close()
    return [seen, skipped, loader.skipped_total, loader.progress()]


def _without_name(found: tuple[Any, ...]) -> tuple[Any, ...]:
    listed, refs, *rest = found
    return (listed, [(ref.shard, ref.row, ref.id.rpartition(":")[2]) for ref in refs], *rest)


@pytest.mark.parametrize(
    "keys", [{}, {"packing_strategy": "best_fit", "max_length": 60}, {"shuffle": False, "packing": False}]
)
def test_a_run_sees_the_batches_that_the_rows_give(rows: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    encoded = encode(rows, tmp_path / "encoded")
    expected = batches(rows, **keys)
    assert batches(encoded, **keys) == expected
    assert batches(encoded, workers=2, **keys) == expected
    kinds = {record.kind for record in expected[1]}
    assert kinds == {"media_missing", "overlong"}
    limited = [{"path": str(path), "limit": 31} for path in (rows, encoded)]
    of_rows, of_encoded = (batches([entry], **keys) for entry in limited)
    assert of_encoded == of_rows != expected


def test_windows_of_the_shuffle_are_those_of_the_rows(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on how large the original's rows are, and are here smaller than the set."""
    monkeypatch.setattr("lmms_engine.datasets.order.WINDOW_BYTES", 20 * 200)
    encoded = encode(rows, tmp_path / "encoded")
    assert batches(encoded, num_logical_shards=1) == batches(rows, num_logical_shards=1)


def test_a_bad_row_stops_the_run_as_it_would_have(rows: Path, tmp_path: Path) -> None:
    encoded = encode(rows, tmp_path / "encoded")
    said = r"17\.arrow, row \d+\), .*missing\.png does not exist.*on_bad_row=skip"
    with pytest.raises(UserError, match=said):
        batches(encoded, on_bad_row="stop")


def test_a_run_goes_on_in_the_middle_and_knows_other_content(rows: Path, tmp_path: Path) -> None:
    encoded = encode(rows, tmp_path / "encoded")
    job = make_job(encoded, on_bad_row="skip")
    loader = make_loader(job)
    loader.next_step()
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [content(micro) for micros in steps_of_epoch(loader) for micro in micros]
    again = make_loader(job)
    again.load_state_dict(state)
    assert [content(micro) for micros in steps_of_epoch(again) for micro in micros] == expected
    meta = json.loads((encoded / ENCODED).read_text())
    meta["content"] = "of other rows"
    (encoded / ENCODED).write_text(json.dumps(meta))
    with pytest.raises(UserError, match="content was"):
        make_loader(job).load_state_dict(state)


def test_another_processor_is_refused_with_the_part_that_differs(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = encode(rows, tmp_path / "encoded")
    monkeypatch.setattr(ByteProcessor, "fingerprint", "bytes-2")
    with pytest.raises(UserError, match=r"processor was 'bytes-1' and is 'bytes-2'\. Set these back, or"):
        make_loader(make_job(encoded))
    named = {"tokenizer": "t", "size": {"longest_edge": 7, "shortest_edge": 3}}
    monkeypatch.setattr(ByteProcessor, "identity", named, raising=False)
    meta = json.loads((encoded / ENCODED).read_text())
    meta["identity"] = {**identity(ByteProcessor()), "size.longest_edge": 9}
    (encoded / ENCODED).write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"this run's: size\.longest_edge was 9 and is 7\. Set"):
        make_loader(make_job(encoded))


@pytest.mark.parametrize("fault", ["cut", "gone", "garbled", "meta", "format"])
def test_a_set_that_is_not_whole_is_never_used(rows: Path, tmp_path: Path, fault: str) -> None:
    encoded = encode(rows, tmp_path / "encoded")
    part, meta = encoded / "17.arrow", encoded / ENCODED
    data = part.read_bytes()
    if fault == "cut":
        part.write_bytes(data[:-1])
    elif fault == "gone":
        part.unlink()
    elif fault == "garbled":
        part.write_bytes(data[:3000] + bytes(byte ^ 0x5A for byte in data[3000:-3000]) + data[-3000:])
    elif fault == "meta":
        meta.write_text(meta.read_text()[:-9])
    else:
        meta.write_text(meta.read_text().replace('"format": 2', '"format": 0'))
    with pytest.raises(UserError, match=r"damaged|not whole|has format 0"):
        batches(encoded)


def test_source_can_be_pickled_and_read_at_any_address(rows: Path, tmp_path: Path) -> None:
    source = open_source(DatasetEntry(path=str(encode(rows, tmp_path / "encoded"))))
    assert isinstance(source, EncodedSource)
    original = open_source(DatasetEntry(path=str(rows)))
    counts = [original.shard_rows(shard) for shard in range(original.num_shards)]
    assert [source.shard_rows(shard) for shard in range(source.num_shards)] == counts
    source.read(0, 0)
    other = pickle.loads(pickle.dumps(source))
    last = source.num_shards - 1
    one, two = (each.read(last, counts[last] - 1) for each in (source, other))
    assert torch.equal(one.tensors["input_ids"], two.tensors["input_ids"])
    with pytest.raises(IndexError):
        source.read(0, counts[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.randn(40, 60),                                       # too many values for numbers of them
        (torch.randint(0, 256, (30, 90)).float() / 127.5 - 1),
        (torch.randint(0, 700, (90, 90)).float() / 300),           # two bytes a number
        torch.tensor([0.0, -0.0, float("nan"), float("inf")]).repeat(900),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.tensor([3], dtype=torch.uint8),
    ],
)
def test_tensors_keep_every_bit(tensor: torch.Tensor) -> None:
    record = pack_tensor("t", tensor)
    found = unpack_tensor(record)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.numpy().tobytes() == tensor.numpy().tobytes()
    found.zero_()   # memory of its own
    assert unpack_tensor(record).numpy().tobytes() == tensor.numpy().tobytes()


def test_levels_are_used_where_they_save(tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, (64, 768)).float() / 127.5 - 1
    assert len(pack_tensor("t", tensor)["data"]) == tensor.numel()
    assert len(pack_tensor("t", torch.randn(64, 768))["data"]) == 4 * tensor.numel()


def test_every_field_of_a_sample_is_kept() -> None:
    fields = {field.name for field in dataclasses.fields(Sample)}
    assert fields == {*TOKEN_FIELDS, "media", "truncated", "row"}
