"""Values of a Job that are legal one by one and impossible together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmms_engine.config_deepspeed import deepspeed_problems
from lmms_engine.config_load import show
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    from lmms_engine.config import DatasetSection, Job, TrainerSection

BUILT_IN = "vision_iterable"   # reads dataset_config.datasets; a registered dataset need not

# What lr_scheduler_kwargs may hold; each a fraction of the peak rate or of the run.
SCHEDULER_KWARGS: dict[str, tuple[str, ...]] = {
    "linear": ("min_lr_ratio",),
    "cosine": ("min_lr_ratio",),
    "constant": (),
    "wsd": ("min_lr_ratio", "decay_ratio"),
}


def contradictions(job: Job) -> list[tuple[tuple[str, ...], str]]:
    """(keys involved, what is wrong with them together) of a job whose values are legal one by one."""
    model, dataset, trainer = job.model, job.dataset, job.trainer
    found: list[tuple[tuple[str, ...], str]] = []

    def wrong(text: str, *keys: str) -> None:
        found.append((keys, text))

    pretrained, config = "model_config.load_from_pretrained_path", "model_config.load_from_config"
    if (model.load_from_pretrained_path is None) == (model.load_from_config is None):
        both = "both are given" if model.load_from_config is not None else "none is given"
        wrong(
            f"model_config: {both}; give either load_from_pretrained_path or load_from_config",
            pretrained,
            config,
            "model_config",
        )
    if model.load_from_config is not None and not isinstance(model.load_from_config.get("model_type"), str):
        wrong(f"{config}: has no model_type (legal: {{model_type: name, config: {{…}}}}, or flat)", config)
    if not dataset.datasets and dataset.dataset_type == BUILT_IN:
        wrong(
            "dataset_config.datasets: no data; give datasets or dataset_path",
            "dataset_config.datasets",
            "dataset_config.dataset_type",
            "dataset_config",
        )
    if dataset.filter_overlong != (dataset.overlong != "error"):
        wrong(
            f"dataset_config.filter_overlong={show(dataset.filter_overlong)}: contradicts "
            f"dataset_config.overlong={dataset.overlong} (true means drop, false means error)",
            "dataset_config.filter_overlong",
            "dataset_config.overlong",
        )
    if dataset.packing and dataset.max_length is not None and dataset.max_length > dataset.packing_length:
        wrong(
            f"dataset_config.max_length={dataset.max_length}: longer than dataset_config.packing_length="
            f"{dataset.packing_length}, so that such a row fits into no pack",
            "dataset_config.max_length",
            "dataset_config.packing_length",
            "dataset_config.packing",
        )
    for key, text in _packing_problems(dataset):
        wrong(text, f"dataset_config.{key}", "dataset_config.packing_strategy", "dataset_config.packing")
    if trainer.eval_steps is not None and not dataset.eval_datasets:
        wrong(
            f"trainer_args.eval_steps={trainer.eval_steps}: there is nothing to evaluate; give "
            "dataset_config.eval_datasets",
            "trainer_args.eval_steps",
            "dataset_config.eval_datasets",
        )
    if trainer.warmup_steps and trainer.warmup_ratio:
        wrong(
            f"trainer_args.warmup_steps={trainer.warmup_steps}: contradicts trainer_args.warmup_ratio="
            f"{show(trainer.warmup_ratio)}; give one of them",
            "trainer_args.warmup_steps",
            "trainer_args.warmup_ratio",
        )
    if job.trainer_type == "fsdp2_trainer" and not trainer.fsdp2:
        wrong(
            "trainer_args.fsdp2=false: contradicts trainer_type=fsdp2_trainer (legal: true); parameters are "
            "always sharded by FSDP2, on one device too",
            "trainer_args.fsdp2",
            "trainer_type",
        )
    if trainer.sp_ulysses_degree > 1 and not trainer.use_rmpad:
        wrong(
            f"trainer_args.sp_ulysses_degree={trainer.sp_ulysses_degree}: needs trainer_args.use_rmpad=true; "
            "the padded reference path keeps a sequence on one rank",
            "trainer_args.sp_ulysses_degree",
            "trainer_args.use_rmpad",
        )
    for text in deepspeed_problems(job):
        wrong(text, "trainer_type", "trainer_args.deepspeed", "trainer_args.fsdp2")
    for text in _schedule_problems(trainer):
        wrong(
            text,
            "trainer_args.lr_scheduler_type",
            "trainer_args.lr_scheduler_kwargs",
            "trainer_args.warmup_ratio",
        )
    for i, plugin in enumerate(job.plugins):
        if plugin.endswith(".py") and not Path(plugin).is_file():
            wrong(f"plugins.{i}={plugin}: there is no such file", "plugins")
    return found


def _packing_problems(dataset: DatasetSection) -> list[tuple[str, str]]:
    """(key, what is wrong) of settings that the way of packing would not look at."""
    found = []
    if not dataset.packing and dataset.packing_strategy != "first_fit":
        found.append(("packing_strategy", f"{dataset.packing_strategy}: nothing is packed: packing is false"))
    for key in ("media_units", "cost_budget", "attention_length", "media_cost"):
        value = getattr(dataset.packing_kwargs, key)
        if value == type(dataset.packing_kwargs).model_fields[key].default:
            continue
        if not dataset.packing:
            found.append((f"packing_kwargs.{key}", f"{show(value)}: nothing is packed: packing is false"))
        elif key != "media_units" and dataset.packing_strategy != "balanced":
            found.append((f"packing_kwargs.{key}", f"{show(value)}: only packing_strategy=balanced uses it"))
    return [(key, f"dataset_config.{key}={text}") for key, text in found]


def _schedule_problems(trainer: TrainerSection) -> list[str]:
    """What is wrong with lr_scheduler_kwargs for the scheduler that is chosen."""
    kind, kwargs = trainer.lr_scheduler_type, trainer.lr_scheduler_kwargs
    path = "trainer_args.lr_scheduler_kwargs"
    legal = SCHEDULER_KWARGS[kind]
    words = ", ".join(legal) or "none"
    problems = [
        f"{path}.{name}={show(value)}: {kind} has no such key (legal: {words}){nearest(name, list(legal))}"
        for name, value in kwargs.items()
        if name not in legal
    ]
    problems += [
        f"{path}.{name}={show(value)}: not legal (legal: a number >= 0 and <= 1)"
        for name, value in kwargs.items()
        if name in legal and not 0 <= value <= 1
    ]
    if kwargs.get("decay_ratio") == 0:
        problems.append(f"{path}.decay_ratio=0: not legal (legal: a number > 0)")
    if kind == "wsd" and not problems and trainer.warmup_ratio + kwargs.get("decay_ratio", 0.1) > 1:
        problems.append(
            f"{path}.decay_ratio={show(kwargs.get('decay_ratio', 0.1))}: together with "
            f"trainer_args.warmup_ratio={show(trainer.warmup_ratio)} more than the whole run"
        )
    return problems
