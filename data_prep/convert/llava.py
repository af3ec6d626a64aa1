"""LLaVA and ShareGPT: `conversations` of `from` and `value`, media beside them, keys of the set's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.convert.common import Options, Records, read_records
from lmms_engine.datasets.schema import MEDIA_KEYS, ROW_KEYS
from lmms_engine.errors import BadRow

# Who answered, in collections of conversations with several services.
ASSISTANTS = ("chatgpt", "bard", "bing", "claude")


def records(path: Path) -> Records:
    """The rows of JSON or JSONL (or a table) as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """Keys that are not of a row go to `meta`; empty media keys, as of rows of text alone, go."""
    meta = {} if record.get("meta") is None else record["meta"]
    out = {key: value for key, value in record.items() if key in ROW_KEYS and value is not None}
    for key in MEDIA_KEYS:
        if out.get(key) in ("", []):
            del out[key]
    own = {key: value for key, value in record.items() if key not in ROW_KEYS and value is not None}
    if own and not isinstance(meta, dict):
        raise BadRow("meta", f"`meta` is no object, and there is no other place for {', '.join(own)}")
    if own:
        out["meta"] = {**own, **meta}
    if isinstance(out.get("id"), float):
        out["id"] = str(out["id"])
    if isinstance(out.get("conversations"), list):
        out["conversations"] = [_turn(turn) for turn in out["conversations"]]
    return out


def _turn(turn: Any) -> Any:
    if isinstance(turn, dict) and turn.get("from") in ASSISTANTS:
        return {**turn, "from": "gpt"}
    return turn
