"""Folders of pictures, one a class: `<folder>/<class>/<picture>`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.convert.common import Options, Record, answer, ask, medium, part
from lmms_engine.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
NAMES = "classes.txt"
PROMPT = "What is in the picture?"


def records(path: Path, options: Options) -> Iterator[Record]:
    """Every picture, by class and name. `classes.txt` may name the folders: a folder and its name a line."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; its sub-folders are the classes")
    names = {}
    if (path / NAMES).is_file():
        lines = (path / NAMES).read_text(encoding="utf-8").splitlines()
        names = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
    for folder in sorted(item for item in path.iterdir() if item.is_dir()):
        for file in sorted(item for item in folder.iterdir() if item.suffix.lower() in SUFFIXES):
            record = {"class": names.get(folder.name, folder.name), "image": str(file.resolve())}
            yield str(file), {**record, "id": f"{folder.name}/{file.stem}"}


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The picture and the prompt, answered by its class."""
    turns = [ask(medium("image", record["image"]), part(options.prompt or PROMPT)), answer(record["class"])]
    return {"id": record["id"], "messages": turns}
