"""Folders of pictures, one a class: `<folder>/<class>/<picture>`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.convert.common import Options, Record, Records, medium, told
from data_prep.parts import stamp
from lmms_engine.errors import UserError

DRAWS = True
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
NAMES = "classes.txt"
PROMPT = "What is in the picture?"


def records(path: Path) -> Records:
    """Every picture, by class and name. `classes.txt` may name the folders: a folder and its name a line."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; its sub-folders are the classes")
    names = {}
    if (path / NAMES).is_file():
        lines = (path / NAMES).read_text(encoding="utf-8").splitlines()
        names = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
    folders = sorted(item for item in path.iterdir() if item.is_dir())
    return Records(folders, partial(_read_folder, names), [names, stamp(path)])


def _read_folder(names: dict[str, str], folder: Path) -> Iterator[Record]:
    for file in sorted(item for item in folder.iterdir() if item.suffix.lower() in SUFFIXES):
        record = {"class": names.get(folder.name, folder.name), "image": str(file.resolve())}
        yield str(file), {**record, "id": f"{folder.name}/{file.stem}"}


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The picture and the prompt, answered by its class; or the class, answered by the picture."""
    image = medium("image", record["image"])
    turns = told(image, record["class"], options.prompt or PROMPT, options)
    return {"id": record["id"], "messages": turns}
