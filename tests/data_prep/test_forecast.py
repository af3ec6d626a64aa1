"""Predicted packs and steps: by hand, and as the loader really makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.forecast import Measured, forecast
from lmms_engine.config import PackingKwargs
from lmms_engine.datasets.cost import SampleCost
from tests.datasets.toy_data import make_job, make_loader, steps_of_epoch, text_row, write_jsonl

LENGTHS = [10 + n * 37 % 55 for n in range(400)]


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "balanced"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_what_the_loader_makes(tmp_path: Path, strategy: str, ranks: int) -> None:
    """Without shuffle rows are dealt to 32 shards one after the other, as here."""
    path = write_jsonl(tmp_path / "rows.jsonl", (text_row(f"r{n}", size) for n, size in enumerate(LENGTHS)))
    kwargs = {"open_bins": 40}
    if strategy == "balanced":
        kwargs |= {"attention_length": 50.0, "media_cost": 0.0}
    settings = PackingKwargs(**{"attention_length": 50.0, "media_cost": 0.0, **kwargs})
    keys = {"packing_strategy": strategy, "packing_kwargs": kwargs, "num_logical_shards": 32}
    job = make_job(path, shuffle=False, **keys)
    cost = SampleCost(50.0, 0.0)
    queues = []
    for rank in range(ranks):
        steps = steps_of_epoch(make_loader(job, rank, ranks, stand_in=False))
        queues.append([[cost.of(length, 0) for length in pack.row_lengths()] for (pack,) in steps])
    found = forecast([Measured(size, 0) for size in LENGTHS], 64, ranks, strategy, settings)
    count, steps = sum(map(len, queues)), max(map(len, queues))
    assert (found.packs, found.steps, found.long) == (count, steps, 0)
    assert found.fill == pytest.approx(sum(LENGTHS) / (64 * count))
    costs = [[sum(queue[step]) if step < len(queue) else 0.0 for queue in queues] for step in range(steps)]
    assert found.cost == pytest.approx(sum(map(max, costs)) / steps)
    assert found.spread == pytest.approx(sum(max(c) / (sum(c) / ranks) - 1 for c in costs) / steps)
    assert (found.spread > 0.01) == (ranks > 1)


def test_by_hand() -> None:
    settings = PackingKwargs(attention_length=10, media_cost=0.5)
    # Each row goes to a shard of its own: 4 packs on 2 ranks are 2 steps.
    rows = [Measured(10, 0), Measured(5, 4), Measured(10, 0), Measured(10, 0), Measured(11, 0)]
    found = forecast(rows, 10, 2, "first_fit", settings)
    assert (found.packs, found.steps, found.fill, found.long) == (4, 2, 0.875, 1)
    assert found.cost == 20.0   # 20 against 5 + 2.5 + 2; 20 against 20
    assert found.spread == pytest.approx((20 / 14.75 - 1) / 2)
    nothing = forecast([Measured(11, 0)], 10, 2, "balanced", settings)
    assert nothing[1:] == (0, 0, 0.0, 0.0, 0.0, 1)
