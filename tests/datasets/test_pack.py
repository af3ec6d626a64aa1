"""Packers: exact choices, nothing lost, nothing too long, equal costs, fast enough."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmms_engine.datasets.pack import DEAR_EVERY, PACKERS, Balanced, BestFit, FirstFit, Packer, Single
from lmms_engine.errors import UserError


@dataclass(frozen=True)
class Item:
    key: int
    size: int
    units: int = 0

    def __len__(self) -> int:
        return self.size

    @property
    def cost(self) -> float:
        return self.size + self.size**2 / 40


Make = Callable[[int, int], Packer[Item]]
MAKERS: dict[str, Make] = {
    "first_fit": FirstFit,
    "best_fit": BestFit,
    "balanced": lambda length, bins: Balanced(length, bins, cost=lambda item: item.cost, budget=1.1 * length),
    "media": lambda length, bins: BestFit(length, bins, media_units=20, units=lambda item: item.units),
    "balanced media": lambda length, bins: Balanced(
        length, bins, cost=lambda item: item.cost, budget=1.1 * length, media_units=20,
        units=lambda item: item.units,
    ),
}  # fmt: skip


def fill(packer: Packer[Item], items: Sequence[Item]) -> list[list[Item]]:
    return [pack for item in items for pack in packer.add(item)] + packer.flush()


def run(packer: Packer[Item], sizes: list[int]) -> list[list[int]]:
    return [[i.size for i in pack] for pack in fill(packer, [Item(i, size) for i, size in enumerate(sizes)])]


def test_first_fit_by_hand() -> None:
    # 6 opens A; 5 opens B; 4 completes A, which leaves; 3 fits B; 7 opens C; 2 completes B.
    assert run(FirstFit(10, 2), [6, 5, 4, 3, 7, 2]) == [[6, 4], [5, 3, 2], [7]]
    # Both bins open and 9 fits in neither: the fuller one (7) leaves.
    assert run(FirstFit(10, 2), [6, 7, 9, 4]) == [[7], [6, 4], [9]]
    # Equally full: the oldest leaves. A sample as long as a pack is one.
    assert run(FirstFit(10, 2), [6, 6, 10, 5]) == [[6], [10], [6], [5]]


def test_best_fit_by_hand() -> None:
    # 3 fits both; first-fit would put it to the 5, best-fit completes the 7.
    assert run(BestFit(10, 2), [5, 7, 3, 5]) == [[7, 3], [5, 5]]
    assert run(FirstFit(10, 2), [5, 7, 3, 5]) == [[5, 3], [7], [5]]


def test_media_units_are_a_second_budget() -> None:
    items = [Item(0, 1, 6), Item(1, 1, 5), Item(2, 1, 4), Item(3, 1, 0), Item(4, 1, 9)]
    for kind in (FirstFit, BestFit):
        packer = kind(100, 2, media_units=10, units=lambda item: item.units)
        packs = [[item.units for item in pack] for pack in fill(packer, items)]
        # 6 and 5 do not go together; 9 fits in neither: the one full of media leaves, few tokens or not.
        assert packs == [[6, 4, 0], [5], [9]]
    with pytest.raises(ValueError, match="11 media units does not fit in packs of 10"):
        packer.add(Item(5, 1, 11))
    with pytest.raises(ValueError, match="more than 10 media units"):
        packer.restore([[Item(0, 1, 6), Item(1, 1, 5)]])
    with pytest.raises(ValueError, match="go together"):
        FirstFit(10, media_units=10)


@pytest.mark.parametrize("strategy", MAKERS)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=120),
    st.integers(1, 5),
    st.integers(0, 120),
)
def test_every_sample_once_and_resume_anywhere(
    strategy: str, sizes: list[tuple[int, int]], open_bins: int, cut: int
) -> None:
    items = [Item(i, size, units) for i, (size, units) in enumerate(sizes)]
    whole, first, second = (MAKERS[strategy](50, open_bins) for _ in range(3))
    packs = fill(whole, items)
    assert sorted(item.key for pack in packs for item in pack) == list(range(len(sizes)))
    assert all(0 < sum(map(len, pack)) <= 50 for pack in packs)
    if "media" in strategy:
        assert all(sum(item.units for item in pack) <= 20 for pack in packs)
    if "balanced" in strategy:
        assert all(sum(item.cost for item in pack) <= 55 + 1e-9 for pack in packs if len(pack) > 1)

    resumed: list[list[Item]] = []
    for i, item in enumerate(items):
        if i == cut:
            second.restore(first.bins, len(resumed))
        resumed += (first if i < cut else second).add(item)
        assert len((first if i < cut else second).bins) <= open_bins
    resumed += (first if len(items) <= cut else second).flush()
    assert resumed == packs


@pytest.mark.parametrize("strategy", MAKERS)
def test_too_long_empty_or_overfull_is_an_error(strategy: str) -> None:
    packer = MAKERS[strategy](10, 2)
    for size in (0, 11):
        with pytest.raises(ValueError, match="does not fit"):
            packer.add(Item(0, size))
    with pytest.raises(ValueError, match="more than 10"):
        packer.restore([[Item(0, 6), Item(1, 6)]])
    with pytest.raises(ValueError, match="positive"):
        MAKERS[strategy](10, 0)


def test_restoring_more_bins_than_may_be_open_closes_some() -> None:
    packer = FirstFit(10, 1)
    packer.restore([[Item(0, 6)], [Item(1, 7)], [Item(2, 8)]])
    assert [[i.size for i in pack] for pack in packer.add(Item(3, 9))] == [[8], [7], [6]]
    balanced = Balanced(10, 2, cost=len, budget=9)
    balanced.restore([[Item(0, 9)], [Item(1, 10)], [Item(2, 3)], [Item(3, 5)]])
    assert [[i.size for i in pack] for pack in balanced.add(Item(4, 9))] == [[9], [9], [5]]
    assert [[i.size for i in pack] for pack in balanced.bins] == [[3], [10]]


def test_balanced_stops_at_the_cost() -> None:
    # Costs with a budget of 20: 10 -> 12.5, 4 -> 4.4, 3 -> 3.225: 10 + 4 + 3 would be 20.1, 10 + 4 is 16.9.
    packer = Balanced(30, 2, cost=lambda item: item.cost, budget=20)
    assert run(packer, [10, 4, 3, 10]) == [[10, 4], [3, 10]]
    # By tokens, first-fit puts all of them together.
    assert run(FirstFit(30, 2), [10, 4, 3, 10]) == [[10, 4, 3, 10]]
    # Short of cost, the tokens are the limit.
    assert run(Balanced(5, 2, cost=lambda item: 1, budget=20), [3, 2, 3]) == [[3, 2], [3]]


def test_dear_samples_wait_for_their_turn() -> None:
    def packs_of(first_dear: int) -> list[list[int]]:
        packer = Balanced(10, 4, cost=len, budget=9)
        sizes = [8] * 40
        sizes[first_dear] = 10
        sizes[first_dear + 1] = 9
        return run(packer, sizes)

    for first_dear in (0, 3, 9):
        packs = packs_of(first_dear)
        assert packs.index([10]) == DEAR_EVERY - 1  # the dearest first
        assert packs.index([9]) == 2 * DEAR_EVERY - 1
    # More than may wait: the least dear leaves, at once.
    packer = Balanced(10, 3, cost=len, budget=8)
    assert [packer.add(Item(i, size)) for i, size in enumerate((9, 8, 10))] == [[], [], [[Item(1, 8)]]]
    assert run(packer, [1]) == [[1], [10], [9]]


def spread(make: Callable[[], Packer[Item]], items: list[Item], cost: Callable[[Item], float]) -> float:
    """Mean over steps of (slowest of 8 ranks / mean of ranks - 1), one shard a rank, one pack a step."""
    ranks = []
    for rank in range(8):
        packer = make()
        ranks.append([sum(map(cost, pack)) for item in items[rank::8] for pack in packer.add(item)])
    steps = list(zip(*ranks, strict=False))
    return sum(max(step) / (sum(step) / 8) - 1 for step in steps) / len(steps)


def test_balanced_has_a_third_of_the_spread() -> None:
    length, pick = 32_000, random.Random(7)
    items = [Item(i, min(max(int(pick.lognormvariate(6.9, 1.0)), 16), length)) for i in range(12_000)]

    def cost(item: Item) -> float:
        return item.size + item.size**2 / 25_000

    plain = spread(partial(FirstFit, length, 4), items, cost)
    even = spread(partial(Balanced, length, 4, cost=cost, budget=1.1 * length), items, cost)
    assert 0.1 < plain < 0.3
    assert even < plain / 3


def test_nearly_full_on_realistic_lengths() -> None:
    length, pick = 32_000, random.Random(7)
    sizes = [min(max(int(pick.lognormvariate(6.9, 1.0)), 16), length) for i in range(6000)]
    for kind in (FirstFit, BestFit):
        packer = kind(length, 4)
        packs = [pack for i, size in enumerate(sizes) for pack in packer.add(Item(i, size))]
        assert sum(len(item) for pack in packs for item in pack) >= 0.98 * length * len(packs)


def test_single_packs_each_sample_alone() -> None:
    packer: Single[Item] = Single()
    assert packer.add(Item(0, 99)) == [[Item(0, 99)]]
    assert packer.flush() == packer.bins == []
    packer.restore([])
    with pytest.raises(ValueError, match="no sample waits"):
        packer.restore([[Item(0, 1)]])


def test_strategies_by_name() -> None:
    names = ("first_fit", "best_fit", "balanced")
    assert [PACKERS.get(name) for name in names] == [FirstFit, BestFit, Balanced]
    with pytest.raises(UserError, match=r"unknown packing strategy 'worst' \(legal: balanced, best_fit, fir"):
        PACKERS.get("worst")


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "balanced"])
def test_fifty_thousand_samples_a_second(strategy: str) -> None:
    items = [Item(i, 100 + i * 7919 % 3000) for i in range(20_000)]

    def seconds() -> float:
        packer = MAKERS[strategy](16_384, 16)
        began = time.process_time()
        for item in items:
            packer.add(item)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < len(items) / 50_000
