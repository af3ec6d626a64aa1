"""Manifests of speech: a file and what is said in it, perhaps from `offset` on for `duration` seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Records,
    answer,
    as_text,
    ask,
    identified,
    medium,
    need,
    number,
    part,
    pick,
    read_records,
)

AUDIO = ("audio_filepath", "audio", "audio_path", "path", "wav")
TEXT = ("text", "transcript", "sentence", "transcription")
PROMPT = "Write down what is said."


def records(path: Path) -> Records:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The sound and the prompt, answered by the transcript. Without an offset the whole file is meant."""
    said = as_text(need(record, "text", TEXT, options), "text")
    sound = medium("audio", need(record, "audio", AUDIO, options))
    offset = pick(record, "offset", ("offset",), options)
    if offset is not None:
        sound["start"] = number(offset, "offset")
        duration = number(need(record, "duration", ("duration",), options), "duration")
        sound["end"] = sound["start"] + duration
    turns = [ask(sound, part(options.prompt or PROMPT)), answer(said)]
    return {**identified(record, ("id", "utt_id", "key"), options), "messages": turns}


