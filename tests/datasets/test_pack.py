"""Packers: exact first-fit, nothing lost, nothing too long, fast enough."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmms_engine.datasets.pack import PACKERS, FirstFit, Single
from lmms_engine.errors import UserError


@dataclass(frozen=True)
class Item:
    key: int
    size: int

    def __len__(self) -> int:
        return self.size


def run(packer: FirstFit[Item], sizes: list[int]) -> list[list[int]]:
    packs = [pack for i, size in enumerate(sizes) for pack in packer.add(Item(i, size))]
    return [[item.size for item in pack] for pack in packs + packer.flush()]


def test_first_fit_by_hand() -> None:
    # 6 opens A; 5 opens B; 4 completes A, which leaves; 3 fits B; 7 opens C; 2 completes B.
    assert run(FirstFit(10, 2), [6, 5, 4, 3, 7, 2]) == [[6, 4], [5, 3, 2], [7]]
    # Both bins open and 9 fits in neither: the fuller one (7) leaves.
    assert run(FirstFit(10, 2), [6, 7, 9, 4]) == [[7], [6, 4], [9]]
    # Equally full: the oldest leaves. A sample as long as a pack is one.
    assert run(FirstFit(10, 2), [6, 6, 10, 5]) == [[6], [10], [6], [5]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=120), st.integers(1, 5), st.integers(0, 120))
def test_every_sample_once_and_resume_anywhere(sizes: list[int], open_bins: int, cut: int) -> None:
    whole = FirstFit(50, open_bins)
    packs = [pack for i, size in enumerate(sizes) for pack in whole.add(Item(i, size))] + whole.flush()
    assert sorted(item.key for pack in packs for item in pack) == list(range(len(sizes)))
    assert all(0 < sum(map(len, pack)) <= 50 for pack in packs)

    first, second = FirstFit(50, open_bins), FirstFit(50, open_bins)
    resumed = []
    for i, size in enumerate(sizes):
        if i == cut:
            second.restore(first.bins)
        resumed += (first if i < cut else second).add(Item(i, size))
    resumed += (first if len(sizes) <= cut else second).flush()
    assert resumed == packs


def test_too_long_empty_or_overfull_is_an_error() -> None:
    packer = FirstFit(10)
    for size in (0, 11):
        with pytest.raises(ValueError, match="does not fit"):
            packer.add(Item(0, size))
    with pytest.raises(ValueError, match="more than 10"):
        packer.restore([[Item(0, 6), Item(1, 6)]])
    with pytest.raises(ValueError, match="positive"):
        FirstFit(10, 0)


def test_restoring_more_bins_than_may_be_open_closes_some() -> None:
    packer = FirstFit(10, 1)
    packer.restore([[Item(0, 6)], [Item(1, 7)], [Item(2, 8)]])
    assert [[i.size for i in pack] for pack in packer.add(Item(3, 9))] == [[8], [7], [6]]


def test_single_packs_each_sample_alone() -> None:
    packer: Single[Item] = Single()
    assert packer.add(Item(0, 99)) == [[Item(0, 99)]]
    assert packer.flush() == packer.bins == []
    packer.restore([])
    with pytest.raises(ValueError, match="no sample waits"):
        packer.restore([[Item(0, 1)]])


def test_strategies_by_name() -> None:
    assert PACKERS.get("first_fit") is FirstFit
    with pytest.raises(UserError, match=r"unknown packing strategy 'best_fit' \(legal: first_fit\)"):
        PACKERS.get("best_fit")


def test_fifty_thousand_samples_a_second() -> None:
    items = [Item(i, 100 + i * 7919 % 3000) for i in range(20_000)]

    def seconds() -> float:
        packer = FirstFit(16_384, 16)
        began = time.perf_counter()
        for item in items:
            packer.add(item)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < len(items) / 50_000
