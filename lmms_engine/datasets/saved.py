"""Whether a saved state of a loader is whole, and of the data and settings that are read now."""

from __future__ import annotations

from typing import Any

from lmms_engine.datasets.stream import Position


def lacking(merged: dict[str, Any]) -> str:
    """The parts of a saved state that are not there, or are no mappings, joined; "" where it is whole."""
    kinds = {"version": int, "epoch": int, "identity": dict, "shards": dict}
    found = [key for key, kind in kinds.items() if not isinstance(merged.get(key), kind)]
    shards = {} if "shards" in found else merged["shards"]
    for shard, state in shards.items():
        held = state if isinstance(state, dict) else {}
        found += [f"shards.{shard}.{key}" for key in vars(Position()) if key not in held]
    return ", ".join(found)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every setting and dataset that differs, with both values."""
    found = []
    for key in sorted({*saved, *now} - {"datasets"}):
        if saved.get(key) != now.get(key):
            found.append(f"{key} was {saved.get(key)!r} and is {now.get(key)!r}")
    before, after = saved.get("datasets", []), now["datasets"]
    if len(before) != len(after):
        found.append(f"there were {len(before)} datasets and are {len(after)}")
    for old, new in zip(before, after, strict=False):
        changes = [
            f"{key} was {old.get(key)!r} and is {new[key]!r}" for key in new if old.get(key) != new[key]
        ]
        if changes:
            found.append(f"dataset '{new['name']}': {', '.join(changes)}")
    return found
