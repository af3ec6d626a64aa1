"""The order of rows: a permutation each epoch, dealt to all shards, mixed by weight, a function of the
seed."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmms_engine.datasets import order as order_module
from lmms_engine.datasets.order import Address, Order, OrderSettings, _whole
from tests.datasets.toy_data import (
    ids_of,
    ids_of_epoch,
    make_job,
    make_loader,
    steps_of_epoch,
    text_row,
    write_jsonl,
)


class Rows:
    """Just the counts that an order needs."""

    row_bytes = 1
    rows_each = 1.0

    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.num_shards = len(counts)
        self.num_rows = sum(counts)

    def shard_rows(self, shard: int) -> int:
        return self.counts[shard]


def sequence(order: Order, shard: int) -> list[Address]:
    """All rows of a logical shard, asked for one window at a time."""
    rows: list[Address] = []
    while len(rows) < order.shard_rows(shard):
        addresses, offset = order.window_of(shard, len(rows))
        assert offset == 0
        rows += addresses
    return rows


def make(sources: list[Rows], shards: int, epoch: int = 0, **keys: Any) -> Order:
    given = {"seed": 1, "shuffle": True, "weights": (1.0,) * len(sources), "mixture_stop": "all", **keys}
    return Order(sources, OrderSettings(num_logical_shards=shards, **given), epoch)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 3),
)
def test_an_epoch_is_every_row_once(counts: list[list[int]], shards: int, shuffle: bool, epoch: int) -> None:
    sources = [Rows(*each) for each in counts if sum(each)]
    if not sources:
        return
    order = make(sources, shards, epoch, shuffle=shuffle)
    rows = [row for shard in range(shards) for row in sequence(order, shard)]
    expected = [
        Address(i, shard, row)
        for i, source in enumerate(sources)
        for shard in range(source.num_shards)
        for row in range(source.shard_rows(shard))
    ]
    assert sorted(rows) == expected
    assert order.num_rows == len(expected) == sum(order.shard_rows(shard) for shard in range(shards))


def test_every_shard_gets_rows_from_one_small_file() -> None:
    order = make([Rows(40)], 32)
    assert min(order.shard_rows(shard) for shard in range(32)) >= 1
    assert [make([Rows(11)], 2).shard_rows(shard) for shard in (0, 1)] == [6, 5]


def test_large_sources_are_read_in_runs_and_still_shuffled() -> None:
    order = make([Rows(100_000, 100_000)], 4)
    assert order.chunk == order_module.CHUNK_ROWS
    window, _ = order.window_of(0, 0)
    assert len(window) == order_module.WINDOW_ROWS
    places = sorted(window)
    runs = 1 + sum(b != a._replace(row=a.row + 1) for a, b in itertools.pairwise(places))
    assert runs <= 2 * order_module.WINDOW_ROWS // order_module.CHUNK_ROWS
    assert window != places
    assert order.window_of(0, 700) == (window, 700)
    other, _ = make([Rows(100_000, 100_000)], 4, epoch=1).window_of(0, 0)
    assert sorted(other) != places


def test_every_stage_of_the_shuffle_is_another_in_each_epoch() -> None:
    first, second = (make([Rows(4000)], 2, epoch=epoch) for epoch in (0, 1))
    assert first._pools[0].rows(0, 4000) != second._pools[0].rows(0, 4000)   # slices
    places = []
    for order in (first, second):
        window = order.window_of(0, 0)[0]
        dealt = order._pools[0].rows(0, 4000)
        places.append(np.argsort([dealt.index(row) for row in window]).tolist())
    assert places[0] != places[1]   # rows of a window


def test_without_shuffle_rows_are_dealt_in_file_order() -> None:
    order = make([Rows(5, 6)], 4, shuffle=False)
    dealt = [sequence(order, shard) for shard in range(4)]
    turns = [dealt[s][k] for k in range(3) for s in range(4) if k < len(dealt[s])]
    assert turns == [Address(0, 0, i) for i in range(5)] + [Address(0, 1, i) for i in range(6)]


# Mixing ----------------------------------------------------------------------------------------------


def drawn(order: Order, shards: int) -> list[Address]:
    return [row for shard in range(shards) for row in sequence(order, shard)]


@pytest.mark.parametrize("stop", ["first", "all"])
def test_weights_half_and_half_of_ten_and_thirty_rows(stop: str) -> None:
    order = make([Rows(10), Rows(30)], 4, weights=(0.5, 0.5), mixture_stop=stop)
    rows = drawn(order, 4)
    shares = Counter(row.source for row in rows)
    times = Counter(rows)
    if stop == "first":
        assert shares[0] == 10
        assert max(times.values()) == 1
    else:
        assert shares[1] == 30
        assert max(times[Address(1, 0, row)] for row in range(30)) == 1
        seen = [times[Address(0, 0, row)] for row in range(10)]
        assert max(seen) - min(seen) <= 1  # no row again before its source is used up
    assert abs(shares[0] - len(rows) / 2) <= 3 * math.sqrt(len(rows) / 4)
    again = drawn(make([Rows(10), Rows(30)], 4, weights=(0.5, 0.5), mixture_stop=stop), 4)
    assert again == rows
    assert drawn(make([Rows(10), Rows(30)], 4, weights=(0.5, 0.5), mixture_stop=stop, seed=2), 4) != rows


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 5)), min_size=2, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["first", "all"]),
)
def test_mixtures_keep_their_shares_and_stop_rule(
    parts: list[tuple[int, float]], shards: int, stop: str
) -> None:
    sizes, weights = zip(*parts, strict=True)
    if set(weights) == {1.0}:
        return
    order = make([Rows(size) for size in sizes], shards, weights=weights, mixture_stop=stop)
    rows = drawn(order, shards)
    assert len(rows) == order.num_rows
    times = Counter(rows)
    totals = Counter(row.source for row in rows)
    block = order_module.DRAWS_PER_BLOCK * shards * order.chunk
    for i, (size, weight) in enumerate(parts):
        counts = [times[Address(i, 0, row)] for row in range(size)]
        assert max(counts) - min(counts) <= 1
        assert abs(totals[i] - len(rows) * weight / sum(weights)) <= block + len(parts) * order.chunk
    whole = [totals[i] >= size for i, size in enumerate(sizes)]
    assert any(whole) if stop == "first" else all(whole)
    if stop == "first":
        assert all(totals[i] <= size for i, size in enumerate(sizes))


@pytest.mark.parametrize("seed", range(5))
def test_sources_of_one_size_and_weight_run_out_together(seed: int) -> None:
    keys = {"weights": (0.5, 0.5), "mixture_stop": "first", "seed": seed}
    shares = Counter(row.source for row in drawn(make([Rows(2000), Rows(2000)], 4, **keys), 4))
    assert max(shares.values()) == 2000
    assert min(shares.values()) >= 1700   # two chunks of 125 rows less at the most


def test_every_logical_shard_gets_rows_of_every_source() -> None:
    order = make([Rows(2000), Rows(2000)], 4, weights=(0.5, 0.5), mixture_stop="first")
    for shard in range(4):
        rows = sequence(order, shard)
        assert 0.2 < sum(row.source for row in rows) / len(rows) < 0.8


def test_first_with_equal_weights_still_ends_with_the_first_source() -> None:
    rows = drawn(make([Rows(10), Rows(30)], 2, mixture_stop="first"), 2)
    assert Counter(row.source for row in rows)[0] == 10
    assert len(rows) < 40


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(1, 40))
def test_whole_counts_sum_up_and_never_drift(shares: list[float], size: int) -> None:
    share = np.array(shares) / sum(shares)
    total = np.zeros(len(share), dtype=np.int64)
    for block in range(1, 60):
        counts = _whole(share * (size * block) - total, size)
        assert counts.sum() == size
        assert counts.min() >= 0
        total += counts
        assert np.abs(total - share * size * block).max() <= 2


# Through the loader ----------------------------------------------------------------------------------


def test_two_sources_over_ranks_and_workers_give_every_row_once(tmp_path: Path) -> None:
    entries = [
        {"path": str(write_jsonl(tmp_path / f"{name}.jsonl", [text_row(f"{name}{i}") for i in range(count)]))}
        for name, count in (("a", 10), ("b", 30))
    ]
    for workers in (0, 2):
        ranks = ids_of_epoch(make_job(entries, dataloader_num_workers=workers), 2)
        assert sorted(ranks[0] + ranks[1]) == sorted(
            [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(30)]
        )
        assert abs(len(ranks[0]) - len(ranks[1])) <= 1
    loader = make_loader(make_job(entries))
    names = {row.source for micros in steps_of_epoch(loader) for micro in micros for row in micro.rows}
    assert names == {entry["path"] for entry in entries}


@pytest.mark.parametrize("stop", ["first", "all"])
def test_a_mixture_over_ranks_and_workers_repeats_nothing_too_early(tmp_path: Path, stop: str) -> None:
    entries = [
        {"path": str(write_jsonl(tmp_path / f"{name}.jsonl", [text_row(f"{name}{i}") for i in range(count)]))}
        for name, count in (("a", 10), ("b", 30))
    ]
    mixed = [{**entry, "weight": 0.5} for entry in entries]
    seen = []
    for workers in (0, 2):
        ranks = ids_of_epoch(make_job(mixed, mixture_stop=stop, dataloader_num_workers=workers), 2)
        seen.append(ranks)
    assert seen[0] == seen[1]
    times = Counter(seen[0][0] + seen[0][1])
    of_a = [times[f"a{i}"] for i in range(10)]
    if stop == "first":
        assert set(of_a) == {1}
        assert max(times.values()) == 1
    else:
        assert {times[f"b{i}"] for i in range(30)} == {1}
        assert max(of_a) - min(of_a) <= 1
    total = sum(times.values())
    assert abs(sum(of_a) - total / 2) <= 3 * math.sqrt(total / 4)
    assert not set(seen[0][0]) & set(seen[0][1]) or stop == "all"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_starts_over_only_once_it_is_used_up(tmp_path: Path, workers: int) -> None:
    """Exactly, row by row, over two ranks; a shuffle then mixes the rows of a window, here of all passes."""
    entries = [
        {"path": str(write_jsonl(tmp_path / f"{name}.jsonl", [text_row(f"{name}{i}") for i in range(count)]))}
        for name, count in (("a", 10), ("b", 30))
    ]
    keys = {"packing": False, "shuffle": False, "mixture_stop": "all", "dataloader_num_workers": workers}
    job = make_job([{**entry, "weight": 0.5} for entry in entries], **keys)
    ranks = ids_of_epoch(job, 2)
    turns = [name for pair in itertools.zip_longest(*ranks) for name in pair if name]
    for letter, size in (("a", 10), ("b", 30)):
        own = [name for name in turns if name.startswith(letter)]
        assert len(own) >= 29   # half of 59 or more
        for first in range(0, len(own) - size + 1, size):
            assert len(set(own[first : first + size])) == size
    shuffled = make([Rows(10), Rows(30)], 4, weights=(0.5, 0.5))._pools[0]
    passes = [shuffled.rows(first, 10) for first in (0, 10, 20)]
    assert all(len(set(rows)) == 10 for rows in passes)
    assert passes[0] != passes[1] != passes[2]


def test_three_epochs_are_three_orders_and_files_made_in_another_order_change_nothing(tmp_path: Path) -> None:
    def epochs(folder: Path, names: str) -> list[list[str]]:
        for name in names:
            write_jsonl(folder / f"{name}.jsonl", [text_row(f"{name}{i}") for i in range(8)])
        loader = make_loader(make_job(folder, dataloader_num_workers=2))
        seen = []
        for _ in range(3):
            seen.append(ids_of(steps_of_epoch(loader)))
            loader.next_epoch()
        loader.close()
        return seen

    first = epochs(tmp_path / "one", "abcd")
    assert first == epochs(tmp_path / "two", "dbca")
    assert len({tuple(ids) for ids in first}) == 3
    for ids in first:
        assert sorted(ids) == sorted(f"{name}{i}" for name in "abcd" for i in range(8))


@pytest.mark.parametrize("counts", [(11,), (11, 11, 11)])
@pytest.mark.parametrize("packing", [True, False])
def test_few_files_many_readers(tmp_path: Path, counts: tuple[int, ...], packing: bool) -> None:
    for number, count in enumerate(counts):
        write_jsonl(tmp_path / f"{number}.jsonl", [text_row(f"{number}-{i}") for i in range(count)])
    seen = []
    for workers in (0, 1, 4):
        job = make_job(tmp_path, packing=packing, dataloader_num_workers=workers, num_logical_shards=8)
        seen.append(ids_of_epoch(job, 2))
    assert seen[0] == seen[1] == seen[2]
    assert sorted(functools.reduce(operator.iadd, seen[0], [])) == sorted(
        f"{n}-{i}" for n, count in enumerate(counts) for i in range(count)
    )
    assert all(seen[0])
