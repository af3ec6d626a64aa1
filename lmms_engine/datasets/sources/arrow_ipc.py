"""Where the record batches of an Arrow IPC file lie, read from their headers alone.

The library gives batches only in turn, or all of them, and ends at the first that is damaged. Here each one
is found by the lengths in front of it (https://arrow.apache.org/docs/format/Columnar.html, "Encapsulated
message format"): a body that is damaged costs its own rows, and a file may lie elsewhere. A header that makes
no sense hides all that follows: this rest counts as one row, which is bad.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from lmms_engine.datasets.sources.base import one_line
from lmms_engine.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from lmms_engine.datasets.sources.files import File

MAGIC = b"ARROW1"
CONTINUED = 0xFFFFFFFF
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_ROWS_PER_BYTE = 4096  # of a body; more is a damaged header


class Batch(NamedTuple):
    """A record batch in its file; damage: why it cannot be read, if its header is no good."""

    offset: int
    size: int
    rows: int
    damage: str = ""


@dataclass(frozen=True)
class Batches:
    """Schema and batches of a file. before: (offset, size) of the schema and of all dictionaries. replaced: a
    later dictionary may take the place of an earlier one, as in the stream format."""

    schema: pa.Schema
    before: tuple[tuple[int, int], ...]
    batches: tuple[Batch, ...]
    replaced: bool

    def read(self, stream: Any, number: int) -> pa.RecordBatch:
        """A batch, decoded; `stream` is a NativeFile. Raises what the library does if it is damaged."""
        import pyarrow as pa

        at = self.batches[number]
        if len(self.before) == 1:
            message = pa.ipc.read_message(_cut(stream, at.offset, at.size))
            return pa.ipc.read_record_batch(message, self.schema)
        # Dictionaries can only be given to the library as part of a stream.
        before = [place for place in self.before if place[0] < at.offset or not self.replaced]
        parts = [_cut(stream, *place) for place in (*before, (at.offset, at.size))]
        with pa.ipc.open_stream(pa.py_buffer(b"".join(parts))) as reader:
            return reader.read_next_batch()


def _cut(stream: Any, offset: int, size: int) -> pa.Buffer:
    stream.seek(offset)
    return stream.read_buffer(size)


def batches_of(file: File) -> Batches:
    """The batches of a file in the stream or the file format; UserError if it is neither."""
    import pyarrow as pa

    with file.open() as stream:
        replaced = stream.read(len(MAGIC)) != MAGIC
        at = 0 if replaced else 8
        try:
            kind, size, _ = _message(stream, at, file.size)
            if kind != SCHEMA:
                raise ValueError("it does not begin with a schema")
            stream.seek(at)
            schema = pa.ipc.read_schema(pa.py_buffer(stream.read(size)))
        except (OSError, ValueError, pa.ArrowException) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"cannot read {file} as Arrow: {one_line(error)}") from None
        before, batches = [(at, size)], []
        at += size
        while True:
            try:
                kind, size, rows = _message(stream, at, file.size)
            except UserError:
                raise
            except ValueError as error:
                batches.append(Batch(at, file.size - at, 1, f"from byte {at} on: {one_line(error)}"))
                break
            if not size:
                break
            if kind == DICTIONARY:
                before.append((at, size))
            else:
                batches.append(Batch(at, size, rows))
            at += size
    return Batches(schema, tuple(before), tuple(batches), replaced)


def _message(stream: BinaryIO, at: int, file_size: int) -> tuple[int, int, int]:
    """(kind, bytes in all, rows) of the message at an offset; (0, 0, 0) at the end of the stream."""
    stream.seek(at)
    prefix = stream.read(8)
    if len(prefix) < 4:
        if prefix:
            raise ValueError("cut off within a header")
        return 0, 0, 0
    (length,) = struct.unpack_from("<I", prefix)
    start = 4
    if length == CONTINUED:   # files before format 0.15 have the length alone
        if len(prefix) < 8:
            raise ValueError("cut off within a header")
        (length,) = struct.unpack_from("<I", prefix, 4)
        start = 8
    if length == 0:
        return 0, 0, 0
    if length > min(MAX_HEADER_BYTES, file_size - at - start):
        raise ValueError(f"a header of {length} bytes")
    stream.seek(at + start)
    kind, body, rows = _header(stream.read(length))
    if kind not in (SCHEMA, DICTIONARY, RECORDS) or not 0 <= body <= file_size - at - start - length:
        raise ValueError("a header that makes no sense, or a body that is cut off")
    if not 0 <= rows <= body * MAX_ROWS_PER_BYTE:
        raise ValueError(f"{rows} rows in {body} bytes")
    return kind, start + length + body, rows


def _header(data: bytes) -> tuple[int, int, int]:
    """(kind, bytes of the body, rows) from a Message flatbuffer."""
    try:
        table = struct.unpack_from("<I", data)[0]
        kind = _field(data, table, 1, "<B")
        body = _field(data, table, 3, "<q")
        if kind != RECORDS:
            return kind, body, 0
        at = _slot(data, table, 2)
        records = at + struct.unpack_from("<I", data, at)[0]
        rows = _field(data, records, 0, "<q")
        nodes = _slot(data, records, 1)
        if nodes:
            nodes += struct.unpack_from("<I", data, nodes)[0]
            count = struct.unpack_from("<I", data, nodes)[0]
            if count and struct.unpack_from("<q", data, nodes + 4)[0] != rows:
                raise ValueError("a batch and its first column differ in length")
        return kind, body, rows
    except struct.error:
        raise ValueError("a header that makes no sense") from None


def _slot(data: bytes, table: int, number: int) -> int:
    """Offset of a table's field; 0 if it is not there and has its default."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0 or table < 0:
        raise ValueError("a header that makes no sense")
    if 4 + 2 * number + 2 > struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _field(data: bytes, table: int, number: int, form: str) -> int:
    at = _slot(data, table, number)
    return struct.unpack_from(form, data, at)[0] if at else 0
