"""`data-prep validate`: every row and medium looked at as training will look at them.

A row is faulty if it cannot be decoded or parsed, if its turns are in no order that a model can learn from,
if a medium cannot be opened to its end, or, given a model's processor, if that refuses the row, finds nothing
to learn in it, or makes it too long. Each fault has a kind (the one that `skipped.jsonl` of a run uses) and
the address of its row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, TextIO

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
from data_prep.media import open_medium
from data_prep.parts import discard, joined, put, stamp, stamp_source, work_folder
from data_prep.rows import Chunk, Data, open_data, parts_of, placed, rows_of
from data_prep.write import portable, whole_text
from lmms_engine.datasets.schema import MediaPart, Message, Row, parse_row
from lmms_engine.datasets.sources import Raw, Source
from lmms_engine.errors import BadRow, UserError, printable

SHOWN = 3   # addresses a kind in the table


class Fault(NamedTuple):
    """What is wrong with a row. place: file and line, for people."""

    kind: str
    message: str
    shard: int
    row: int
    place: str
    id: str | None = None


class Result(NamedTuple):
    """What a chunk gave: how many rows it has, and the faults among them."""

    rows: int
    faults: list[Fault]


@dataclass
class Checker:
    """All checks of a chunk; goes to the worker processes. max_length: most tokens, with a processor."""

    source: Source
    tokens: Tokens | None = None
    max_length: int | None = None

    def __call__(self, chunk: Chunk) -> Result:
        """The faults of a chunk's rows, in order."""
        rows, faults = 0, []
        for number, raw in rows_of(self.source, chunk):
            rows += 1
            name = raw.get("id") if isinstance(raw, dict) else None
            name = None if name is None else printable(str(name))
            place = self.source.place(chunk.shard, number)
            try:
                found = self.check(raw, self.source.folder(chunk.shard))
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            except Exception as error:   # a fault in a processor: say at which row
                raise UserError(f"{place}: {type(error).__name__}: {error}") from error
            faults += [
                Fault(bad.kind, str(bad), chunk.shard, number, printable(place), name)
                for bad in found
            ]
        return Result(rows, faults)

    def check(self, raw: Raw, folder: Path) -> list[BadRow]:
        """What is wrong with one row; empty for a good one."""
        try:
            row = _parsed(raw, folder)
        except BadRow as bad:
            return [bad]
        found = list(_turns(row))
        media = [bad for part in row.media() if (bad := _opened(part)) is not None]
        if self.tokens is None or found or media:
            return found + media
        return list(self._lengths(row, self.tokens))

    def _lengths(self, row: Row, tokens: Tokens) -> Iterator[BadRow]:
        try:
            sample = tokens.sample(row)
        except BadRow as bad:
            yield bad
            return
        if not sample.supervised:
            yield BadRow("no_answer", "no token of the row is supervised: there is nothing to learn")
        if self.max_length is not None and len(sample) > self.max_length:
            yield BadRow("overlong", f"{len(sample)} tokens, more than --max-length {self.max_length}")


def _parsed(raw: Raw, folder: Path) -> Row:
    if isinstance(raw, BadRow):
        raise raw
    return parse_row(raw, folder)


def _turns(row: Row) -> Iterator[BadRow]:
    """Turns in an order that no chat has, and rows without an answer."""
    before: Message | None = None
    for i, message in enumerate(row.messages):
        if message.role == "system" and i:
            yield BadRow("role_order", f"turn {i} is a system turn; it belongs at the beginning")
        if message.role == "assistant" and (before is None or before.role == "system"):
            yield BadRow("assistant_first", f"turn {i} is an answer, and there is nothing before to answer")
        if message.role == "tool" and (before is None or not (before.tool_calls or before.role == "tool")):
            yield BadRow("role_order", f"turn {i} is a tool's result, and no call stands before it")
        if message.role == "assistant" and not message.content and not message.tool_calls:
            yield BadRow("empty_answer", f"turn {i} is an empty answer")
        before = message
    if not any(message.role == "assistant" for message in row.messages):
        yield BadRow("no_answer", "the row has no assistant turn: there is nothing to learn")


def _opened(part: MediaPart) -> BadRow | None:
    """Why a medium cannot be decoded, if so."""
    try:
        open_medium(part)
    except BadRow as bad:
        return bad
    return None


# The report ------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Counts over all chunks. examples: a few faults of each kind."""

    rows: int = 0
    bad_rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[Fault]] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Takes the result of a chunk."""
        self.rows += result.rows
        self.bad_rows += len({(fault.shard, fault.row) for fault in result.faults})
        for fault in result.faults:
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            examples = self.examples.setdefault(fault.kind, [])
            if len(examples) < SHOWN:
                examples.append(fault)


@dataclass
class Checking:
    """Checks a set part by part; satisfies Work and, as its only one, Stage.

    folder: where the parts lie. fix: the JSONL file for the good rows; listing: the one for the faults.
    """

    checker: Checker
    folder: Path
    fix: Path | None
    listing: Path | None
    title = "checking"

    @property
    def stages(self) -> list[Checking]:
        """Itself."""
        return [self]

    @cached_property
    def parts(self) -> list[list[Chunk]]:
        """The chunks of each part."""
        return parts_of(self.checker.source)

    def count(self) -> int:
        """Number of parts."""
        return len(self.parts)

    def make(self, number: int) -> None:
        """The result of a part as JSON, written last, and its good rows."""
        if (self.folder / _name(number, "json")).is_file():
            return
        results = [(chunk, self.checker(chunk)) for chunk in self.parts[number]]
        if self.fix is not None:
            folder = self.fix.resolve().parent
            with put(self.folder, _name(number, "jsonl")) as path, open(path, "w", encoding="utf-8") as good:
                for chunk, result in results:
                    leave = {fault.row for fault in result.faults}
                    _copy(self.checker.source, chunk, leave, good, folder)
        found = [[result.rows, result.faults] for _, result in results]
        with put(self.folder, _name(number, "json")) as path:
            path.write_text(json.dumps(found), encoding="utf-8")

    def finish(self) -> Report:
        """Writes both files and adds everything up."""
        report = Report()
        with ExitStack() as stack:
            bad = stack.enter_context(whole_text(self.listing)) if self.listing else None
            for number in range(self.count()):
                text = (self.folder / _name(number, "json")).read_text(encoding="utf-8")
                for rows, faults in json.loads(text):
                    result = Result(rows, [Fault(*fault) for fault in faults])
                    report.add(result)
                    if bad is not None:
                        for fault in result.faults:
                            bad.write(json.dumps(fault._asdict(), ensure_ascii=False) + "\n")
        if self.fix is not None and report.rows > report.bad_rows:
            joined(self.folder, [_name(n, "jsonl") for n in range(self.count())], self.fix)
        discard(self.folder)
        if self.fix is not None and report.rows == report.bad_rows:
            raise UserError(f"no row is good: {self.fix} is not written")
        print_report(report)
        if self.fix is not None:
            print(f"wrote: {self.fix} ({report.rows - report.bad_rows} rows)")
        return report


def _name(number: int, ending: str) -> str:
    return f"part-{number:06d}.{ending}"


def _copy(source: Source, chunk: Chunk, leave: set[int], out: TextIO, folder: Path) -> None:
    for number, raw in rows_of(source, chunk):
        if number not in leave:
            row = parse_row(raw, source.folder(chunk.shard))
            out.write(json.dumps(portable(row, folder), ensure_ascii=False) + "\n")


def _key(source: Source, checker: Checker, fix: Path | None) -> dict[str, Any]:
    """What the parts depend on."""
    tokens = checker.tokens
    return {
        "data": stamp_source(source),
        "processor": None if tokens is None else [tokens.kind, stamp(tokens.folder)],
        "max_length": checker.max_length,
        "fix": None if fix is None else str(fix.resolve()),
    }


def print_report(report: Report) -> None:
    """The faults by kind as a table, most frequent first, and one line of totals."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False, highlight=False)
    if report.counts:
        table = Table("kind", "faults", "where, and what")
        for kind, count in sorted(report.counts.items(), key=lambda item: (-item[1], item[0])):
            lines = [placed(fault.place, fault.message) for fault in report.examples[kind]]
            if count > len(lines):
                lines.append(f"and {count - len(lines)} more")
            table.add_row(kind, str(count), Text("\n".join(lines)))
        console.print(table)
    print(f"{report.rows} rows, {report.bad_rows} with faults")


def validate(
    data: Data,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    processor: Annotated[
        Path | None, typer.Option(help="A model's or processor's folder: check template and lengths too.")
    ] = None,
    processor_type: Annotated[
        str | None, typer.Option(help="Its registered name, where the folder does not say.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a row; needs --processor.")
    ] = None,
    fix: Annotated[Path | None, typer.Option(help="Write the good rows to this JSONL file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write every fault to this JSONL file.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that decode media.")] = 1,
    executor: ExecutorOption = "processes",
    tasks: TasksOption = 1,
    partition: PartitionOption = None,
    time: TimeOption = "24:00:00",
    mem_gb: MemoryOption = 4,
    sbatch: SbatchOption = None,
) -> None:
    """Check every row and open every medium; the exit code is 1 if there are faults.

    Rows are read as training reads them. Faults are listed by kind with the address of their rows. `--fix`
    writes a copy without the faulty rows; media under its folder get relative paths, others absolute ones.
    With `--fix` or `--report` a call that was cut off is repeated and goes on where it was.

    Examples:

        data-prep validate data/shapes/train.jsonl

        data-prep validate data/mine --processor data/shapes/processor/qwen3_vl --max-length 4096

        data-prep validate data/mine/train.parquet --fix data/mine/clean.jsonl --workers 8

        data-prep validate data/mine --report faults.jsonl --executor slurm --tasks 200 --partition cpu
    """
    if processor is None and (max_length is not None or processor_type is not None):
        name = "--max-length" if max_length is not None else "--processor-type"
        raise UserError(f"{name} needs --processor FOLDER: only a model's processor counts tokens")
    if fix is not None and fix.suffix != ".jsonl":
        raise UserError(f"--fix {fix}: the copy is JSONL; give a name that ends in .jsonl")
    if fix is not None and fix.resolve() == Path(data).resolve():
        raise UserError(f"--fix {fix}: the copy needs another name than the data")
    cluster = Cluster(executor, tasks, partition, time, mem_gb, sbatch or [])
    out = fix or report
    if executor != "processes" and out is None:
        raise UserError(f"--executor {executor} needs --report or --fix: what the tasks find lies beside it")
    source = open_data(data, data_folder)
    tokens = None if processor is None else Tokens(processor.resolve(), processor_type)
    checker = Checker(source, tokens, max_length)
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            stack.enter_context(alone(out))
            folder = work_folder(out, _key(source, checker, fix))
        work = Checking(checker, folder, fix and fix.resolve(), report and report.resolve())
        result = submit(work, out or folder, cluster, workers)
    if result is not None and result.counts:
        raise typer.Exit(1)
