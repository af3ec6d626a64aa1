"""The processor of a job, for all who read its rows: training, `inspect`, exports and `data-prep encode`."""

from __future__ import annotations

from transformers import PretrainedConfig

from lmms_engine.config import Job
from lmms_engine.datasets.processor import PROCESSORS, Processor
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


def check_tokens(processor: Processor, model: PretrainedConfig) -> None:
    """Raises UserError for a tokenizer that is not the model's, where its ids show that. Before training."""
    tokenizer, vocabulary = getattr(processor, "tokenizer", None), model.get_text_config()
    size = getattr(vocabulary, "vocab_size", None)
    if tokenizer is not None and size is not None and len(tokenizer) > size:
        raise UserError(
            f"the processor's tokenizer has {len(tokenizer)} tokens, and the model's vocab_size is {size}; "
            "name the model's own in dataset_config.processor_config.processor_name"
        )
    for kind in ("image", "video"):
        ours, theirs = getattr(processor, f"{kind}_token", None), getattr(model, f"{kind}_token_id", None)
        if isinstance(ours, int) and theirs is not None and ours != theirs:
            raise UserError(
                f"the processor marks a place for {kind}s with token {ours}, and the model's "
                f"{kind}_token_id is {theirs}; name the model's own in "
                "dataset_config.processor_config.processor_name"
            )
