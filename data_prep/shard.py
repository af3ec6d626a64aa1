"""`data-prep shard`: a data set rewritten as Parquet shards of about equal size, media inside or beside.

Two passes. The first parses every row and adds up its size; the rows, in their order, are then cut where the
sum reaches each shard's part. The second writes the shards, in any number of processes. What is written lies
in a folder beside the output until all of it is there, so a call that was cut off is repeated and goes on
with the shards that are missing.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from data_prep.rows import Chunk, chunks_of, in_order, open_data, placed, progress_bar, rows_of
from data_prep.write import whole
from lmms_engine.datasets.schema import MediaPart, Message, Row, parse_row
from lmms_engine.datasets.sources import Source
from lmms_engine.errors import BadRow, UserError

Media = Literal["embed", "relative"]
DEFAULT_SIZE_MB = 512
GROUP_BYTES = 32 << 20   # of a row group: what a reader has in memory at least
GROUP_ROWS = 1024
MARKER = ".shards"   # without a suffix that readers take for data


class Sizes(NamedTuple):
    """Bytes of each usable row of a chunk."""

    rows: array


class Shard(NamedTuple):
    """Rows first to stop - 1 of the data set, blank lines not counted."""

    number: int
    first: int
    stop: int


@dataclass
class Measure:
    """Sizes of a chunk's rows; goes to the worker processes. A row that cannot be used is a UserError."""

    source: Source
    media: Media

    def __call__(self, chunk: Chunk) -> Sizes:
        """Text, and what lies in the media that will be inside."""
        sizes = array("Q")
        for number, raw in rows_of(self.source, chunk):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = parse_row(raw, self.source.folder(chunk.shard))
                media = sum(self._size(part) for part in row.media())
            except BadRow as bad:
                hint = "(`data-prep validate --fix` writes a copy without such rows)"
                place = placed(self.source.place(chunk.shard, number), str(bad))
                raise UserError(f"{place} {hint}") from None
            sizes.append(sum(len(message.text) for message in row.messages) + media + 64)
        return Sizes(sizes)

    def _size(self, part: MediaPart) -> int:
        if part.frames is not None:
            return sum(map(self._size, part.frames))
        if part.bytes is not None:
            return len(part.bytes)
        if part.path is None or self.media == "relative":
            return 0
        path = Path(part.path)
        if path.is_dir():   # frames of a clip: they stay where they are
            return 0
        if not path.is_file():
            raise BadRow("media_missing", f"{part.kind} file does not exist: {path}")
        return path.stat().st_size


def cut(sizes: Sequence[int], count: int) -> list[Shard]:
    """`count` runs of rows whose sizes add up to about the same; each has at least one row."""
    sums = list(accumulate(sizes))
    ends = [0]
    for number in range(1, count + 1):
        part = sums[-1] * number / count
        after = bisect_left(sums, part)   # the row in which the sum passes the part
        # Before or after that row, whichever is nearer.
        before = sums[after - 1] if after else 0
        end = after if part - before < sums[after] - part else after + 1
        ends.append(min(max(end, ends[-1] + 1), len(sizes) - (count - number)))
    return [Shard(n, ends[n], ends[n + 1]) for n in range(count)]


# Writing ---------------------------------------------------------------------------------------------


@dataclass
class Writing:
    """Writes shards; goes to the worker processes.

    chunks: every chunk with the number of rows before it. folder: where the shards are written;
    home: where they will lie, which relative paths start from.
    """

    source: Source
    media: Media
    chunks: list[tuple[int, Chunk]]
    count: int
    folder: Path
    home: Path

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"part-{number:05d}-of-{self.count:05d}.parquet"

    def __call__(self, shard: Shard) -> int:
        """The bytes of the shard's file; one that is there already is left alone."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, schema = self.path(shard.number), _schema()
        if path.is_file():
            return path.stat().st_size
        with whole(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for group in _groups(self._rows(shard)):
                writer.write_table(pa.Table.from_pylist(group, schema))
        return path.stat().st_size

    def _rows(self, shard: Shard) -> Iterator[dict[str, Any]]:
        for before, chunk in self.chunks:
            if before >= shard.stop:
                return
            if before + (chunk.stop - chunk.start) <= shard.first:
                continue
            for number, (_, raw) in enumerate(rows_of(self.source, chunk), before):
                if shard.first <= number < shard.stop:
                    yield self._record(parse_row(raw, self.source.folder(chunk.shard)))

    def _record(self, row: Row) -> dict[str, Any]:
        return {
            "id": row.id,
            "messages": [self._message(message) for message in row.messages],
            "tools": json.dumps(row.tools, ensure_ascii=False) if row.tools else None,
            "meta": json.dumps(row.meta, ensure_ascii=False) if row.meta else None,
        }

    def _message(self, message: Message) -> dict[str, Any]:
        calls = [
            {"name": call.name, "arguments": call.arguments, **({"id": call.id} if call.id else {})}
            for call in message.tool_calls
        ]
        return {
            "role": message.role,
            "content": [
                self._medium(part) if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
                for part in message.content
            ],
            "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
            "tool_call_id": message.tool_call_id,
            "name": message.name,
        }

    def _medium(self, part: MediaPart) -> dict[str, Any]:
        out = {"type": part.kind, "start": part.start, "end": part.end, "fps": part.fps}
        if part.frames is not None:
            return {**out, part.kind: [self._file(frame) for frame in part.frames]}
        return {**out, **self._file(part)}

    def _file(self, part: MediaPart) -> dict[str, Any]:
        """Where the file is, or the file itself."""
        if part.bytes is not None:
            return {"bytes": part.bytes}
        if part.path is None:
            return {"url": part.url}
        if self.media == "embed" and not Path(part.path).is_dir():
            return {"bytes": Path(part.path).read_bytes()}
        return {"path": os.path.relpath(part.path, self.home)}


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows for one row group each."""
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        group.append(row)
        size += sum(_weight(part) for message in row["messages"] for part in message["content"])
        if size >= GROUP_BYTES or len(group) >= GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _weight(part: dict[str, Any]) -> int:
    frames = sum(len(frame.get("bytes") or "") for frame in part.get("video") or ())
    return len(part.get("bytes") or part.get("text") or "") + frames


def _schema() -> Any:
    import pyarrow as pa

    text, seconds = pa.string(), pa.float64()
    frame = pa.struct([("bytes", pa.binary()), ("path", text), ("url", text)])
    part = pa.struct(
        [
            ("type", text),
            ("text", text),
            ("bytes", pa.binary()),
            ("path", text),
            ("url", text),
            ("video", pa.list_(frame)),
            ("start", seconds),
            ("end", seconds),
            ("fps", seconds),
        ]
    )
    message = pa.struct(
        [
            ("role", text),
            ("content", pa.list_(part)),
            ("tool_calls", text),
            ("tool_call_id", text),
            ("name", text),
        ]
    )
    return pa.schema([("id", text), ("messages", pa.list_(message)), ("tools", text), ("meta", text)])


class Written(NamedTuple):
    """What lies in the folder. made: False where it was there before. sizes: bytes of each file."""

    made: bool
    rows: int
    sizes: list[int]


def write_shards(
    source: Source,
    out: Path,
    *,
    shards: int | None = None,
    size_mb: float = DEFAULT_SIZE_MB,
    media: Media = "embed",
    workers: int = 1,
) -> Written:
    """Writes the folder `out`, or finds it whole. shards: how many; None: as `size_mb` demands.

    Raises UserError if `out` holds something else, or for a row that cannot be used.
    """
    asked = {
        "data": source.fingerprint,
        "folder": str(source.folder(0)),
        "media": media,
        "shards": shards,
        "size_mb": None if shards else size_mb,
    }
    if (out / MARKER).is_file():
        found = json.loads((out / MARKER).read_text(encoding="utf-8"))
        if {key: found.get(key) for key in asked} != asked:
            raise UserError(f"{out} holds shards of other data or settings; choose another folder")
        return Written(False, found["rows"], [file.stat().st_size for file in sorted(out.glob("*.parquet"))])
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} holds something else than shards; choose another folder")
    chunks, sizes = _measure(source, media, workers)
    wanted = shards or max(1, -(-sum(sizes) // int(size_mb * 1e6)))
    plan = cut(sizes, min(wanted, len(sizes)))
    partial = _partial_folder(out, {**asked, "rows": len(sizes)})
    writing = Writing(source, media, chunks, len(plan), partial, out.resolve())
    with progress_bar(f"writing {out}", len(plan)) as advance:
        written = []
        for _, size in in_order(writing, plan, workers):
            written.append(size)
            advance(1)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return Written(True, len(sizes), written)


def _measure(source: Source, media: Media, workers: int) -> tuple[list[tuple[int, Chunk]], array]:
    """Every chunk with the number of rows before it, and the size of every row."""
    chunks, sizes = [], array("Q")
    with progress_bar("measuring", source.num_rows) as advance:
        for chunk, found in in_order(Measure(source, media), chunks_of(source), workers):
            chunks.append((len(sizes), chunk))
            sizes.extend(found.rows)
            advance(chunk.stop - chunk.start)
    if not sizes:
        raise UserError(f"{source.name} has no row")
    return chunks, sizes


def _partial_folder(out: Path, marker: dict[str, Any]) -> Path:
    """The folder to write in. What a call with the same settings left there stays, anything else goes."""
    folder = out.parent / f".{out.name}.partial"
    text = json.dumps(marker, indent=2) + "\n"
    if folder.exists() and (
        not (folder / MARKER).is_file() or (folder / MARKER).read_text(encoding="utf-8") != text
    ):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(text, encoding="utf-8")
    return folder


def shard(
    data: Annotated[Path, typer.Argument(help="File, folder or glob: JSONL, JSON, Parquet or Arrow.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it appears only when it is whole.")],
    shards: Annotated[int | None, typer.Option(min=1, help="How many; default: by --size-mb.")] = None,
    size_mb: Annotated[float, typer.Option(min=0.001, help="About how large a shard is.")] = DEFAULT_SIZE_MB,
    media: Annotated[
        Literal["embed", "relative"],
        typer.Option(help="Media inside the shards, or paths relative to the folder."),
    ] = "embed",
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read and write.")] = 1,
) -> None:
    """Rewrite a data set as Parquet shards of about equal size, in the same order.

    A call that was cut off is repeated and goes on with the missing shards; a folder that is whole is left
    alone. Rows that training could not use end the call. URLs stay URLs, folders of frames stay folders.

    Examples:

        data-prep shard data/shapes/train.jsonl --out data/shards --shards 8

        data-prep shard data/mine --out data/mine-shards --size-mb 1024 --workers 8

        data-prep shard data/mine --out data/mine-shards --media relative
    """
    source = open_data(data, data_folder)
    done = write_shards(source, out, shards=shards, size_mb=size_mb, media=media, workers=workers)
    total = sum(done.sizes)
    spread = f"{min(done.sizes) / 1e6:.2f}–{max(done.sizes) / 1e6:.2f} MB each"
    verb = "wrote" if done.made else "present"
    print(f"{verb}: {out} ({done.rows} rows in {len(done.sizes)} shards, {total / 1e6:.1f} MB, {spread})")
