"""Pictures with captions in Parquet (or another table): bytes, paths or URLs in a column, text in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Record,
    answer,
    as_list,
    as_text,
    ask,
    identified,
    medium,
    need,
    part,
    read_records,
)

IMAGE = ("image", "jpg", "png", "image_bytes", "image_path", "image_url", "url", "URL")
CAPTION = ("caption", "captions", "text", "TEXT", "txt")
PROMPT = "Describe the picture."


def records(path: Path, options: Options) -> Iterator[Record]:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The picture and the prompt, answered by the caption; of several captions the first."""
    caption = need(record, "caption", CAPTION, options)
    caption = (as_list(caption) or [caption])[0]
    image = medium("image", need(record, "image", IMAGE, options))
    turns = [ask(image, part(options.prompt or PROMPT)), answer(as_text(caption, "caption"))]
    return {**identified(record, ("id", "key"), options), "messages": turns}
