"""Two runs' metrics, step by step: equal to the last bit, or within a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

FIRST_STEPS = 5   # rounding grows with every update, so later steps have more room
COUNTS = ("supervised_tokens", "tokens", "samples", "skipped")
VALUES = ("loss", "grad_norm", "epoch")
GROUPS = ("loss_terms", "source_loss", "lr")
NORM_FACTOR = 10.0   # a gradient norm may differ by so many times what a loss may


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that count as equal."""

    first: float = 1e-4
    last: float = 0.05

    def at(self, step: int, field: str) -> float:
        """The bound of one field at one step."""
        if field in COUNTS:
            return 0.0
        bound = self.first if step <= FIRST_STEPS else self.last
        return bound * NORM_FACTOR if field == "grad_norm" else bound


EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Compared:
    """One row of both runs. field, difference: the field that is furthest off, and how far, relatively."""

    step: int
    split: str
    then: float | None
    now: float | None
    field: str
    difference: float
    equal: bool


def compare(
    then: list[dict[str, Any]],
    now: list[dict[str, Any]],
    tolerance: Tolerance,
    last_step: int,
    *,
    cut_short: bool = False,
) -> list[Compared]:
    """Every row up to `last_step` of either run; a row that one of them lacks is a difference.

    cut_short: the first run was killed, and may lack the evaluation of its last step.
    """
    by_key = [
        {(row["step"], row["split"] == "eval"): row for row in rows if row["step"] <= last_step}
        for rows in (then, now)
    ]
    keys = sorted({*by_key[0], *by_key[1]})
    if cut_short:
        keys = [key for key in keys if key in by_key[0] or key[0] < last_step]
    return [_row(key, by_key[0].get(key), by_key[1].get(key), tolerance) for key in keys]


def _row(
    key: tuple[int, bool], then: dict[str, Any] | None, now: dict[str, Any] | None, tolerance: Tolerance
) -> Compared:
    step, split = key[0], "eval" if key[1] else "train"
    if then is None or now is None:
        losses = [None if row is None else row["loss"] for row in (then, now)]
        return Compared(step, split, *losses, "the whole row", math.inf, False)
    old, new = _flat(then), _flat(now)
    worst = ("loss", 0.0)
    equal = True
    for field in sorted({*old, *new}, key=lambda name: (name != "loss", name)):
        difference = _difference(old.get(field), new.get(field))
        within = difference <= tolerance.at(step, field)
        if (equal and not within) or (equal == within and difference > worst[1]):
            worst = (field, difference)
        equal = equal and within
    return Compared(step, split, then["loss"], now["loss"], *worst, equal)


def _flat(row: dict[str, Any]) -> dict[str, float | None]:
    """What a step computed, without times, speed and memory."""
    values = {field: row.get(field) for field in (*COUNTS, *VALUES)}
    for group in GROUPS:
        values.update({f"{group}.{name}": value for name, value in (row.get(group) or {}).items()})
    return values


def _difference(then: float | None, now: float | None) -> float:
    """Relative; 0 for equal ones and for two that are no number, infinite where only one is."""
    if then == now:
        return 0.0
    if then is None or now is None:
        return math.inf
    if math.isnan(then) or math.isnan(now):
        return 0.0 if math.isnan(then) and math.isnan(now) else math.inf
    return abs(then - now) / max(abs(then), abs(now))
