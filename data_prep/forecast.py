"""How rows would pack in a run, and what its steps would cost, from their lengths alone; no model is run.

Rows are dealt as the loader deals them: one after the other to logical shards, each with its own packs, whose
turn it is one after the other; a step takes a pack of every rank and lasts as long as its dearest. Cost is
that of docs/packing.md, in tokens of short text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from lmms_engine.config import DatasetSection, PackingKwargs
from lmms_engine.datasets.pack import PACKERS, Packer

STRATEGIES = ("first_fit", "best_fit", "balanced")
SHARDS: int = DatasetSection.model_fields["num_logical_shards"].default


@dataclass(frozen=True)
class Measured:
    """A row of which only sizes are known."""

    tokens: int
    units: int   # media units

    def __len__(self) -> int:
        return self.tokens


class Forecast(NamedTuple):
    """Of an epoch. cost: of the dearest rank in a step, mean over the steps.

    fill: tokens over the room of all packs. spread: how much longer than the mean rank the dearest takes,
    mean over the steps. long: rows longer than a pack, which a run drops.
    """

    strategy: str
    packs: int
    steps: int
    fill: float
    cost: float
    spread: float
    long: int


def forecast(
    rows: Sequence[Measured], length: int, ranks: int, strategy: str, settings: PackingKwargs | None = None
) -> Forecast:
    """What a strategy makes of the rows on so many ranks, one pack a step and rank."""
    settings = settings or PackingKwargs()
    own_cost = partial(_cost, settings)
    fitting = [row for row in rows if 0 < len(row) <= length]
    shards = max(SHARDS, ranks)
    queues = []
    for rank in range(ranks):
        own = range(rank, shards, ranks)
        make = _packers(strategy, length, settings, own_cost, len(own))
        packs = [_packs(make(), fitting[shard::shards]) for shard in own]
        # Shards take turns: a rank's packs are the first of each, then the second of each, and so on.
        queues.append([pack for turn in zip_longest(*packs) for pack in turn if pack])
    costs = [[sum(map(own_cost, pack or ())) for pack in step] for step in zip_longest(*queues)]
    count = sum(map(len, queues))
    return Forecast(
        strategy,
        packs=count,
        steps=len(costs),
        fill=sum(map(len, fitting)) / (count * length) if count else 0.0,
        cost=sum(map(max, costs)) / len(costs) if costs else 0.0,
        spread=sum(max(step) * ranks / sum(step) - 1 for step in costs) / len(costs) if costs else 0.0,
        long=sum(len(row) > length for row in rows),
    )


def _cost(settings: PackingKwargs, row: Measured) -> float:
    return row.tokens + row.tokens**2 / settings.attention_length + settings.media_cost * row.units


def _packers(
    strategy: str,
    length: int,
    settings: PackingKwargs,
    cost: Callable[[Measured], float],
    num_shards: int,
) -> Callable[[], Packer[Measured]]:
    """As the loader makes them: open bins are a rank's, shared by its shards, at least two each."""
    open_bins = max(settings.open_bins // num_shards, min(settings.open_bins, 2))
    measures: dict[str, Any] = {}
    if strategy == "balanced":
        measures = {"cost": cost, "budget": settings.cost_budget * length}
    return partial(PACKERS.get(strategy), length, open_bins, **measures)


def _packs(packer: Packer[Measured], rows: Sequence[Measured]) -> list[list[Measured]]:
    return [pack for row in rows for pack in packer.add(row)] + packer.flush()
