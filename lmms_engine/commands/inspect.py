"""`lmms-engine inspect`: the batches a rank would train on, from training's own loader, without a model.

lmms-engine inspect --config recipes/qwen3_vl/config.yaml --dp-rank 0 --dp-size 2 --steps 3 --json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from lmms_engine.config import Job, load_job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.processor import Processor
from lmms_engine.datasets.skips import kinds_of
from lmms_engine.errors import UserError
from lmms_engine.plugins import load_plugins
from lmms_engine.train.data import build_loader, build_processor
from lmms_engine.train.metrics import batch_records
from lmms_engine.train.samples import text_runs


def inspect(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value overrides, as for training")
    ] = None,
    config: Annotated[list[Path] | None, typer.Option(help="YAML file; repeat for overlays")] = None,
    dp_rank: Annotated[int, typer.Option(min=0, help="data rank whose batches to show")] = 0,
    dp_size: Annotated[int, typer.Option(min=1, help="number of data ranks")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="number of steps to show")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per micro-batch")] = False,
) -> None:
    """Show the batches that a rank would train on (supervised text is coloured)."""
    if not config:
        raise UserError("inspect needs --config FILE (repeat it for overlays)")
    if dp_rank >= dp_size:
        raise UserError(f"--dp-rank {dp_rank}: legal are 0 to {dp_size - 1} for --dp-size {dp_size}")
    job = load_job(config, overrides or [])
    load_plugins(job)
    console = Console(highlight=False, soft_wrap=True)
    processor = None if as_json else build_processor(job)
    for step, micros in batches(job, dp_rank, dp_size, steps):
        for record, batch in zip(batch_records(step, micros), micros, strict=True):
            if as_json:
                typer.echo(json.dumps(record, ensure_ascii=False))
            else:
                _print(console, record, batch, processor)


class _Rank:
    """One data rank's loader, read a window at a time, with its place in the epoch."""

    def __init__(self, job: Job, dp_rank: int, dp_size: int) -> None:
        self.loader = build_loader(job, dp_rank, dp_size)
        self.windows = 0  # of this epoch, read so far

    def next_window(self) -> list[PackedBatch]:
        micros = self.loader.next_step()
        self.windows += bool(micros)
        return micros

    def has_window(self, index: int) -> bool:
        """Whether this epoch has a window of that number for this rank; reads up to it."""
        while self.windows <= index:
            if not self.next_window():
                return False
        return True

    def next_epoch(self) -> None:
        self.loader.next_epoch()
        self.windows = 0


def batches(job: Job, dp_rank: int, dp_size: int, steps: int) -> Iterator[tuple[int, list[PackedBatch]]]:
    """(step, micro-batches of this rank) from the beginning of a run, `steps` of them or all there are.

    At the end of an epoch a rank may have none left while others do: these steps are empty here. The other
    ranks are read only then, when it matters.
    """
    own = _Rank(job, dp_rank, dp_size)
    others = [_Rank(job, rank, dp_size) for rank in range(dp_size) if rank != dp_rank]
    epochs, max_steps = job.trainer.num_train_epochs, job.trainer.max_steps
    last = steps if epochs is not None or max_steps is None else min(steps, max_steps)
    step = window = 0
    try:
        while step < last:
            micros = own.next_window()
            if micros or any(other.has_window(window) for other in others):
                step, window = step + 1, window + 1
                yield step, micros
                continue
            if epochs is not None and own.loader.epoch + 1 >= epochs:
                return
            if not window:
                skipped = [record for rank in (own, *others) for record in rank.loader.take_skipped()]
                raise UserError(
                    f"dataset_config.datasets: a whole pass gave no usable row{kinds_of(skipped)}; "
                    "`data-prep validate --processor` names them"
                )
            for rank in (own, *others):
                rank.next_epoch()
            window = 0
    finally:
        for rank in (own, *others):
            rank.loader.close()


def _print(console: Console, record: dict, batch: PackedBatch, processor: Processor) -> None:
    console.print(
        f"step {record['step']}, micro-batch {record['micro']}: "
        f"{len(record['rows'])} rows, {record['tokens']} tokens",
        style="bold",
    )
    for index, row in enumerate(record["rows"]):
        console.print(
            f"{row['source']} shard {row['shard']} row {row['row']} id {row['id']}: {row['length']} tokens, "
            f"{row['supervised']} supervised",
            style="dim",
        )
        text = Text()
        for run, supervised in text_runs(batch, index, processor):
            text.append(run, style="bold green" if supervised else "")
        console.print(text)
