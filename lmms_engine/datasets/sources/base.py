"""What sources are, and what those that read files share: addresses, limit, media folder, fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lmms_engine.errors import BadRow

if TYPE_CHECKING:
    from lmms_engine.config import DatasetEntry
    from lmms_engine.datasets.sources.files import File
    from lmms_engine.datasets.sources.remote import RemoteFolder

Raw = dict[str, Any] | BadRow


class Source(Protocol):
    """Addressable rows.

    A slotted source does not know how many rows its shards hold. What is dealt out are its slots, stretches
    of a file with none, one or more rows in each: `num_rows` and `shard_rows` count slots, `slots` reads
    them, and a row's address is the offset of its first byte.
    """

    name: str
    num_shards: int
    random_access: bool  # `read` costs about as much as the row itself
    streamed: bool  # True: has no addresses to jump to, is read from its start
    slotted: bool
    row_bytes: int  # rough size of a row (of a slot) in memory
    rows_each: float  # rows of a slot, roughly; 1.0 where rows themselves are counted
    weight: float  # how often it is drawn, relative to the others
    fingerprint: str  # equal for equal content

    @property
    def num_rows(self) -> int | None:
        """All rows; None where a stream does not say."""
        ...

    def shard_rows(self, shard: int) -> int:
        """Number of rows of a shard."""
        ...

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        """(row, content) from row `start` on; None for a blank line."""
        ...

    def read(self, shard: int, row: int) -> Raw | None:
        """One row by its address."""
        ...

    def folder(self, shard: int) -> Path | RemoteFolder:
        """What relative media paths of the shard's rows resolve against."""
        ...

    def place(self, shard: int, row: int) -> str:
        """Where a person finds the row: file and line."""
        ...


class FileSource:
    """Rows in files. A format adds `read`.

    files: one per shard (Parquet: the file repeated for each row group); counts: rows per shard.
    """

    streamed = False
    slotted = False
    rows_each = 1.0
    random_access = True
    unit = "row"

    def __init__(self, files: Sequence[File], counts: list[int], row_bytes: int) -> None:
        self.name, self.weight = "", 1.0
        self.files = files
        self.row_bytes = max(row_bytes, 1)
        self.num_shards = len(files)
        self._counts = counts
        self._folder: Path | None = None
        self._data_folder = ""
        marks = [file.mark() for file in dict.fromkeys(files)]
        self.fingerprint = hashlib.blake2b(json.dumps([counts, marks]).encode(), digest_size=16).hexdigest()
        self._open: tuple[tuple[int, int], Any] | None = None  # (process, shard read last)

    def located(self, name: str, folder: Path | None, entry: DatasetEntry) -> FileSource:
        """Gives the source its name, media folder and weight, and cuts it to its first `limit` rows.

        folder: None where each file's own folder counts.
        """
        self.name, self.weight = name, entry.weight
        self._folder, self._data_folder = folder, entry.data_folder
        limit = entry.limit
        if limit is not None and limit < sum(self._counts):
            left, counts = limit, []
            for count in self._counts:
                counts.append(min(count, left))
                left -= counts[-1]
            self._counts = counts
            self.fingerprint += f"-first-{limit}"
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def num_rows(self) -> int:
        return sum(self._counts)

    def shard_rows(self, shard: int) -> int:
        return self._counts[shard]

    def folder(self, shard: int) -> Path | RemoteFolder:
        folder = self.files[shard].folder
        if not isinstance(folder, Path) and not os.path.isabs(self._data_folder):
            return folder / self._data_folder
        return Path(os.path.abspath(self._folder or Path(folder) / self._data_folder))

    def place(self, shard: int, row: int) -> str:
        return f"{self.files[shard].where}, {self.unit} {row + 1}"

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        for row in range(start, self._counts[shard]):
            yield row, self.read(shard, row)

    def _opened(self, shard: int) -> Any:
        # A forked process shares the position of files that were open before: it opens its own.
        key = (os.getpid(), shard)
        if self._open is None or self._open[0] != key:
            self._open = (key, self._open_shard(shard))
        return self._open[1]

    def _open_shard(self, shard: int) -> Any:
        return self.files[shard].open()


def one_line(error: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())


def drop_nulls(value: Any) -> Any:
    """Without the null fields that tables add to make rows alike; an object of nothing else is null
    itself."""
    if isinstance(value, dict):
        kept = {key: clean for key, item in value.items() if (clean := drop_nulls(item)) is not None}
        return kept if kept or not value else None
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value
