"""`data-prep encode`: rows through a model's processor once, so that a run need not do it every epoch.

What is written and how a run reads it: `lmms_engine/datasets/encoded.py`. Each part of the rows becomes a
file of samples, and beside it a note with a digest of the rows and media it was made from. So a call that was
cut off goes on, rows or pictures that changed meanwhile are encoded again, and a folder that is whole is
compared with the present rows to the byte before it counts as present.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

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
from data_prep.lengths import Tokens
from data_prep.lock import alone
from data_prep.parts import KEY, TEMPORARY, put, work_folder
from data_prep.rows import Chunk, Data, open_data, parts_of, placed
from data_prep.write import portable
from lmms_engine.datasets.limits import DEFAULT_SECONDS, media_time_limit
from lmms_engine.datasets.schema import MediaPart, Row, parse_row
from lmms_engine.datasets.sources import ENCODED, Source
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from lmms_engine.datasets.encoded import Content
    from lmms_engine.datasets.processor import Processor
    from lmms_engine.datasets.sources import Raw

BLOCK = 1 << 20


class Written(NamedTuple):
    """What lies in the folder. made: False where it was there before. bad: kept rows of no use, by kind."""

    made: bool
    rows: int
    tokens: int
    size: int
    bad: Mapping[str, int]


@dataclass
class Encoding:
    """Encodes a set part by part; satisfies Work and, as its only one, Stage.

    build: makes the processor, in each process once; can be pickled. folder: where the parts lie until
    they are the folder `out`. stop: whether a row of no use ends the work, or is kept with its reason.
    """

    source: Source
    build: Callable[[], Processor]
    identity: Mapping[str, Any]
    folder: Path
    out: Path
    stop: bool
    media_timeout: float = DEFAULT_SECONDS
    _processor: Processor | None = field(default=None, repr=False)
    title = "encoding"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processor": None}

    @property
    def stages(self) -> list[Encoding]:
        """Itself."""
        return [self]

    @cached_property
    def parts(self) -> list[list[Chunk]]:
        """The chunks of each part."""
        return parts_of(self.source)

    @property
    def processor(self) -> Processor:
        """The processor of this process."""
        if self._processor is None:
            self._processor = self.build()
        return self._processor

    def count(self) -> int:
        """Number of parts."""
        return len(self.parts)

    def name(self, number: int) -> str:
        """The file of a part."""
        return f"part-{number:05d}-of-{self.count():05d}.arrow"

    def note(self, number: int, folder: Path | None = None) -> Path:
        """What is known of a part; its presence says that the part is whole."""
        return ((folder or self.folder) / self.name(number)).with_suffix(".json")

    def make(self, number: int) -> None:
        """A part, unless it is there and its rows and media are as they were."""
        from lmms_engine.datasets.encoded import write_part

        note = self.note(number)
        if note.is_file() and _read(note)["content"] == self.content(number):
            return
        note.unlink(missing_ok=True)
        digest, facts = Digest(), {"rows": 0, "tokens": 0, "bad": {}}
        with put(self.folder, self.name(number)) as path:
            batches = write_part(path, self._contents(number, digest, facts))
            size = path.stat().st_size
        made = {"file": self.name(number), "bytes": size, "batches": batches, "content": digest.text()}
        with put(self.folder, note.name) as path:
            path.write_text(json.dumps({**made, **facts}), encoding="utf-8")

    def content(self, number: int) -> str:
        """Digest of the rows and media of a part."""
        digest = Digest()
        for chunk, row, raw in self._rows(number):
            digest.add(self._parsed(chunk, row, raw), self.source.folder(chunk.shard))
        return digest.text()

    def _rows(self, number: int) -> Iterator[tuple[Chunk, int, Raw | None]]:
        """Every row of a part, blank lines too."""
        for chunk in self.parts[number]:
            for row, raw in self.source.rows(chunk.shard, chunk.start):
                if row >= chunk.stop:
                    break
                yield chunk, row, raw

    def _parsed(self, chunk: Chunk, row: int, raw: Raw | None) -> Row | BadRow | None:
        if not isinstance(raw, dict):
            return raw
        try:
            return parse_row(raw, self.source.folder(chunk.shard))
        except BadRow as bad:
            return bad

    def _contents(self, number: int, digest: Digest, facts: dict[str, Any]) -> Iterator[Content]:
        for chunk, row, raw in self._rows(number):
            parsed = self._parsed(chunk, row, raw)
            # Before it is decoded: a picture that changes while it is read does not pass for the later one.
            digest.add(parsed, self.source.folder(chunk.shard))
            found = self._encoded(chunk, row, parsed)
            if isinstance(found, BadRow):
                facts["bad"][found.kind] = facts["bad"].get(found.kind, 0) + 1
            elif found is not None:
                facts["rows"] += 1
                facts["tokens"] += found.tensors["loss_weights"].numel()
            yield found

    def _encoded(self, chunk: Chunk, row: int, parsed: Row | BadRow | None) -> Content:
        from lmms_engine.datasets.encoded import EncodedRow

        place = self.source.place(chunk.shard, row)
        try:
            if isinstance(parsed, BadRow):
                raise parsed
            if parsed is None:
                return None
            with media_time_limit(self.media_timeout):
                sample = self.processor(parsed, RowRef(self.source.name, chunk.shard, row, parsed.id or ""))
            return EncodedRow.of(sample, parsed.id)
        except BadRow as bad:
            if self.stop and bad.kind != "overlong":
                hint = "(--on-bad-row skip keeps its place, and a run decides)"
                raise UserError(f"{placed(place, str(bad))} {hint}") from None
            return bad
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        except Exception as error:   # a fault in a processor: say at which row
            raise UserError(f"{place}: {type(error).__name__}: {error}") from error

    def finish(self) -> Written:
        """The whole folder under its own name."""
        from lmms_engine.datasets.encoded import meta_of

        notes = [_read(self.note(number)) for number in range(self.count())]
        counts = [self.source.shard_rows(shard) for shard in range(self.source.num_shards)]
        keys = ("file", "bytes", "batches", "content")
        parts = [{key: note[key] for key in keys} for note in notes]
        with put(self.folder, ENCODED) as path:
            text = json.dumps(meta_of(self.identity, counts, self.source.row_bytes, parts))
            path.write_text(text, encoding="utf-8")
        shutil.rmtree(self.folder / TEMPORARY)
        if self.out.exists():
            shutil.rmtree(self.out)   # empty, or the user wants it replaced
        self.folder.rename(self.out)
        (self.out / KEY).unlink()   # last: by it a call that is cut off here finds the parts
        written = summary(notes, made=True)
        print_written(written, self.out)
        return written


@dataclass
class Comparing:
    """Compares a whole folder with the present rows; satisfies Work and Stage."""

    encoding: Encoding
    title = "comparing"

    @property
    def stages(self) -> list[Comparing]:
        """Itself."""
        return [self]

    def count(self) -> int:
        """Number of parts."""
        return self.encoding.count()

    def make(self, number: int) -> None:
        """UserError if the rows or media of a part are other ones now."""
        encoding = self.encoding
        note = encoding.note(number, encoding.out)
        if not note.is_file() or _read(note)["content"] != encoding.content(number):
            raise UserError(
                f"{encoding.out} was made of other rows or media than are there now ({note.stem});"
                " --overwrite encodes them anew, or choose another folder"
            )

    def finish(self) -> Written:
        """What is there."""
        encoding = self.encoding
        (encoding.out / KEY).unlink(missing_ok=True)
        notes = [_read(encoding.note(number, encoding.out)) for number in range(self.count())]
        written = summary(notes, made=False)
        print_written(written, encoding.out)
        return written


class Digest:
    """Of rows and the bytes of their media; where they lie does not count, if they are moved together."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, row: Row | BadRow | None, folder: Path) -> None:
        """Takes a row. Media behind URLs count by their address alone."""
        if not isinstance(row, Row):
            self._take(repr(row if row is None else (row.kind, str(row))).encode())
            return
        self._take(json.dumps(portable(row, folder), sort_keys=True).encode())
        for part in row.media():
            for file in part.frames or (part,):
                self._take(_bytes_of(file))

    def text(self) -> str:
        """So far."""
        return self._hash.hexdigest()

    def _take(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little") + data)


def _bytes_of(part: MediaPart) -> bytes:
    """Digest of a file, of the names and files of a folder of frames, or that there is none."""
    if part.path is None:
        return b""
    path = Path(part.path)
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        found.update(file.name.encode())
        try:
            with open(file, "rb") as stream:
                while block := stream.read(BLOCK):
                    found.update(block)
        except OSError as error:
            found.update(repr(error.errno).encode())
    return found.digest()


def _read(note: Path) -> dict[str, Any]:
    return json.loads(note.read_text(encoding="utf-8"))


def summary(notes: list[dict[str, Any]], made: bool) -> Written:
    """Of all parts."""
    bad: dict[str, int] = {}
    for note in notes:
        for kind, count in note["bad"].items():
            bad[kind] = bad.get(kind, 0) + count
    rows, tokens, size = (sum(note[key] for note in notes) for key in ("rows", "tokens", "bytes"))
    return Written(made, rows, tokens, size, bad)


def print_written(written: Written, out: Path) -> None:
    """One line, and one for rows of no use."""
    if written.bad:
        print("kept as unusable: " + ", ".join(f"{kind} {n}" for kind, n in sorted(written.bad.items())))
    verb = "wrote" if written.made else "present"
    print(f"{verb}: {out} ({written.rows} rows, {written.tokens} tokens, {written.size / 1e6:.1f} MB)")


# Settings --------------------------------------------------------------------------------------------


def builder(
    config: list[Path], overrides: list[str], folder: Path | None, kind: str | None
) -> tuple[Callable[[], Processor], float]:
    """What makes the processor, of a run's config or of a folder with a run's defaults, and the time that a
    medium may take."""
    if bool(config) == (folder is not None):
        raise UserError("give --config FILE, the config of the run, or --processor FOLDER; not both")
    if folder is not None:
        if overrides:
            raise UserError(f"--set {overrides[0]} changes a config; give --config")
        return partial(_of_folder, Tokens(folder.resolve(), kind)), DEFAULT_SECONDS
    if kind is not None:
        raise UserError("--processor-type is for --processor; a config has processor_config.processor_type")
    from lmms_engine.config import load_job
    from lmms_engine.models.build import build_processor

    job = load_job(config, overrides)
    return partial(build_processor, job), job.dataset.media_timeout_s


def _of_folder(tokens: Tokens) -> Processor:
    return tokens.processor


def plan(
    source: Source, build: Callable[[], Processor], out: Path, *, stop: bool, overwrite: bool, timeout: float
) -> Encoding | Comparing:
    """What is to do for the folder `out`: the encoding, or, where it is whole, to compare it.

    UserError if it holds something else, or a set of other settings, named one by one.
    """
    from lmms_engine.datasets.encoded import differences, identity, read_meta

    out = out.resolve()
    processor = build()
    key = identity(processor)
    encoding = Encoding(source, build, key, out, out, stop, timeout, processor)
    if (out / ENCODED).is_file() and not overwrite:
        found = differences(read_meta(out)["identity"], key)
        if found:
            raise UserError(
                f"{out} was encoded with other settings: {'; '.join(found)}. --overwrite encodes anew, or"
                " choose another folder"
            )
        return Comparing(encoding)
    if out.exists() and not (out / ENCODED).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} holds something else than an encoded set; choose another folder")
    counts = [source.shard_rows(shard) for shard in range(source.num_shards)]
    encoding.folder = work_folder(out, {"identity": key, "rows": counts, "stop": stop})
    return encoding


def encode(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write; it appears only when it is whole.")],
    config: Annotated[
        list[Path] | None, typer.Option(help="Config of the run that will read it; repeat for overlays.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value over the config, as for a run; repeat it.")
    ] = None,
    processor: Annotated[
        Path | None, typer.Option(help="Instead of a config: a model's or processor's folder.")
    ] = None,
    processor_type: Annotated[
        str | None, typer.Option(help="Its registered name, where the folder does not say.")
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    on_bad_row: Annotated[
        Literal["stop", "skip"], typer.Option(help="Stop at a row of no use, or keep its place and reason.")
    ] = "stop",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a set that is there.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that encode.")] = 1,
    executor: ExecutorOption = "processes",
    tasks: TasksOption = 1,
    partition: PartitionOption = None,
    time: TimeOption = "24:00:00",
    mem_gb: MemoryOption = 4,
    sbatch: SbatchOption = None,
) -> None:
    """Bring rows through a model's processor once: token ids, labels, positions and patches, ready to pack.

    A run reads the folder like any data set and gets the same batches, bit for bit. It is refused if the
    tokenizer, the template or a setting differs from the run's, by name. A call that was cut off is repeated
    and goes on; one for a folder that is whole compares it with the rows and media as they are now.

    Examples:

        data-prep encode data/shapes/train.jsonl --processor data/shapes/processor/qwen3_vl --out data/encoded

        data-prep encode data/mine --config recipes/qwen3_vl/config.yaml --out data/mine-encoded --workers 8

        data-prep encode data/mine --config c.yaml --out data/e --executor slurm --tasks 100 --partition cpu
    """
    cluster = Cluster(executor, tasks, partition, time, mem_gb, sbatch or [])
    build, timeout = builder(config or [], overrides or [], processor, processor_type)
    source = open_data(data, data_folder)
    with alone(out):
        work = plan(source, build, out, stop=on_bad_row == "stop", overwrite=overwrite, timeout=timeout)
        submit(work, out, cluster, workers)
