"""The processor and the loaders of a job: the same for training, validation, `inspect` and reports."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from lmms_engine.config import Job
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor import PROCESSORS, Processor
from lmms_engine.datasets.sources import display_name
from lmms_engine.errors import UserError
from lmms_engine.models.hf import read_config
from lmms_engine.models.spec import for_type
from lmms_engine.plugins import load_plugins


def build_processor(job: Job) -> Processor:
    """The job's processor: by default the one of the model's family, from the model's own folder.

    Top level and given plain data only, so that the loader's workers can make their own.
    """
    load_plugins(job)  # a spawned worker has not seen the user's registrations
    data, config = job.dataset, job.dataset.processor_config
    source = config.processor_name or job.model.load_from_pretrained_path
    if source is None:
        raise UserError(
            "dataset_config.processor_config.processor_name=null: a model made by load_from_config has no "
            "folder to take it from; name a hub id or a folder"
        )
    model = read_config(job.model)
    name = config.processor_type or for_type(model.model_type).name
    return PROCESSORS.get(name).from_pretrained(
        source,
        config=model,
        max_length=data.max_length or data.packing_length,
        fps=data.fps,
        video_max_pixels=data.video_max_pixels,
        video_max_frames=data.video_max_frames,
        extra_kwargs=config.extra_kwargs,
        overlong=data.overlong,
    )


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
        name = display_name(Path(entry.path))
        dataset = job.dataset.model_copy(update={"eval_datasets": (entry,)})
        loaders[name if name not in loaders else f"{name}#{number}"] = build_loader(
            job.model_copy(update={"dataset": dataset}), dp_rank, dp_size, split="eval"
        )
    return loaders
