"""How full the packs of a run are, and how unequal the ranks' shares of a step: one row a step.

`packing.jsonl` in the run folder: `step`; `packs`, of all data ranks; `fill`, tokens over the room of these
packs, null without packing; `spread`, how much longer than the mean rank the dearest one takes by the cost of
its samples (docs/packing.md), whatever the machine then does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.cost import SampleCost, media_units

PACKING_FILE = "packing.jsonl"
PACKING_KEYS = ("step", "packs", "fill", "spread")


@dataclass(frozen=True)
class Packing:
    """What packs are measured by. length: tokens that a pack holds; None: packs hold one row each."""

    length: int | None
    packs_per_micro: int
    cost: SampleCost

    @classmethod
    def of(cls, job: Job) -> Packing:
        """As the job says."""
        data, kwargs = job.dataset, job.dataset.packing_kwargs
        return cls(
            data.packing_length if data.packing else None,
            job.trainer.per_device_train_batch_size,
            SampleCost(kwargs.attention_length, kwargs.media_cost),
        )

    def measure(self, micros: Iterable[PackedBatch]) -> dict[str, Any]:
        """A rank's share of a step."""
        micros = list(micros)
        cost = 0.0
        for micro in micros:
            cost += sum(self.cost.of(length, 0) for length in micro.row_lengths())
            cost += self.cost.of(0, media_units(micro))
        return {"packs": len(micros) * self.packs_per_micro, "cost": cost}

    def row(self, step: int, tokens: int, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The row of a step from the shares of all data ranks."""
        packs, costs = sum(share["packs"] for share in shares), [share["cost"] for share in shares]
        mean = sum(costs) / len(costs)
        return {
            "step": step,
            "packs": packs,
            "fill": tokens / (packs * self.length) if self.length and packs else None,
            "spread": max(costs) / mean - 1 if mean else None,
        }


def means(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Fill over all packs and the mean spread of the steps; None where there is none."""
    filled = [row for row in rows if row["fill"] is not None]
    spreads = [row["spread"] for row in rows if row["spread"] is not None]
    packs = sum(row["packs"] for row in filled)
    fill = sum(row["fill"] * row["packs"] for row in filled) / packs if packs else None
    return fill, sum(spreads) / len(spreads) if spreads else None


def describe(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Both figures in words, by name; empty for a run that did not note them."""
    fill, spread = means(rows)
    found = {}
    if fill is not None:
        found["packing fill"] = f"{fill:.1%} of the room in packs"
    if spread is not None:
        found["predicted spread of ranks"] = f"{spread:.1%} over the mean rank"
    return found
