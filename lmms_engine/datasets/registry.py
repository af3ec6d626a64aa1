"""Datasets of the user's own: the base class and the table of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lmms_engine.registry import Registry

if TYPE_CHECKING:
    from lmms_engine.config import DatasetSection


class BaseDataset:
    """Rows from anywhere. A subclass gives `__len__` and `__getitem__` (map style), or `__iter__` (a stream).

    Rows are dicts in any shape that `schema.parse_row` reads; relative media paths resolve against the
    working directory. A row that is no good may raise `BadRow`; it then falls under
    `dataset_config.on_bad_row`. Map style is shuffled, dealt and resumed by index. A stream is read from
    its start by every logical shard, which keeps its own share and shuffles that in windows: it must give the
    same rows each time, and without `__len__` the run needs `max_steps`.
    """

    def __init__(self, config: DatasetSection) -> None:
        self.config = config


DATASETS: Registry[type[BaseDataset]] = Registry("dataset")

D = TypeVar("D", bound=type[BaseDataset])


def register_dataset(name: str) -> Callable[[D], D]:
    """Class decorator: `dataset_config.dataset_type: <name>` then selects the class."""
    return DATASETS.register(name)
