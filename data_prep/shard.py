"""`data-prep shard`: a data set rewritten as Parquet or Arrow shards of about equal size, with its media.

Two passes. The first parses every row and notes its size; the rows, in their order, are then cut where the
sum reaches each shard's part. The second writes the shards. Both are done part by part by any number of
processes. What is written lies in a folder beside the output until all of it is there, so a call that was cut
off is repeated and goes on with what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import typer

from data_prep.executors import (
    Cluster,
    ExecutorOption,
    MemoryOption,
    PartitionOption,
    SbatchOption,
    TasksOption,
    TimeOption,
    submit,
)
from data_prep.lock import alone
from data_prep.parts import KEY, TEMPORARY, Stage, put, stamp_source, work_folder
from data_prep.rows import Chunk, Data, open_data, parts_of, placed, rows_of
from lmms_engine.datasets.schema import MediaPart, Message, Row, parse_row
from lmms_engine.datasets.sources import Source
from lmms_engine.errors import BadRow, UserError

Media = Literal["embed", "relative"]
Form = Literal["parquet", "arrow"]
DEFAULT_SIZE_MB = 512
GROUP_BYTES = 32 << 20   # of a row group: what a reader has in memory at least
GROUP_ROWS = 1024
MARKER = ".shards"   # without a suffix that readers take for data
SIZES = ".sizes"


class Shard(NamedTuple):
    """Rows first to stop - 1 of the data set, blank lines not counted."""

    number: int
    first: int
    stop: int


@dataclass
class Measuring:
    """The first pass, a Stage: sizes of the rows of each part. A row that cannot be used is a UserError.

    folder: where the sizes lie.
    """

    source: Source
    media: Media
    folder: Path
    title = "measuring"

    @cached_property
    def parts(self) -> list[list[Chunk]]:
        """The chunks of each part."""
        return parts_of(self.source)

    def count(self) -> int:
        """Number of parts."""
        return len(self.parts)

    def make(self, number: int) -> None:
        """Notes how many usable rows each chunk of a part has, and the bytes of each."""
        if not (self.folder / _sizes_name(number)).is_file():
            chunks = [self.sizes(chunk) for chunk in self.parts[number]]
            with put(self.folder, _sizes_name(number)) as path, open(path, "wb") as file:
                np.savez(file, rows=[len(sizes) for sizes in chunks], sizes=np.concatenate(chunks))

    def sizes(self, chunk: Chunk) -> np.ndarray:
        """Of each row: text, and what lies in the media that will be inside."""
        sizes = []
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
        return np.array(sizes, dtype=np.int64)

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """When all parts are there: usable rows of every chunk, and the size of every row."""
        found = [np.load(self.folder / _sizes_name(number)) for number in range(self.count())]
        rows, sizes = (np.concatenate([item[name] for item in found]) for name in ("rows", "sizes"))
        if not len(sizes):
            raise UserError(f"{self.source.name} has no row")
        return rows, sizes

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


def _sizes_name(number: int) -> str:
    return f"part-{number:06d}.npz"


def cut(sizes: Sequence[int] | np.ndarray, count: int) -> list[Shard]:
    """`count` runs of rows whose sizes add up to about the same; each has at least one row."""
    sums = np.cumsum(sizes)
    ends = [0]
    for number in range(1, count + 1):
        part = sums[-1] * number / count
        after = int(np.searchsorted(sums, part))   # the row in which the sum passes the part
        # Before or after that row, whichever is nearer.
        before = sums[after - 1] if after else 0
        end = after if part - before < sums[after] - part else after + 1
        ends.append(min(max(end, ends[-1] + 1), len(sizes) - (count - number)))
    return [Shard(n, ends[n], ends[n + 1]) for n in range(count)]


# Writing ---------------------------------------------------------------------------------------------


@dataclass
class Writing:
    """The second pass, a Stage: the shards themselves.

    shards, size_mb: how many, or how large; form: what they are. folder: where they are written; home: where
    they will lie, which relative paths start from.
    """

    measuring: Measuring
    shards: int | None
    size_mb: float
    folder: Path
    home: Path
    form: Form = "parquet"
    title = "writing"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "plan"}

    @cached_property
    def plan(self) -> tuple[list[Shard], list[Chunk], np.ndarray]:
        """The shards; every chunk; and the number of rows before each chunk."""
        rows, sizes = self.measuring.measured()
        wanted = self.shards or max(1, -(-int(sizes.sum()) // int(self.size_mb * 1e6)))
        chunks = [chunk for part in self.measuring.parts for chunk in part]
        return cut(sizes, min(wanted, len(sizes))), chunks, np.cumsum(rows) - rows

    def count(self) -> int:
        """Number of shards."""
        return len(self.plan[0])

    def name(self, number: int) -> str:
        """The file of a shard."""
        return f"part-{number:05d}-of-{self.count():05d}.{self.form}"

    def make(self, number: int) -> None:
        """Writes the shard's file, unless it is there."""
        import pyarrow as pa

        name, schema = self.name(number), _schema()
        if not (self.folder / name).is_file():
            with put(self.folder, name) as path, _writer(path, schema, self.form) as writer:
                for group in _groups(self._rows(self.plan[0][number])):
                    writer.write_table(pa.Table.from_pylist(group, schema))

    def _rows(self, shard: Shard) -> Iterator[dict[str, Any]]:
        source = self.measuring.source
        _, chunks, before = self.plan
        at = int(np.searchsorted(before, shard.first, side="right")) - 1
        while at < len(chunks) and before[at] < shard.stop:
            chunk = chunks[at]
            for number, (_, raw) in enumerate(rows_of(source, chunk), int(before[at])):
                if shard.first <= number < shard.stop:
                    yield self._record(parse_row(raw, source.folder(chunk.shard)))
            at += 1

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
        if self.measuring.media == "embed" and not Path(part.path).is_dir():
            return {"bytes": Path(part.path).read_bytes()}
        return {"path": os.path.relpath(part.path, self.home)}


def _writer(path: Path, schema: Any, form: Form) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if form == "arrow":   # uncompressed, so that readers map it
        return pa.ipc.new_file(str(path), schema)
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)   # readers check it


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


@dataclass
class Sharding:
    """Both passes and their end; satisfies Work. asked: what the folder `out` is made from."""

    measuring: Measuring
    writing: Writing
    asked: Mapping[str, Any]
    out: Path

    @property
    def stages(self) -> list[Stage]:
        """The two passes."""
        return [self.measuring, self.writing]

    def finish(self) -> Written:
        """The whole folder under its own name."""
        folder, rows = self.writing.folder, self.writing.plan[0][-1].stop
        with put(folder, MARKER) as path:
            path.write_text(json.dumps({**self.asked, "rows": rows}, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(self.measuring.folder)
        shutil.rmtree(folder / TEMPORARY)
        if self.out.exists():
            self.out.rmdir()
        folder.rename(self.out)
        (self.out / KEY).unlink()   # last: by it a call that is cut off here finds the parts
        return present(self.out, made=True)


def present(out: Path, made: bool = False) -> Written:
    """What lies in a whole folder, shown in one line."""
    (out / KEY).unlink(missing_ok=True)
    rows = json.loads((out / MARKER).read_text(encoding="utf-8"))["rows"]
    written = Written(made, rows, [file.stat().st_size for file in sorted(out.glob("part-*"))])
    sizes = written.sizes
    spread = f"{min(sizes) / 1e6:.2f}–{max(sizes) / 1e6:.2f} MB each"
    verb = "wrote" if made else "present"
    print(f"{verb}: {out} ({rows} rows in {len(sizes)} shards, {sum(sizes) / 1e6:.1f} MB, {spread})")
    return written


def plan_shards(
    source: Source, out: Path, shards: int | None, size_mb: float, media: Media, form: Form = "parquet"
) -> Sharding | None:
    """What is to do for the folder `out`; None where it is whole. UserError if it holds something else."""
    asked = {
        "data": source.fingerprint,
        "folder": str(source.folder(0)),
        "media": media,
        "form": form,
        "shards": shards,
        "size_mb": None if shards else size_mb,
    }
    if (out / MARKER).is_file():
        found = json.loads((out / MARKER).read_text(encoding="utf-8"))
        if {key: found.get(key) for key in asked} != asked:
            raise UserError(f"{out} holds shards of other data or settings; choose another folder")
        return None
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} holds something else than shards; choose another folder")
    folder = work_folder(out, {**asked, "files": stamp_source(source)})
    measuring = Measuring(source, media, folder / SIZES)
    return Sharding(measuring, Writing(measuring, shards, size_mb, folder, out, form), asked, out)


def shard(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write; it appears only when it is whole.")],
    shards: Annotated[int | None, typer.Option(min=1, help="How many; default: by --size-mb.")] = None,
    size_mb: Annotated[float, typer.Option(min=0.001, help="About how large a shard is.")] = DEFAULT_SIZE_MB,
    media: Annotated[
        Literal["embed", "relative"],
        typer.Option(help="Media inside the shards, or paths relative to the folder."),
    ] = "embed",
    form: Annotated[
        Literal["parquet", "arrow"],
        typer.Option("--format", help="Parquet is smaller; in Arrow any row is read by itself."),
    ] = "parquet",
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read and write.")] = 1,
    executor: ExecutorOption = "processes",
    tasks: TasksOption = 1,
    partition: PartitionOption = None,
    time: TimeOption = "24:00:00",
    mem_gb: MemoryOption = 4,
    sbatch: SbatchOption = None,
) -> None:
    """Rewrite a data set as Parquet or Arrow shards of about equal size, in the same order.

    A call that was cut off is repeated and goes on with the missing shards; a folder that is whole is left
    alone. Rows that training could not use end the call. URLs stay URLs, folders of frames stay folders.

    Examples:

        data-prep shard data/shapes/train.jsonl --out data/shards --shards 8

        data-prep shard data/mine --out data/mine-shards --size-mb 1024 --workers 8

        data-prep shard data/mine --out data/mine-shards --media relative --format arrow

        data-prep shard data/mine --out data/mine-shards --executor slurm --tasks 100 --partition cpu
    """
    cluster = Cluster(executor, tasks, partition, time, mem_gb, sbatch or [])
    source = open_data(data, data_folder)
    out = out.resolve()
    with alone(out):
        work = plan_shards(source, out, shards, size_mb, media, form)
        if work is None:
            present(out)
        else:
            submit(work, out, cluster, workers)
