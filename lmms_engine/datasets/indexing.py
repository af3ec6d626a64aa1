"""Byte offsets of JSON and CSV rows in a file, so that any row can be read without those before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

BLOCK_BYTES = 8 * 1024 * 1024
MAX_ELEMENT_BYTES = 256 * 1024 * 1024
GAP = re.compile(r"[ \t\r\n,]*")
# At most about this much is read to reach a row, for 16 bytes of index.
STRIDE_BYTES = 64 * 1024


class RowIndex:
    """Where rows begin. Sparse: `starts[i]` is the offset of row `numbers[i]`; others are found by newlines.

    ends: offset after each row, for indices that hold every row (`numbers` is then 0, 1, 2, …).
    """

    def __init__(
        self, starts: np.ndarray, numbers: np.ndarray, count: int, ends: np.ndarray | None = None
    ) -> None:
        self._starts = starts
        self._numbers = numbers
        self._count = count
        self._ends = ends

    def __len__(self) -> int:
        return self._count

    def read(self, stream: BinaryIO, row: int) -> bytes:
        """The bytes of a row, line end included."""
        i = int(np.searchsorted(self._numbers, row, side="right")) - 1
        start = int(self._starts[i])
        if self._ends is not None:
            stream.seek(start)
            return stream.read(int(self._ends[i]) - start)
        here = int(self._numbers[i])
        # Rows are mostly read in order: the stream often stands at the row already.
        at = getattr(self, "_at", None)
        if at is not None and at[0] is stream and here <= at[1] <= row:
            here, start = at[1], at[2]
        stream.seek(start)
        for _ in range(row - here):
            stream.readline()
        line = stream.readline()
        self._at = (stream, row + 1, stream.tell())
        return line

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_at"}


def index_lines(stream: BinaryIO, most: int | None = None) -> RowIndex:
    """Rows are lines, cut at the byte 0x0A and nowhere else: other line separators are legal inside JSON
    strings. most: how many are wanted; nothing is read beyond the block that holds the last of them."""
    starts, numbers = [0], [0]
    offset = lines = 0
    last = b""
    while (most is None or lines < most) and (block := stream.read(BLOCK_BYTES)):
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + 1
        if len(ends):
            # First line start at or after each multiple of the stride.
            wanted = np.unique(np.searchsorted(ends, np.arange(0, len(block), STRIDE_BYTES) + 1))
            wanted = wanted[wanted < len(ends)]
            starts.extend((offset + ends[wanted]).tolist())
            numbers.extend((lines + 1 + wanted).tolist())
        offset += len(block)
        lines += len(ends)
        last = block[-1:]
    count = lines + (1 if last not in (b"", b"\n") else 0)
    count = count if most is None else min(count, most)
    return RowIndex(np.array(starts, dtype=np.int64), np.array(numbers, dtype=np.int64), count)


def index_csv(stream: BinaryIO) -> tuple[bytes, RowIndex]:
    """The header record and the rows after it. A record ends at a newline outside quotes.

    Outside are those newlines that an even number of quotes stands before: a quote inside a quoted field is
    written twice. What follows an open quote becomes one last row, which is bad.
    """
    ends: list[np.ndarray] = []
    offset = quotes = 0
    while block := stream.read(BLOCK_BYTES):
        data = np.frombuffer(block, dtype=np.uint8)
        newlines = np.flatnonzero(data == 10)
        before = quotes + np.searchsorted(np.flatnonzero(data == 34), newlines)
        ends.append(offset + newlines[before % 2 == 0] + 1)
        quotes += int((data == 34).sum())
        offset += len(block)
    cuts = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
    if cuts[-1] != offset:
        cuts = np.append(cuts, offset)
    stream.seek(0)
    header = stream.read(int(cuts[1])) if len(cuts) > 1 else b""
    rows = cuts[1:]
    count = max(len(rows) - 1, 0)
    return header, RowIndex(rows[:-1], np.arange(count), count, rows[1:])


def index_json_list(stream: BinaryIO) -> RowIndex:
    """Rows are the elements of a JSON list. What cannot be decoded becomes one last row, which is bad."""
    spans = list(_elements(stream))
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    ends = np.array([end for _, end in spans], dtype=np.int64)
    return RowIndex(starts, np.arange(len(spans)), len(spans), ends)


def _elements(stream: BinaryIO) -> Iterator[tuple[int, int]]:
    """Byte spans of the elements of a list. Holds one block and one element in memory.

    Decoded as Latin-1, one character is one byte, and the bytes of a UTF-8 letter are never mistaken for
    JSON's
    own characters: positions in the text are then offsets in the file.
    """
    decoder = json.JSONDecoder()
    text, base = "", 0  # `text` begins at offset `base` of the file
    at, more, opened = 0, True, False
    while more:
        block = stream.read(BLOCK_BYTES)
        more = bool(block) and len(text) - at <= MAX_ELEMENT_BYTES
        text, base, at = text[at:] + block.decode("latin-1"), base + at, 0
        if not opened:
            at, opened = text.index("[") + 1, True
        while True:
            at = GAP.match(text, at).end()
            if at == len(text):
                break
            if text[at] == "]":
                return
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                if more:
                    break
                yield base + at, stream.seek(0, 2)
                return
            if end == len(text) and more:  # the element may go on in the next block
                break
            yield base + at, base + end
            at = end
