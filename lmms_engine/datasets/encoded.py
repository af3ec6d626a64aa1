"""Encoded data sets: rows that `data-prep encode` has brought through a processor, ready to be packed.

    data/mine-encoded/
        encoded.json                  the key, the rows of the set it was made from, where each lies
        part-00000-of-00012.arrow     samples, in batches small enough to read one row by its address

A run reads such a folder as any other data set and gets the batches that the rows themselves would give, bit
for bit: every row keeps its address, rows that could not be used are kept with their reason, and the order of
the data is computed from the shards of the original. The key (`identity`) names everything that a sample
depends on; a run with another processor is refused with the parts that differ.

Pictures and clips are stored as the patches that the model reads. Keeping references instead would save next
to nothing: decoding and resizing are most of the work for such a row, its text a small part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.sources import ENCODED
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    import pyarrow as pa

    from lmms_engine.config import DatasetEntry
    from lmms_engine.datasets.processor import Processor

FORMAT = 2   # raise it when the same row, settings and processor give another sample, or the files change
TOKEN_FIELDS = ("input_ids", "labels", "loss_weights", "position_ids")
BATCH_BYTES = 128 * 1024   # of a record batch, what is unpacked to reach one row; a larger row has its own
BATCH_ROWS = 64
MAX_LEVELS = 1 << 16       # different values of a tensor that is stored as numbers of them
OPEN_FILES = 32
HELD_BATCHES = 8

T = TypeVar("T")


@dataclass(frozen=True)
class EncodedRow:
    """A row that is a sample already. tensors: those of TOKEN_FIELDS, and media as `media.<key>`."""

    id: str | None
    tensors: Mapping[str, Tensor]
    truncated: bool = False

    @classmethod
    def of(cls, sample: Sample, row_id: str | None) -> EncodedRow:
        """What is kept of a sample: all but its address."""
        fields = {name: getattr(sample, name) for name in TOKEN_FIELDS}
        media = {f"media.{key}": tensor for key, tensor in sample.media.items()}
        tensors = {name: tensor for name, tensor in {**fields, **media}.items() if tensor is not None}
        return cls(row_id, tensors, sample.truncated)

    def sample(self, ref: RowRef) -> Sample:
        """The sample, under the address of this run."""
        fields = {name: self.tensors.get(name) for name in TOKEN_FIELDS}
        media = {
            name.removeprefix("media."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("media.")
        }
        ref = ref if self.id is None else ref._replace(id=self.id)
        return Sample(row=ref, media=media, truncated=self.truncated, **fields)


Content = EncodedRow | BadRow | None   # None: a blank line


# The key ---------------------------------------------------------------------------------------------


def identity(processor: Processor) -> dict[str, Any]:
    """What samples of a processor depend on, flat, by names that people know; JSON-able.

    A processor of one's own without `identity` is known by its fingerprint alone.
    """
    named = getattr(processor, "identity", None) or {"processor": processor.fingerprint}
    return {"format": FORMAT, **json.loads(json.dumps(_flat(named), default=str))}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every part of two keys that differs, with both values."""
    return [
        f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]


def check_encoded(sources: Iterable[Any], processor: Callable[[], Processor]) -> None:
    """UserError if an encoded source was made with other settings than those of the run's processor."""
    for source in sources:
        if isinstance(source, EncodedSource):
            found = differences(source.identity, identity(processor()))
            if found:
                raise UserError(
                    f"dataset '{source.name}' was encoded with other settings than this run's:"
                    f" {'; '.join(found)}. Set these back, or encode the data again (data-prep encode)"
                )


# Tensors as bytes ------------------------------------------------------------------------------------


def pack_tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    """A tensor as a record. Long float32 ones of few values (a picture has 256 a channel) as numbers of them.

    The bits are kept: values are told apart by their bits, not by `==`.
    """
    import pyarrow as pa

    array = np.ascontiguousarray(tensor.numpy())
    record = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    if array.dtype == np.float32 and array.size > 1024:
        found = pa.array(array.reshape(-1).view(np.int32)).dictionary_encode()
        levels = found.dictionary.to_numpy()
        if len(levels) <= min(MAX_LEVELS, array.size // 4):
            numbers = found.indices.to_numpy().astype(np.uint8 if len(levels) <= 256 else np.uint16)
            return {**record, "levels": levels.tobytes(), "data": numbers.tobytes()}
    return {**record, "levels": None, "data": array.tobytes()}


def unpack_tensor(record: Mapping[str, Any]) -> Tensor:
    """The tensor of a record, whose data are anything that gives its bytes; memory of its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data, shape = record["data"], record["shape"]
    if record["levels"] is None:
        return torch.from_numpy(np.frombuffer(data, record["dtype"]).reshape(shape).copy())
    levels = pa.array(np.frombuffer(record["levels"], record["dtype"]))
    kind = pa.uint8() if len(levels) <= 256 else pa.uint16()
    numbers = pa.Array.from_buffers(kind, math.prod(shape), [None, pa.py_buffer(data)])
    # Arrow's look-up, a third of NumPy's time: most of what reading a picture costs.
    return torch.from_dlpack(pc.take(levels, numbers, boundscheck=False)).view(shape)


# Files -----------------------------------------------------------------------------------------------


def _schema() -> pa.Schema:
    import pyarrow as pa

    tensor = pa.struct(
        [
            ("name", pa.string()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("levels", pa.binary()),
            ("data", pa.binary()),
        ]
    )
    bad = pa.struct([("kind", pa.string()), ("reason", pa.string())])
    columns = [("id", pa.string()), ("bad", bad), ("truncated", pa.bool_()), ("tensors", pa.list_(tensor))]
    return pa.schema(columns)


def _record(content: Content) -> dict[str, Any]:
    if isinstance(content, EncodedRow):
        tensors = [pack_tensor(name, tensor) for name, tensor in content.tensors.items()]
        return {"id": content.id, "bad": None, "truncated": content.truncated, "tensors": tensors}
    bad = None if content is None else {"kind": content.kind, "reason": str(content)}
    return {"id": None, "bad": bad, "truncated": None, "tensors": None}


def _content(batch: pa.RecordBatch, row: int) -> Content:
    one = {name: batch.column(name)[row] for name in batch.schema.names}
    if one["tensors"].is_valid:
        fields = one["tensors"].values.flatten()
        names, dtypes, shapes, levels = (field.to_pylist() for field in fields[:4])
        data = [item.as_buffer() for item in fields[4]]   # not copied
        tensors = {
            name: unpack_tensor(dict(zip(("dtype", "shape", "levels", "data"), rest, strict=True)))
            for name, *rest in zip(names, dtypes, shapes, levels, data, strict=True)
        }
        return EncodedRow(one["id"].as_py(), tensors, one["truncated"].as_py())
    bad = one["bad"].as_py()
    return None if bad is None else BadRow(bad["kind"], bad["reason"])


def write_part(path: Path, contents: Iterable[Content]) -> list[int]:
    """Writes a file of rows; gives the number of rows of each of its batches."""
    import pyarrow as pa

    schema, sizes = _schema(), []
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for batch in _batches(map(_record, contents)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
            sizes.append(len(batch))
    return sizes


def _batches(records: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for record in records:
        own = sum(len(item["data"]) for item in record["tensors"] or ())
        if batch and (size + own > BATCH_BYTES or len(batch) == BATCH_ROWS):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += own
    if batch:
        yield batch


class _Last(OrderedDict[Any, T]):
    """Keeps the `limit` values used last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def get_or(self, key: Any, make: Callable[[], T]) -> T:
        if key in self:
            self.move_to_end(key)
            return self[key]
        self[key] = value = make()
        if len(self) > self._limit:
            self.popitem(last=False)
        return value


class EncodedSource:
    """The rows of an encoded data set under the addresses of the original; satisfies the Source protocol."""

    random_access = True
    streamed = False
    slotted = False
    rows_each = 1.0

    def __init__(self, entry: DatasetEntry, name: str) -> None:
        self.path = Path(entry.path)
        self.name, self.weight = name, entry.weight
        meta = read_meta(self.path)
        self.identity: dict[str, Any] = meta["identity"]
        self.row_bytes: int = meta["row_bytes"]   # of the original: the order of the data depends on it
        self._counts: list[int] = meta["rows"]
        self._starts = np.cumsum([0, *self._counts[:-1]])
        self._parts = [item["file"] for item in meta["parts"]]
        self._ends = np.cumsum([sum(item["batches"]) for item in meta["parts"]])
        self._batch_ends = [np.cumsum(item["batches"]) for item in meta["parts"]]
        self.fingerprint: str = meta["content"]
        for item in meta["parts"]:
            file = self.path / item["file"]
            if not file.is_file() or file.stat().st_size != item["bytes"]:
                raise UserError(f"dataset '{entry.path}': {file} is missing or not whole; encode it again")
        if entry.limit is not None and entry.limit < sum(self._counts):
            left = entry.limit
            for shard, count in enumerate(self._counts):
                self._counts[shard] = min(count, left)
                left -= self._counts[shard]
            self.fingerprint += f"-first-{entry.limit}"
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._files: _Last[pa.ipc.RecordBatchFileReader] = _Last(OPEN_FILES)
        self._held: _Last[pa.RecordBatch] = _Last(HELD_BATCHES)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_files", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def num_shards(self) -> int:
        return len(self._counts)

    @property
    def num_rows(self) -> int:
        return sum(self._counts)

    def shard_rows(self, shard: int) -> int:
        return self._counts[shard]

    def folder(self, shard: int) -> Path:
        return self.path.absolute()

    def place(self, shard: int, row: int) -> str:
        part, _, _ = self._find(shard, row)
        first = int(self._ends[part - 1]) if part else 0
        return f"{self.path.absolute() / self._parts[part]}, row {self._starts[shard] + row - first + 1}"

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Content]]:
        for row in range(start, self._counts[shard]):
            yield row, self.read(shard, row)

    def read(self, shard: int, row: int) -> Content:
        if not 0 <= row < self._counts[shard]:
            raise IndexError(f"shard {shard} has {self._counts[shard]} rows, asked for {row}")
        if self._pid != os.getpid():   # forked: open files share a position with the parent
            self._forget()
        part, batch, offset = self._find(shard, row)
        held = self._held.get_or((part, batch), lambda: self._batch(part, batch))
        return _content(held, offset)

    def _find(self, shard: int, row: int) -> tuple[int, int, int]:
        """Part, batch in it, row in that."""
        at = int(self._starts[shard]) + row
        part = int(np.searchsorted(self._ends, at, side="right"))
        at -= int(self._ends[part - 1]) if part else 0
        ends = self._batch_ends[part]
        batch = int(np.searchsorted(ends, at, side="right"))
        return part, batch, at - (int(ends[batch - 1]) if batch else 0)

    def _batch(self, part: int, batch: int) -> pa.RecordBatch:
        import pyarrow as pa

        file = self.path / self._parts[part]
        try:
            opened = self._files.get_or(part, lambda: pa.ipc.open_file(pa.memory_map(str(file))))
            found = opened.get_batch(batch)
            found.validate(full=True)   # damaged offsets would read memory outside it
        except (OSError, ValueError, MemoryError, OverflowError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{file} is damaged: {reason}; encode the data again") from None
        return found


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of `encoded.json`; UserError if it is not what this version writes."""
    file = folder / ENCODED
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        legal = meta["identity"]["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error!r}); encode the data again") from None
    if not legal:
        raise UserError(
            f"{file}: the set has format {meta['identity']['format']} (legal: {FORMAT}); encode it again"
        )
    return meta


def meta_of(
    identity: Mapping[str, Any], rows: Sequence[int], row_bytes: int, parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What `encoded.json` holds. rows, row_bytes: of the original source.

    parts: `file`, `bytes`, `batches`, and `content`, a digest of the rows and media it was made from.
    """
    content = [identity, list(rows), [part["content"] for part in parts]]
    mark = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {
        "identity": dict(identity),
        "rows": list(rows),
        "row_bytes": row_bytes,
        "content": mark,
        "parts": [dict(part) for part in parts],
    }
