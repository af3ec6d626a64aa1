"""Datasets of the user's own as sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmms_engine.datasets.registry import DATASETS, BaseDataset
from lmms_engine.datasets.sources.base import Raw
from lmms_engine.errors import BadRow, UserError

if TYPE_CHECKING:
    from lmms_engine.config import DatasetSection


class CustomSource:
    """A registered BaseDataset as a source of one shard. In a spawned worker the dataset is built again."""

    num_shards = 1
    slotted = False
    row_bytes = 4096
    rows_each = 1.0
    weight = 1.0

    def __init__(self, dataset_type: str, config: DatasetSection) -> None:
        self.name = dataset_type
        self._config = config
        self._dataset: BaseDataset | None = None
        cls = DATASETS.get(dataset_type)
        has_length = hasattr(cls, "__len__")
        self.random_access = has_length and hasattr(cls, "__getitem__")
        self.streamed = not self.random_access
        if self.streamed and not hasattr(cls, "__iter__"):
            raise UserError(f"dataset '{dataset_type}' needs `__len__` and `__getitem__`, or `__iter__`")
        self.num_rows = len(self.dataset) if has_length else None
        if self.num_rows == 0:
            raise UserError(f"dataset '{dataset_type}' is empty")
        ends = [self.read(0, row) for row in (0, self.num_rows - 1)] if self.random_access else []
        text = json.dumps([dataset_type, self.num_rows, ends], default=lambda value: type(value).__name__)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def dataset(self) -> BaseDataset:
        """The user's object, built on first use in each process."""
        if self._dataset is None:
            self._dataset = DATASETS.get(self.name)(self._config)
        return self._dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def shard_rows(self, shard: int) -> int:
        return self.num_rows or 0

    def rows(self, shard: int, start: int = 0) -> Iterator[tuple[int, Raw | None]]:
        if self.random_access:
            for row in range(start, self.shard_rows(0)):
                yield row, self.read(0, row)
            return
        for row, raw in enumerate(islice(iter(self.dataset), start, self.num_rows), start):
            yield row, self._checked(raw)

    def read(self, shard: int, row: int) -> Raw | None:
        if not self.random_access:
            return next(self.rows(shard, row))[1]
        try:
            return self._checked(self.dataset[row])
        except BadRow as bad:
            return bad

    def _checked(self, raw: Any) -> Raw:
        if isinstance(raw, dict):
            return raw
        return BadRow(
            "row_type", f"dataset '{self.name}' gave a {type(raw).__name__}; a row is a dict with `messages`"
        )

    def folder(self, shard: int) -> Path:
        return Path.cwd()

    def place(self, shard: int, row: int) -> str:
        return f"{self.name}[{row}]"
