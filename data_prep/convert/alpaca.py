"""Alpaca: `instruction`, `input`, `output`, perhaps `system`, `history` and `images`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Records,
    answer,
    as_list,
    as_text,
    ask,
    identified,
    need,
    part,
    pick,
    read_records,
)
from lmms_engine.datasets.schema import MEDIA_KEYS
from lmms_engine.errors import BadRow


def records(path: Path) -> Records:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """One question and answer, after those of the history; the input follows the instruction."""
    question = as_text(need(record, "instruction", ("instruction", "prompt"), options), "instruction")
    extra = pick(record, "input", ("input", "query"), options)
    if extra is not None:
        question = f"{question}\n\n{as_text(extra, 'input')}"
    reply = as_text(need(record, "output", ("output", "response"), options), "output")
    messages = []
    if (system := record.get("system")) not in (None, ""):
        messages.append({"role": "system", "content": [part(as_text(system, "system"))]})
    for pair in _history(record.get("history")):
        messages += [ask(part(as_text(pair[0], "history"))), answer(as_text(pair[1], "history"))]
    messages += [ask(part(question)), answer(reply)]
    media = {key: record[key] for key in MEDIA_KEYS if record.get(key) not in (None, "", [])}
    return {**identified(record, ("id",), options), "messages": messages, **media}


def _history(value: Any) -> list[list[Any]]:
    """Pairs of a question and an answer; empty if there is no history."""
    if value in (None, ""):
        return []
    pairs = as_list(value)
    if pairs is None or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRow("column", "`history` must be a list of pairs, question and answer")
    return pairs
