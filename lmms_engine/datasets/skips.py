"""What happens to rows that cannot be used: the policy, its budget, and the record of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef

MIN_ROWS_FOR_BUDGET = 100  # below this many rows a fraction says nothing


TRUNCATED = "truncated"  # kind of a row that was shortened, and trained on


class SkipRecord(NamedTuple):
    """One row that was left out, or, of the kind `truncated`, shortened: one line of ``skipped.jsonl``."""

    source: str
    shard: int
    row: int
    id: str
    kind: str
    reason: str


def kinds_of(skipped: Iterable[SkipRecord]) -> str:
    """How many there are of each kind, the most frequent first, in brackets for a message; "" for none."""
    kinds = Counter(record.kind for record in skipped)
    return f" ({', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common())})" if kinds else ""


def skip_or_stop(
    ref: RowRef, place: str, kind: str, reason: str, policy: Literal["stop", "skip"]
) -> SkipRecord:
    """The record of a bad row under `skip`; under `stop` raises UserError with the row's full address.

    place: where a person finds the row, e.g. "/data/train.jsonl, line 7".
    """
    if policy == "skip":
        return SkipRecord(*ref, kind, reason)
    raise UserError(
        f"{address(ref, place)}: {reason}. Mend it, or set dataset_config.on_bad_row=skip to go on without"
    )


def address(ref: RowRef, place: str) -> str:
    """How messages name a row."""
    return f"source '{ref.source}', shard {ref.shard}, row {ref.row} ({place}), id '{ref.id}'"


def check_budget(bad: int, seen: int, max_fraction: float, last: SkipRecord | None) -> None:
    """Raises UserError once more than `max_fraction` of the rows seen were bad. Overlong rows are not bad."""
    if seen < MIN_ROWS_FOR_BUDGET or bad / seen <= max_fraction:   # 29 of 100 are 0.29; 0.29 * 100 is less
        return
    example = (
        f"; the last: source '{last.source}', shard {last.shard}, row {last.row}: {last.reason}"
        if last
        else ""
    )
    raise UserError(
        f"{bad} of {seen} rows could not be used, more than dataset_config.max_skip_fraction={max_fraction}"
        f" allows{example}"
    )
