"""One call at a time, and no lock file left."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from data_prep.lock import alone

HOLDERS, TURNS = 4, 25


def count_up(counter: Path) -> None:
    for _ in range(TURNS):
        with alone(counter):
            seen = int(counter.read_text())
            os.sched_yield()
            counter.write_text(str(seen + 1))


def test_nobody_comes_in_while_another_is_inside(tmp_path: Path) -> None:
    counter = tmp_path / "made" / "counter"
    with alone(counter):
        counter.write_text("0")
    context = multiprocessing.get_context("spawn")
    holders = [context.Process(target=count_up, args=(counter,)) for _ in range(HOLDERS)]
    for holder in holders:
        holder.start()
    for holder in holders:
        holder.join(60)
    assert counter.read_text() == str(HOLDERS * TURNS)
    assert list(counter.parent.iterdir()) == [counter]


def test_one_that_a_killed_call_left_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").touch()
    with alone(tmp_path / "out"):
        assert (tmp_path / ".out.lock").exists()
    assert not list(tmp_path.iterdir())
