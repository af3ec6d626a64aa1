"""Manifests of speech: a file and what is said in it, perhaps from `offset` on for `duration` seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Record,
    answer,
    as_text,
    ask,
    identified,
    medium,
    need,
    part,
    pick,
    read_records,
)
from lmms_engine.errors import BadRow

AUDIO = ("audio_filepath", "audio", "audio_path", "path", "wav")
TEXT = ("text", "transcript", "sentence", "transcription")
PROMPT = "Write down what is said."


def records(path: Path, options: Options) -> Iterator[Record]:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The sound and the prompt, answered by the transcript. Without an offset the whole file is meant."""
    said = as_text(need(record, "text", TEXT, options), "text")
    sound = medium("audio", need(record, "audio", AUDIO, options))
    offset = _seconds(pick(record, "offset", ("offset",), options), "offset")
    if offset is not None:
        sound["start"] = offset
        duration = _seconds(need(record, "duration", ("duration",), options), "duration")
        sound["end"] = offset + duration
    turns = [ask(sound, part(options.prompt or PROMPT)), answer(said)]
    return {**identified(record, ("id", "utt_id", "key"), options), "messages": turns}


def _seconds(value: Any, name: str) -> Any:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadRow("column", f"the {name} must be a number of seconds, got {value!r}") from None
