"""The loaders of a job: the same for training, validation, `inspect` and reports."""

from __future__ import annotations

from functools import partial
from typing import Literal

from lmms_engine.config import Job
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.sources import display_name
from lmms_engine.models.build import build_processor

__all__ = ["build_loader", "build_processor", "eval_loaders"]


def build_loader(
    job: Job,
    dp_rank: int,
    dp_size: int,
    *,
    split: Literal["train", "eval"] = "train",
    pin_memory: bool = False,
) -> Loader:
    """The loader of one data rank. Batches depend on the job, the rank and the number of ranks alone."""
    return Loader(
        job,
        partial(build_processor, job),
        dp_rank=dp_rank,
        dp_size=dp_size,
        split=split,
        pin_memory=pin_memory,
    )


def eval_loaders(job: Job, dp_rank: int, dp_size: int) -> dict[str, Loader]:
    """A held-out loader for each of `eval_datasets`, by its name, so that every source gets its own loss."""
    loaders: dict[str, Loader] = {}
    for number, entry in enumerate(job.dataset.eval_datasets, 1):
        name = display_name(entry.path)
        dataset = job.dataset.model_copy(update={"eval_datasets": (entry,)})
        loaders[name if name not in loaders else f"{name}#{number}"] = build_loader(
            job.model_copy(update={"dataset": dataset}), dp_rank, dp_size, split="eval"
        )
    return loaders
