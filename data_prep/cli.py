"""The command line of data preparation: `data-prep <verb>`, one file a verb, imported when the verb is used.

data-prep sample --out data/shapes
data-prep validate data/shapes/train.jsonl
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand, TyperGroup

from data_prep.sample import DEFAULT_ROWS, DEFAULT_SEED, MIN_ROWS, make_sample
from data_prep.sample import Progress as Report
from lmms_engine.errors import UserError

# What `--help` says of a verb whose file is imported only when it is used: `data_prep/<verb>.py`.
VERBS = {
    "convert": "Turn data of a usual form into rows in chat form.",
    "validate": "Check every row and open every medium; the exit code is 1 if there are faults.",
    "stats": "Show histograms of length, turns, media and sources, and how well the rows pack.",
    "preview": "Write an HTML page of conversations with their media; one file that needs no network.",
    "shard": "Rewrite a data set as Parquet or Arrow shards of about equal size, in the same order.",
    "encode": "Bring rows through a model's processor once, so that a run need not do it every epoch.",
}


class _Verbs(TyperGroup):
    """Loads a verb when it is called, and shows its errors in one line."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if listed and name in VERBS else listed, rest

    def invoke(self, ctx: typer.Context) -> object:
        with errors_in_one_line(bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


def load_verb(name: str) -> TyperCommand:
    """The command of `data_prep/<name>.py`: its function of that name."""
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(importlib.import_module(f"data_prep.{name}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Verbs,
    name="data-prep",
    help="Prepare data for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Prepare data for training."""


@app.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder to write; it appears only when it is whole.")],
    rows: Annotated[
        int, typer.Option(min=MIN_ROWS, help="Training rows; held-out rows are a tenth.")
    ] = DEFAULT_ROWS,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = DEFAULT_SEED,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the folder is there.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder if it is there.")
    ] = False,
) -> None:
    """Generate a small data set of coloured shapes, moving shapes and tones, with a tokenizer.

    It needs no network. Pictures are PNG and JPEG, clips MP4, tones WAV; rows of questions and answers are
    JSONL and Parquet in OpenAI chat form; `processor/` holds folders that transformers' Qwen processors open.

    Examples:

        data-prep sample --out data/shapes

        data-prep sample --out data/shapes --if-missing

        data-prep sample --out data/tiny --rows 64 --seed 7
    """
    run_sample(out, rows=rows, seed=seed, if_missing=if_missing, overwrite=overwrite)


for _name, _summary in VERBS.items():
    app.command(_name, help=_summary)(lambda: None)


def run_sample(
    out: Path,
    *,
    rows: int = DEFAULT_ROWS,
    seed: int = DEFAULT_SEED,
    if_missing: bool = False,
    overwrite: bool = False,
) -> None:
    """`make_sample` with a progress bar on stderr and a short summary on stdout; also what recipes call."""
    with _bar(f"generating {out}") as report:
        summary = make_sample(
            out, rows=rows, seed=seed, if_missing=if_missing, overwrite=overwrite, progress=report
        )
    for note in summary.notes:
        print(f"note: {note}")
    counts = ", ".join(f"{stem} {count}" for stem, count in summary.counts.items())
    verb = "wrote" if summary.made else "present"
    print(
        f"{verb}: {summary.folder} ({counts + ' rows, ' if counts else ''}{summary.num_bytes / 1e6:.1f} MB)"
    )


@contextmanager
def errors_in_one_line(debug: bool = False) -> Iterator[None]:
    """What the user can mend, and a full or forbidden disk, end the program with one line and exit code 1."""
    try:
        yield
    except (UserError, OSError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def _bar(title: str) -> Iterator[Report]:
    """A progress bar where stderr is a terminal; else one plain line when work begins."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            if console.is_terminal:
                progress.update(task, completed=done, total=total)
            elif done == 1:
                print(f"{title}: {total} rows", file=sys.stderr)

        yield report
