"""Where rows come from: JSONL, JSON, CSV, Parquet and Arrow files, and datasets of the user's own.

    source = open_source(entry)                   # an entry of dataset_config.datasets
    for row, raw in source.rows(shard=0): ...     # raw: a dict, or BadRow if the row cannot be read

A source is a list of physical shards, each a list of rows; (shard, row) addresses a row for good.

| format | shard | reading one row by address |
| --- | --- | --- |
| JSONL | file; rows are its lines, cut at newline bytes only; blank lines are rows without content | cheap |
| JSON list | file; rows are the elements | cheap |
| CSV | file; rows are the records after the header, which names the keys; an empty cell is no key | cheap |
| Arrow | file (a `save_to_disk` folder or IPC files), memory-mapped if it is here | cheap |
| Parquet | row group | decodes the group up to the row |

An entry's path is a file, a glob, or a folder, here or elsewhere (`s3://`, `gs://`, `hf://`, `https://`), or
a hub id, `org/name[@revision][:config[:split]]`; several files are taken in sorted order. Memory does not
grow with the data: JSONL keeps one offset per 64 KiB, JSON and CSV one per row, the rest stays on disk. JSONL
files of more than 64 MiB in all are not read before training starts: a row's address is then its offset.
Sources can be pickled; open files are not carried over and are opened again where they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmms_engine.config_load import is_elsewhere
from lmms_engine.datasets.registry import DATASETS
from lmms_engine.datasets.sources.base import FileSource, Raw, Source, drop_nulls
from lmms_engine.datasets.sources.cache import CacheSettings
from lmms_engine.datasets.sources.custom import CustomSource
from lmms_engine.datasets.sources.files import (
    ANY_KIND,
    HEAD_BYTES,
    LEGAL,
    File,
    first_character,
    format_of,
    local_files,
)
from lmms_engine.datasets.sources.remote import shown
from lmms_engine.datasets.sources.remote_find import find_remote
from lmms_engine.datasets.sources.tables import ArrowSource, ParquetSource
from lmms_engine.datasets.sources.text import CsvSource, open_json, open_jsonl
from lmms_engine.errors import UserError
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    from lmms_engine.config import DatasetEntry, DatasetSection

__all__ = [
    "ENCODED", "CustomSource", "Raw", "Source", "display_name", "drop_nulls", "open_source", "open_sources",
    "source_names",
]  # fmt: skip

FILES = "vision_iterable"  # the dataset_type that reads `datasets`
ENCODED = "encoded.json"   # a folder that holds it is an encoded data set, see encoded.py
OPENERS: dict[str, Callable[[Sequence[File]], FileSource]] = {
    "json": open_json,
    "csv": CsvSource,
    "arrow": ArrowSource,
    "parquet": ParquetSource,
}


def open_source(
    entry: DatasetEntry,
    default_format: str = "auto",
    name: str | None = None,
    *,
    by_line: bool = True,
    cache: CacheSettings | None = None,
) -> Source:
    """The source of one dataset entry; raises UserError if it is missing, empty or unreadable.

    default_format: `dataset_config.dataset_format`, for entries whose own `data_type` is auto.
    by_line: rows of JSONL are numbered however large it is, which takes reading it once.
    cache: where blocks of files that lie elsewhere are kept; None: as by default.
    """
    kind = entry.data_type if entry.data_type != "auto" else default_format
    kind = "auto" if kind == "yaml" else kind  # yaml is the form of the list, not of the rows
    if kind not in (*LEGAL.split(", "), *ANY_KIND):
        raise UserError(f"dataset '{entry.path}': data_type={kind}: not supported yet (legal: {LEGAL})")
    if os.path.isfile(os.path.join(entry.path, ENCODED)):
        from lmms_engine.datasets.encoded import EncodedSource  # brings torch

        return EncodedSource(entry, name or display_name(entry.path))
    files: Sequence[File]
    base: Path | None = None   # each file's own folder
    if is_elsewhere(entry.path, kind):
        files = find_remote(entry.path, kind, cache or CacheSettings())
    else:
        files, base = local_files(entry.path, kind)
    kind = format_of(files, kind, entry.path)
    opened = open_jsonl(files, entry.limit, by_line) if kind == "jsonl" else OPENERS[kind](files)
    folder = None if base is None else base / entry.data_folder
    source = opened.located(name or display_name(entry.path), folder, entry)
    blank = all(file.size < HEAD_BYTES and not first_character(file) for file in files)
    if not source.num_rows or (blank and kind in ("json", "jsonl")):
        raise UserError(f"dataset '{entry.path}' is empty: {len(files)} file(s) without a row")
    return source


def open_sources(dataset: DatasetSection, split: str) -> list[Source]:
    """All sources of a split, "train" or "eval", in the order of the config."""
    if split == "train" and dataset.dataset_type != FILES:
        if dataset.dataset_type not in DATASETS:
            legal = [FILES, *DATASETS]
            raise UserError(
                f"dataset_config.dataset_type={dataset.dataset_type}: unknown (legal: {', '.join(legal)};"
                f" one's own by register_dataset in a plugin){nearest(dataset.dataset_type, legal)}"
            )
        return [CustomSource(dataset.dataset_type, dataset)]
    entries = dataset.datasets if split == "train" else dataset.eval_datasets
    if not entries:
        key = "datasets" if split == "train" else "eval_datasets"
        raise UserError(f"dataset_config.{key} is empty: name at least one dataset ({{path: …}})")
    settings = dataset.remote_cache
    cache = CacheSettings(settings.folder, int(settings.size_gb * 1e9))
    pairs = zip(entries, source_names(dataset, split), strict=True)
    return [
        open_source(entry, dataset.dataset_format, name, by_line=False, cache=cache) for entry, name in pairs
    ]


def source_names(dataset: DatasetSection, split: str) -> list[str]:
    """What the sources of a split are called, in the order of `open_sources`; opens nothing."""
    if split == "train" and dataset.dataset_type != FILES:
        return [dataset.dataset_type]
    names: list[str] = []
    for entry in dataset.datasets if split == "train" else dataset.eval_datasets:
        name, twins = display_name(entry.path), 1
        while (f"{name}#{twins}" if twins > 1 else name) in names:
            twins += 1
        names.append(f"{name}#{twins}" if twins > 1 else name)
    return names


def display_name(path: Path | str) -> str:
    """The path relative to the working directory if it lies below, so that it reads the same on every
    machine; an address without its query."""
    if "://" in str(path):
        return shown(str(path))
    path = Path(path)
    try:
        return path.relative_to(Path.cwd()).as_posix() if path.is_absolute() else path.as_posix()
    except ValueError:
        return path.as_posix()
