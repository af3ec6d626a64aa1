"""Tables of clips and the prompts that describe them, as models that draw clips are trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Records,
    as_text,
    identified,
    medium,
    need,
    number,
    pick,
    read_records,
    told,
)

DRAWS = True
VIDEO = ("video", "video_path", "file_name", "filename", "path", "video_url", "url")
PROMPT = ("prompt", "caption", "text", "description", "name")
SPAN = ("start", "end", "fps")


def records(path: Path) -> Records:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The prompt, answered by the clip; given `--prompt`, the clip and that question, answered by the text.

    Columns `start`, `end` (seconds) and `fps` say what of the clip is meant.
    """
    text = as_text(need(record, "prompt", PROMPT, options), "prompt")
    clip = medium("video", need(record, "video", VIDEO, options))
    for name in SPAN:
        if (value := pick(record, name, (name,), options)) is not None:
            clip[name] = number(value, name)
    turns = told(clip, text, options.prompt or "", replace(options, draw=options.prompt is None))
    return {**identified(record, ("id", "videoid", "clip_id"), options), "messages": turns}
