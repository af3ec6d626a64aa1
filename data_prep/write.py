"""Files that appear only when they are whole, and rows in the form in which they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lmms_engine.datasets.schema import MediaPart, Row, dump_row


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; renamed to it when the block ends well, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """An open text file that appears under `path` when the block ends well."""
    with whole(path) as partial, open(partial, "w", encoding="utf-8") as file:
        yield file


def portable(row: Row, folder: Path) -> dict[str, Any]:
    """The row in chat form for a file in `folder`: paths of media below it are written relative to it.

    folder: absolute. Other paths stay absolute.
    """
    messages = []
    for message in row.messages:
        content = tuple(
            part.each_file(lambda file: _moved(file, folder)) if isinstance(part, MediaPart) else part
            for part in message.content
        )
        messages.append(message.model_copy(update={"content": content}))
    return dump_row(row.model_copy(update={"messages": tuple(messages)}))


def _moved(part: MediaPart, folder: Path) -> MediaPart:
    if part.path is None:
        return part
    path = Path(os.path.abspath(part.path))
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
    return part.model_copy(update={"path": name})
