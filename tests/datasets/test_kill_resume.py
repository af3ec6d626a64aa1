"""A loader killed at any instant and resumed with other ranks and workers gives every row exactly once.

Suite: 4 kills. `KILLS=20 pytest tests/datasets/test_kill_resume.py -s` does more and prints what happened.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmms_engine.datasets.loader import Loader, merge_states
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import Row
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import ByteProcessor, ids_of, make_job, text_row, write_jsonl

KILLS = int(os.environ.get("KILLS", "4"))
ROW_SECONDS = 0.002
LONGEST_LIFE = 0.5  # seconds from the first step, or from the start, to the kill
ROWS, TABLE_ROWS, BAD = 120, 60, range(7, 120, 30)


class SlowProcessor(ByteProcessor):
    """Takes its time, so that a kill finds rows in every stage."""

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        time.sleep(ROW_SECONDS)
        return super().__call__(row, ref)


def write_rows(folder: Path) -> list[dict[str, Any]]:
    """A JSONL file in which some rows are bad, and a Parquet file of several row groups."""
    made = [text_row(f"r{i}", 10 + i * 7 % 23) for i in range(ROWS)]
    for i in BAD:
        made[i]["image"] = f"missing-{i}.png"
    table = [text_row(f"t{i}", 12 + i * 5 % 31) for i in range(TABLE_ROWS)]
    columns = {key: [row[key] for row in table] for key in ("id", "messages")}
    pq.write_table(pa.table(columns), folder / "table.parquet", row_group_size=16)
    write_jsonl(folder / "rows.jsonl", made)
    return [{"path": str(folder / name)} for name in ("rows.jsonl", "table.parquet")]


def run(
    stepping: Event, datasets: list[dict[str, Any]], file: Path, ranks: int, workers: int, end: int | None
) -> None:
    """Goes on from the state in `file`, saving every second step; ends when `end` epochs are over."""
    job = make_job(
        datasets,
        dataloader_num_workers=workers,
        num_logical_shards=8,
        packing_kwargs={"open_bins": 16},
        mixture_stop="all",
        on_bad_row="skip",
        max_skip_fraction=0.5,
    )
    loaders = [Loader(job, partial(SlowProcessor), dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    epochs: list[dict[str, list[str]]] = [{"given": [], "skipped": []}]
    if file.exists():
        saved = json.loads(file.read_text())
        epochs = saved["epochs"]
        for loader in loaders:
            loader.load_state_dict(saved["state"])
    step = 0
    while end is None or len(epochs) <= end:
        steps = [loader.next_step() for loader in loaders]
        epochs[-1]["given"] += ids_of(steps)
        epochs[-1]["skipped"] += [record.id for loader in loaders for record in loader.take_skipped()]
        if not any(steps):
            epochs.append({"given": [], "skipped": []})
            for loader in loaders:
                loader.next_epoch()
        step += 1
        stepping.set()
        if step % 2 == 0 or not any(steps):
            state = merge_states([loader.state_dict() for loader in loaders])
            file.with_suffix(".new").write_text(json.dumps({"epochs": epochs, "state": state}))
            file.with_suffix(".new").replace(file)
    for loader in loaders:
        loader.close()


def live(life: tuple[bool, float] | None, *args: Any) -> None:
    """`run` in a process group of its own, killed after its life, or let run to its end.

    life: whether it counts from the first step, not from the start; seconds.
    """
    context = multiprocessing.get_context("fork")
    stepping = context.Event()
    process = context.Process(target=_in_own_group, args=(stepping, *args))
    process.start()
    if life is not None and life[0]:
        assert stepping.wait(60)
    process.join(60 if life is None else life[1])
    alive = process.is_alive()
    if alive:
        with suppress(ProcessLookupError):  # it may not have made its group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    assert alive == (life is not None), f"exit code {process.exitcode}"
    assert process.exitcode == (-signal.SIGKILL if alive else 0)


def _in_own_group(*args: Any) -> None:
    os.setpgrp()
    run(*args)


def test_every_row_comes_once_whatever_kills_the_loader(tmp_path: Path) -> None:
    datasets, file = write_rows(tmp_path), tmp_path / "state.json"
    rng = random.Random(20)
    places = []
    for _ in range(KILLS):
        ranks, workers = rng.choice((1, 2, 4)), rng.choice((0, 1, 3))
        life = (rng.random() < 0.75, rng.uniform(0, LONGEST_LIFE))
        live(life, datasets, file, ranks, workers, None)
        epochs = json.loads(file.read_text())["epochs"] if file.exists() else [{"given": []}]
        places.append((len(epochs), len(epochs[-1]["given"])))
        since = "its first step" if life[0] else "its start"
        print(f"{ranks} ranks, {workers} workers, killed {life[1]:.2f} s after {since}; saved:", *places[-1])
    assert places == sorted(places)
    assert len(set(places)) > 1  # some lives saved something
    begun = places[-1][0]
    # to the end of the epoch under way, with yet another number of ranks
    live(None, datasets, file, rng.choice((1, 2, 4)), rng.choice((0, 1, 3)), begun)
    bad = {f"r{i}" for i in BAD}
    good = sorted({*(f"r{i}" for i in range(ROWS)), *(f"t{i}" for i in range(TABLE_ROWS))} - bad)
    epochs = json.loads(file.read_text())["epochs"]
    assert len(epochs) == begun + 1
    for epoch in epochs[:-1]:
        assert sorted(epoch["given"]) == good
        assert sorted(epoch["skipped"]) == sorted(bad)
