"""The files of a dataset entry: found in folders and by globs, sorted, opened, and told apart by content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from lmms_engine.errors import UserError
from lmms_engine.registry import nearest

SUFFIXES = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
LEGAL = "auto, json, jsonl, csv, parquet, arrow"
ANY_KIND = ("auto", "hf_dataset")  # the format is told by the files' names
HEAD_BYTES = 64 * 1024


class File(Protocol):
    """A file that can be read at any place, here or elsewhere. Hashable and picklable; holds nothing open."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def suffix(self) -> str:
        """With the dot, in small letters."""
        ...

    @property
    def folder(self) -> Path:
        """What relative media paths resolve against."""
        ...

    @property
    def where(self) -> str:
        """The absolute path or the address, for messages."""
        ...

    def open(self) -> BinaryIO:
        """Opened for reading; UserError names the file if that fails."""
        ...

    def mark(self) -> str:
        """A cheap digest: size, first and last 64 KiB. Name and time do not count."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def size(self) -> int:
        return os.path.getsize(self.path)

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix.lower()

    @property
    def folder(self) -> Path:
        return Path(self.path).parent

    @property
    def where(self) -> str:
        return os.path.abspath(self.path)

    def open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None

    def mark(self) -> str:
        return mark_of(self)


def mark_of(file: File) -> str:
    """See `File.mark`."""
    size = file.size
    with file.open() as stream:
        head = stream.read(HEAD_BYTES)
        stream.seek(max(size - HEAD_BYTES, 0))
        tail = stream.read(HEAD_BYTES)
    return hashlib.blake2b(b"%d" % size + head + tail, digest_size=16).hexdigest()


def local_files(path: str, kind: str) -> tuple[list[LocalFile], Path | None]:
    """The files of an entry, sorted, and the folder of its media: None where each file has its own."""
    if os.path.isfile(path):
        return [LocalFile(path)], Path(path).parent
    if os.path.isdir(path):
        return [LocalFile(file) for file in _folder_files(Path(path), kind)], Path(path)
    if os.path.exists(path):
        raise UserError(f"dataset '{path}' is a pipe, socket or device; write its rows to a file")
    if any(mark in path for mark in "*?["):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if found:
            return [LocalFile(file) for file in found], None
        raise UserError(f"dataset '{path}': no file matches")
    parent = Path(path).parent
    near = sorted(item.name for item in parent.iterdir() if item.name[0] != ".") if parent.is_dir() else []
    most = ", …" if len(near) > 20 else ""
    there = f"{parent} holds {', '.join(near[:20])}{most}" if near else f"{parent} does not exist or is empty"
    hint = nearest(Path(path).name, [name for name in near if (parent / name).exists()])
    dangling = " (it is a link to nothing)" if os.path.islink(path) else ""
    raise UserError(f"dataset '{path}' does not exist{dangling}{hint}; {there}")


def _folder_files(folder: Path, kind: str) -> list[str]:
    state = folder / "state.json"
    if state.is_file():  # the datasets library's save_to_disk, which lists its files in order
        try:
            names = [
                item["filename"] for item in json.loads(state.read_text(encoding="utf-8"))["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"dataset '{folder}': {state} is damaged ({error!r})") from None
        return [str(folder / name) for name in names]
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise UserError(
            f"dataset '{folder}' holds several splits; name one: {', '.join(f'{folder}/{n}' for n in names)}"
        )
    wanted = suffixes_of(kind)
    files = sorted(file for file in _below(folder) if Path(file).suffix.lower() in wanted)
    if not files:
        raise UserError(f"dataset '{folder}': no file ending in {', '.join(wanted)} in this folder")
    return files


def _below(folder: Path) -> Iterator[str]:
    """The files of a folder and of those in it, links followed; nothing hidden, as an editor's copies are."""
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real not in seen:
            yield from (os.path.join(here, n) for n in names if not n.startswith("."))
        seen.add(real)


def suffixes_of(kind: str) -> list[str]:
    """Endings of the files that count in a folder."""
    return [suffix for suffix, of in SUFFIXES.items() if kind in (*ANY_KIND, of)]


def format_of(files: Sequence[File], kind: str, path: str) -> str:
    """The one format of all files: by suffix, for JSON also by the first character."""
    kinds = {SUFFIXES.get(file.suffix, "?") if kind in ANY_KIND else kind for file in files}
    if "?" in kinds:
        odd = next(file for file in files if file.suffix not in SUFFIXES)
        raise UserError(
            f"dataset '{path}': cannot tell the format of {odd}; set data_type (legal: {LEGAL}) or use one of"
            f" the suffixes {', '.join(SUFFIXES)}"
        )
    if kinds == {"json"} or kinds == {"jsonl"}:
        kinds = {"json" if first_character(file) == b"[" else "jsonl" for file in files}
    if len(kinds) > 1:
        raise UserError(
            f"dataset '{path}' mixes formats ({', '.join(sorted(kinds))}); set data_type or name a glob"
        )
    return kinds.pop()


def first_character(file: File) -> bytes:
    """The first byte that is not blank, within the first 64 KiB."""
    with file.open() as stream:
        return stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
