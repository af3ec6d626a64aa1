"""Pictures with captions in Parquet (or another table): bytes, paths or URLs in a column, text in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Records,
    as_list,
    as_text,
    identified,
    medium,
    need,
    read_records,
    told,
)

DRAWS = True
IMAGE = ("image", "jpg", "png", "image_bytes", "image_path", "image_url", "url", "URL")
CAPTION = ("caption", "captions", "text", "TEXT", "txt")
PROMPT = "Describe the picture."


def records(path: Path) -> Records:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The picture and the prompt, answered by the caption, or the other way round; of several the first."""
    caption = need(record, "caption", CAPTION, options)
    caption = (as_list(caption) or [caption])[0]
    image = medium("image", need(record, "image", IMAGE, options))
    turns = told(image, as_text(caption, "caption"), options.prompt or PROMPT, options)
    return {**identified(record, ("id", "key"), options), "messages": turns}
