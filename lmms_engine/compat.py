"""The keys of the reference system's configuration files, and what becomes of each here.

One data table, by section. Every key of its example files and every field of transformers' TrainingArguments
has a line (tests/test_compat.py). A key is

Kept     ours, with the same meaning; `values` renames single values;
Alias    the same thing under another name or in another section;
Inert    without meaning here; accepted only with the listed values, or with any (ANY) where it acts only
         together with another key that is refused. `null` always means "not given";
Refused  named with what to use instead;
Group    a mapping of inert keys, which disappears as a whole.

To let a later feature in, change its line here or in config.LEGAL_NOW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmms_engine.config_load import show
from lmms_engine.registry import nearest


@dataclass(frozen=True)
class Kept:
    """values: the reference's value -> ours. later: values of families to come; `legal`: what is said then.
    refused: value -> what to do.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[str, ...] = ()
    legal: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Alias:
    """to: dotted path of our key."""

    to: str


@dataclass(frozen=True)
class Inert:
    """legal: values that mean nothing here; use: what to do for others; later: the feature will come."""

    legal: tuple[Any, ...]
    use: str = ""
    later: bool = False


@dataclass(frozen=True)
class Refused:
    """use: what to do instead."""

    use: str


@dataclass(frozen=True)
class Group:
    """The keys inside have lines of their own, under the group's dotted path."""


class _Any(tuple):
    """Every value."""

    def __contains__(self, value: object) -> bool:
        return True


ANY = _Any()
FLAG = (False, True)
OFF, ON, UNSET = Inert((False,)), Inert((True,)), Inert(())
NOTHING = Inert(ANY)
LATER_OFF = Inert((False,), later=True)
GONE = Inert((), "no longer exists in transformers")
ONE_SOURCE = "one pack is trained at a time; use per_device_train_batch_size"
HUB = Inert((False,), "upload what `lmms-engine export` writes")
GPU_CHOICE = Inert((False,), "choose devices with CUDA_VISIBLE_DEVICES")
KERNELS = Inert(FLAG, "kernels are chosen by trainer_args.use_liger_kernel")
VIDEO_PATCH = Inert((), later=True)
RL = "reinforcement learning is not part of this engine"
UNITS = Inert((0,), "units follow the model's layout")
EXTRA = "dataset_config.processor_config.extra_kwargs"
DATA_SEED = Inert((42,), "trainer_args.seed decides the order of the data too")

TOP: dict[str, Any] = {
    "trainer_type": Kept(
        # One trainer serves every family: what differs (the objective) follows from the model.
        values=dict.fromkeys(
            ("hf_trainer", "wan_trainer", "sit_trainer", "dllm_trainer", "bagel_trainer", "nit_trainer",
             "rae_trainer", "fsdp2_bagel_trainer"),
            "fsdp2_trainer",
        ),
        refused=dict.fromkeys(
            ("bagel_grpo_trainer", "bagel_t2i_grpo_trainer", "fsdp2_rl_trainer", "fsdp2_grpo_rl_trainer"), RL
        ),
    ),
    "model_config": Kept(),
    "dataset_config": Kept(),
    "trainer_args": Kept(),
    "plugins": Kept(),
    "extra_kwargs": Inert(({},), "write the keys into their section"),
    "config_yaml": Inert((), "give config_yaml= on the command line"),
    "ray_train": Refused(RL),
    "rl_runtime": Refused(RL),
}

MODEL: dict[str, Any] = {
    "load_from_pretrained_path": Kept({"": None}),
    "load_from_config": Kept(),
    "attn_implementation": Kept(
        {"flash_attention_2": "flash_attn", "flex_attention": "flex", "eager": "sdpa"},
        refused={"flash_attention_3": "use flash_attn or varlen"},
    ),
    "model_type": NOTHING,   # the checkpoint's own config says it
    "model_general_type": NOTHING,
    "torch_dtype": Inert(
        ("bfloat16", "float32", "auto"),
        "weights are held in float32 and computed in bfloat16 (trainer_args.bf16)",
    ),
    "overwrite_config": Inert(({},), "change the checkpoint's config.json, or give load_from_config"),
    "extra_kwargs": Inert(({},), "write model settings into load_from_config"),
    "monkey_patch_kwargs": Group(),
    "load_with_custom_loader": LATER_OFF,
}

MONKEY_PATCH: dict[str, Any] = {
    "patch_type": Inert(([], ["liger"]), "kernels are chosen by trainer_args.use_liger_kernel"),
    "use_rmpad": Inert(FLAG, "trainer_args.use_rmpad decides"),
    **dict.fromkeys(
        ("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "layer_norm"), KERNELS
    ),
    **dict.fromkeys(
        ("add_faster_video", "faster_token_stride", "mm_spatial_pool_stride", "mm_spatial_pool_mode"),
        VIDEO_PATCH,
    ),
    **dict.fromkeys(
        ("block_size", "compress_type", "kernel_size", "kernel_stride", "topk", "init_blocks", "local_blocks",
         "window_size"),
        Refused("native sparse attention is not part of this engine"),
    ),
}

DATASET: dict[str, Any] = {
    "dataset_type": Kept(
        values=dict.fromkeys(("vision", "qwen3_vl_iterable"), "vision_iterable"),
        later=("vision_audio", "vision_audio_iterable", "qwen_omni", "qwen_omni_iterable", "qwen3_5",
               "qwen3_5_iterable", "llava_video", "llava_ov2_iterable", "aero_realtime_iterable", "bagel",
               "bagel_iterable", "fineweb_edu", "fineweb_edu_dllm", "nit", "rae"),
        legal="vision_iterable, or the name of a registered dataset",
        refused={
            "blip3o": "BLIP3o is not part of this engine",
            **dict.fromkeys(("rl_prompt_text", "rl_prompt_jsonl", "rl_prompt_image_jsonl", "t2i_unirl"), RL),
        },
    ),
    "dataset_format": Kept({"hf": "hf_dataset"}),
    "dataset_path": Kept({"": None}),
    "datasets": Kept(),
    "eval_dataset_path": Kept({"": None}),
    "eval_datasets": Kept(),
    "remote_cache": Kept(),
    "processor_config": Kept(),
    "shuffle": Kept(),
    "packing": Kept(),
    "packing_strategy": Kept(),
    "packing_length": Kept(),
    "packing_kwargs": Kept(),
    "filter_overlong": Kept(),
    "overlong": Kept(),
    "max_length": Kept(),
    "fps": Kept(),
    "video_max_pixels": Kept(),
    "video_max_frames": Kept(),
    "on_bad_row": Kept(),
    "max_skip_fraction": Kept(),
    "media_timeout_s": Kept(),
    "num_logical_shards": Kept(),
    "mixture_stop": Kept(),
    "video_min_pixels": Alias(f"{EXTRA}.video_min_pixels"),
    "data_seed": DATA_SEED,
    "extra_kwargs": Inert(({},), f"use {EXTRA}"),
    "object_storage": Inert(("none",), later=True),
    "bucket_name": NOTHING,   # acts only with object_storage
    "filter_overlong_workers": NOTHING,   # lengths are known when a row is read: there is no filter pass
    "video_sampling_strategy": Inert(("fps",), later=True),
    "frame_num": NOTHING,   # acts only with video_sampling_strategy: frame_num
    "video_backend": NOTHING,   # clips are decoded by PyAV, whichever reader is named
    "tokenizer": Inert((), "use dataset_config.processor_config.processor_name"),
    "test_max_samples": Refused("use limit on an entry of dataset_config.eval_datasets"),
}

ENTRY: dict[str, Any] = {
    "path": Kept(),
    "data_folder": Kept(),
    "data_type": Kept({"hf": "hf_dataset"}),
    "weight": Kept(),
    "limit": Kept(),
    "kwargs": Inert(({},), later=True),
}

PROCESSOR: dict[str, Any] = {
    "processor_type": Kept(
        # null: the model family's own. `nit` stands in the reference's Qwen3-VL example by mistake.
        values=dict.fromkeys(("nit", "qwen2", "qwen3"), None) | {"qwen2_vl": "qwen2_5_vl", "": None},
        later=("wanvideo", "bagel", "llava", "llava_video", "aero", "aero_realtime", "nanovlm", "rae",
               "qwen3_5", "Qwen2_5OmniProcessor", "qwen2_5_omni", "qwen3_omni_moe"),
        legal="qwen2_5_vl, qwen3_vl, sit, or the name of a registered processor",
        refused={"blip3o": "BLIP3o is not part of this engine"},
    ),
    "processor_name": Kept({"": None}),
    "extra_kwargs": Kept(),
    "kwargs": Alias(EXTRA),
    **{
        key: Alias(f"{EXTRA}.{key}")
        for key in ("do_resize", "size", "do_normalize", "image_mean", "image_std")
    },
}

FSDP: dict[str, Any] = {
    "transformer_layer_cls_to_wrap": Kept(),
    "reshard_after_forward": Kept(),
    "activation_checkpointing": Kept(),
    "hsdp_shard_size": Kept(),
    "cpu_offload": Kept(),
    "fsdp_transformer_layer_cls_to_wrap": Alias("trainer_args.fsdp_config.transformer_layer_cls_to_wrap"),
    "fsdp_reshard_after_forward": Alias("trainer_args.fsdp_config.reshard_after_forward"),
    "fsdp_activation_checkpointing": Alias("trainer_args.fsdp_config.activation_checkpointing"),
    **dict.fromkeys(("min_num_params", "fsdp_min_num_params"), UNITS),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), Inert((False,), "TPUs are not supported")),
    **dict.fromkeys(("backward_prefetch", "fsdp_backward_prefetch"), Inert(("backward_pre", "BACKWARD_PRE"))),
    **dict.fromkeys(("sharding_strategy", "fsdp_sharding_strategy"), Inert(("FULL_SHARD",))),
    **dict.fromkeys(
        ("state_dict_type", "fsdp_state_dict_type"), Inert(("sharded_state_dict", "SHARDED_STATE_DICT"))
    ),
    **dict.fromkeys(("version", "fsdp_version"), Inert((2,))),
    **dict.fromkeys(
        ("offload_params", "fsdp_offload_params", "fsdp_cpu_offload"),
        Alias("trainer_args.fsdp_config.cpu_offload"),
    ),
    # Scheduling and loading details of FSDP1; FSDP2 has no such choice.
    **dict.fromkeys(
        ("forward_prefetch", "fsdp_forward_prefetch", "use_orig_params", "fsdp_use_orig_params",
         "cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading", "sync_module_states",
         "fsdp_sync_module_states", "limit_all_gathers"),
        Inert(FLAG),
    ),
}

ACCELERATOR: dict[str, Any] = {
    "split_batches": Inert(
        (False,), "give the share of one device as trainer_args.per_device_train_batch_size"
    ),
    "dispatch_batches": OFF,
    "even_batches": ON,
    "use_seedable_sampler": ON,
    "non_blocking": Inert(FLAG),
    "gradient_accumulation_kwargs": UNSET,
    "use_configured_state": OFF,
}

OURS_IN_TRAINER = (
    "output_dir", "run_name", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "max_steps", "num_train_epochs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps",
    "bf16", "use_rmpad", "use_liger_kernel", "use_muon", "fsdp2", "fsdp_config", "deepspeed",
    "sp_ulysses_degree", "ep_degree", "router_z_loss_coef", "freeze_modules", "dataloader_num_workers",
    "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "seed", "log_rows",
    "ddp_timeout",
)

TRAINER: dict[str, Any] = {
    **dict.fromkeys(OURS_IN_TRAINER, Kept()),
    "output_dir": Kept({"": None}),
    "run_name": Kept({"": None}),
    "max_steps": Kept({"-1": None}),
    "lr_scheduler_type": Kept(
        # transformers' names
        values={"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
        refused={
            **dict.fromkeys(
                ("cosine_with_min_lr", "cosine_warmup_with_min_lr"),
                "use cosine with trainer_args.lr_scheduler_kwargs.min_lr_ratio",
            ),
            "cosine_with_restarts": "there are no restarts; use cosine",
            "polynomial": "use linear with trainer_args.lr_scheduler_kwargs.min_lr_ratio",
            **dict.fromkeys(
                ("inverse_sqrt", "reduce_lr_on_plateau", "greedy"),
                "the rate follows a curve to the known end of the run; use linear, cosine, constant or wsd",
            ),
        },
    ),
    "gradient_checkpointing": Alias("trainer_args.fsdp_config.activation_checkpointing"),
    "fsdp_transformer_layer_cls_to_wrap": Alias("trainer_args.fsdp_config.transformer_layer_cls_to_wrap"),
    # Groups
    "accelerator_config": Group(),
    # What is trained, and for how long
    **dict.fromkeys(("do_train", "do_eval", "prediction_loss_only"), Inert(FLAG)),
    "do_predict": Inert((False,), "export the run and generate elsewhere"),
    "full_determinism": OFF,
    "average_tokens_across_devices": Inert((True,), "the loss is the mean over the tokens of all devices"),
    "label_smoothing_factor": Inert((0.0,), "there is no label smoothing"),
    "neftune_noise_alpha": UNSET,
    "use_cache": OFF,
    # Optimiser
    "optim": Inert(("adamw_torch_fused", "adamw_torch", "adamw_hf"), "AdamW, or trainer_args.use_muon"),
    "optim_args": UNSET,
    "optim_target_modules": UNSET,
    "adafactor": OFF,
    # Precision
    **dict.fromkeys(("fp16", "fp16_full_eval"), Inert((False,), "use bf16: true")),
    "bf16_full_eval": Inert((False,), "evaluation computes as training does"),
    "fp16_opt_level": NOTHING,   # acts only with fp16
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), Inert(("auto",))),
    "tf32": Inert(FLAG),   # acts only on float32 products: with bf16: false it is refused
    **dict.fromkeys(
        ("reduce_dtype", "output_dtype"),
        Inert(("bfloat16", "float32"), "gradients are reduced in float32"),
    ),
    # Memory and speed
    "gradient_checkpointing_kwargs": Inert(({}, {"use_reentrant": False}), "it is never reentrant"),
    "torch_compile": LATER_OFF,
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), NOTHING),   # act only with torch_compile
    "torchdynamo": UNSET,
    "torch_empty_cache_steps": NOTHING,   # a hint to the allocator
    "auto_find_batch_size": Inert((False,), "set packing_length to what fits"),
    "liger_kernel_config": Inert(({},), "trainer_args.use_liger_kernel switches all of them"),
    "jit_mode_eval": OFF,
    # Layout
    "tp_degree": Inert((1,), "use fsdp_config and sp_ulysses_degree"),
    "parallelism_config": Inert((), "use sp_ulysses_degree, ep_degree and fsdp_config"),
    "fsdp": Inert(
        ([], "", "full_shard", "full_shard auto_wrap", True),
        "sharding is always full; for offload use fsdp_config.cpu_offload",
    ),
    "fsdp_min_num_params": UNITS,
    "ddp_backend": Inert(("nccl", "gloo"), "the backend follows the device"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        UNSET,
    ),
    "local_rank": NOTHING,   # torchrun says it
    **dict.fromkeys(("no_cuda", "use_cpu", "use_mps_device"), GPU_CHOICE),
    **dict.fromkeys(("tpu_num_cores", "mp_parameters"), Inert(("",))),
    "tpu_metrics_debug": OFF,
    "ray_scope": Inert(("last",)),
    # Data
    "data_seed": DATA_SEED,
    "dataloader_drop_last": Inert((False,), "no row is dropped: the last step of an epoch is shorter"),
    "dataloader_pin_memory": Inert((True,), "batches are pinned where there is a GPU"),
    "dataloader_persistent_workers": Inert(FLAG),
    "dataloader_prefetch_factor": Inert((2,)),
    "dataloader_multiprocessing_context": UNSET,
    "dataloader_in_order": ON,
    "train_sampling_strategy": Inert(("random", "group_by_length"), "see dataset_config.shuffle"),
    "group_by_length": Inert(FLAG),   # a flat pack has no padding to save
    "length_column_name": NOTHING,   # acts only with group_by_length
    "remove_unused_columns": Inert(FLAG),   # a processor takes what it knows
    "label_names": UNSET,
    **dict.fromkeys(("per_gpu_train_batch_size", "per_gpu_eval_batch_size"), Inert((), ONE_SOURCE)),
    # Evaluation
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"), Inert(("no", "steps"), "evaluation runs every eval_steps")
    ),
    "per_device_eval_batch_size": NOTHING,   # the loss is weighted by tokens: its value does not depend on it
    "eval_accumulation_steps": UNSET,
    "eval_delay": Inert((0,)),
    "eval_on_start": OFF,
    "eval_do_concat_batches": Inert(FLAG),
    "eval_use_gather_object": OFF,
    "batch_eval_metrics": OFF,
    "include_inputs_for_metrics": OFF,
    "include_for_metrics": Inert(([],)),
    "load_best_model_at_end": OFF,
    # These act only with load_best_model_at_end.
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), NOTHING),
    "eval_config": Inert(({},), "use dataset_config.eval_datasets"),
    "past_index": Inert((-1,)),
    "use_legacy_prediction_loop": OFF,
    # Checkpoints
    "save_strategy": Inert(("steps",), "use save_steps"),
    "save_safetensors": ON,
    "save_on_each_node": Inert((False,), "the nodes share the run folder"),
    "save_only_model": Inert((False,), "checkpoints are complete; `lmms-engine export` writes the model"),
    "enable_jit_checkpoint": Inert((False,), "SIGTERM always saves"),
    "restore_callback_states_from_checkpoint": OFF,
    "resume_from_checkpoint": Inert((True, ""), "a run resumes by itself from its output_dir"),
    "ignore_data_skip": Inert((False,), "a resumed run continues exactly"),
    "overwrite_output_dir": Inert((False,), "`make train FRESH=1` moves the old folder aside"),
    # Logs and trackers
    "logging_strategy": Inert(("steps",), "use logging_steps"),
    **dict.fromkeys(("logging_first_step", "logging_nan_inf_filter", "log_on_each_node"), Inert(FLAG)),
    "logging_dir": NOTHING,   # trackers write into the run folder
    **dict.fromkeys(("log_level", "log_level_replica"), NOTHING),   # rank 0 speaks; --debug says more
    "disable_tqdm": Inert(FLAG),   # no bar is drawn where the output is not a terminal
    "include_tokens_per_second": Inert(FLAG),   # always logged
    "include_num_input_tokens_seen": Inert((*FLAG, "no", "all", "non_padding")),   # always logged
    "skip_memory_metrics": Inert(FLAG),
    "print_batch_input_steps": NOTHING,   # `lmms-engine inspect` shows the batches
    "debug": Inert(([], ""), "run with --debug"),
    "enable_profiler": LATER_OFF,
    "enable_cuda_event_profiler": LATER_OFF,
    **dict.fromkeys(("profiler_config", "cuda_event_profiler_config"), NOTHING),   # act only with a profiler
    "project": Inert(("huggingface",), "name the project by the variable WANDB_PROJECT"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), NOTHING),
    # Hub
    **dict.fromkeys(("push_to_hub", "hub_always_push"), HUB),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_revision",
         "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
        NOTHING,   # act only with push_to_hub
    ),
    # Moving average of the weights
    "ema_enabled": LATER_OFF,
    **dict.fromkeys(
        ("ema_decay", "ema_update_every", "ema_start_step", "ema_requires_grad_only", "ema_param_filter",
         "ema_resume_from_ema"),
        NOTHING,   # act only with ema_enabled
    ),
    "rl_config": Refused(RL),
}

TABLE: dict[str, dict[str, Any]] = {
    "": TOP,
    "model_config": MODEL,
    "model_config.monkey_patch_kwargs": MONKEY_PATCH,
    "dataset_config": DATASET,
    "dataset_config.datasets.*": ENTRY,
    "dataset_config.eval_datasets.*": ENTRY,
    "dataset_config.processor_config": PROCESSOR,
    "trainer_args": TRAINER,
    "trainer_args.fsdp_config": FSDP,
    "trainer_args.accelerator_config": ACCELERATOR,
}

# (section, key, value, other key, its values): what the value says and the other key's do not go together.
CONTRADICTIONS = (
    ("trainer_args", "eval_strategy", "no", "eval_steps", ANY),
    ("trainer_args", "evaluation_strategy", "no", "eval_steps", ANY),
    ("trainer_args", "tf32", True, "bf16", (False,)),
)


def unwrap(content: Any) -> Any:
    """The mapping inside the reference's list form `- {type: trainer, config: {…}}`; anything else as it is.

    In that form the trainer's keys stand beside the sections, and are put into `trainer_args`.
    """
    if not (isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict)):
        return content
    item = content[0]
    if set(item) not in ({"type", "config"}, {"task_type", "config"}) or not isinstance(item["config"], dict):
        return content
    if item.get("type", item.get("task_type")) != "trainer":
        return content
    config = item["config"]
    tree = {key: value for key, value in config.items() if key in TOP}
    beside = {key: value for key, value in config.items() if key not in TOP}
    if beside:
        inside = tree.get("trainer_args") or {}
        tree["trainer_args"] = {**beside, **inside} if isinstance(inside, dict) else inside
    return tree


def translate(tree: Any, problems: list[str], section: str = "", path: str = "") -> Any:
    """`tree` in our keys and values; refusals are appended to `problems`. Keys without a line stay."""
    table = TABLE.get(section)
    if table is None or not isinstance(tree, dict):
        return _items(tree, problems, section, path) if isinstance(tree, list) else tree
    ours: dict[str, Any] = {}
    moved: list[tuple[str, str, Any]] = []
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        rule = table.get(key)
        if rule is None:
            ours[key] = value
        elif isinstance(rule, Kept):
            below = f"{section}.{key}" if section else key
            ours[key] = translate(_rename(rule, value, here, problems), problems, below, here)
        elif isinstance(rule, Alias):
            moved.append((here, rule.to, value))
        elif isinstance(rule, Group) and isinstance(value, dict):
            left = translate(value, problems, f"{section}.{key}", here)
            legal = sorted(TABLE[f"{section}.{key}"])
            problems += [
                f"{here}.{name}={show(v)}: unknown key{nearest(str(name), legal)}" for name, v in left.items()
            ]
        else:
            _refuse(rule, value, here, problems)
    for here, to, value in moved:
        if value is not None:
            _put(ours, to.removeprefix(f"{section}."), value, here, to, problems)
    for of, key, value, other, values in CONTRADICTIONS:
        given = tree.get(other)
        if of == section and tree.get(key) == value and given is not None and given in values:
            problems.append(f"{path}.{key}={show(value)}: contradicts {path}.{other}={show(given)}")
    if section == "trainer_args" and "no" in (tree.get("eval_strategy"), tree.get("evaluation_strategy")):
        ours.setdefault("eval_steps", None)   # what an earlier file says of it is over
    if not section:
        _check_evaluation(tree, ours, problems)
    return ours


def _check_evaluation(tree: dict[str, Any], ours: dict[str, Any], problems: list[str]) -> None:
    """`eval_strategy: steps` on held-out data needs a number of steps: it has no default here."""
    data, trainer = ours.get("dataset_config"), tree.get("trainer_args")
    if not (isinstance(data, dict) and isinstance(trainer, dict)) or trainer.get("eval_steps") is not None:
        return
    for key in ("eval_strategy", "evaluation_strategy"):
        if trainer.get(key) == "steps" and (data.get("eval_datasets") or data.get("eval_dataset_path")):
            problems.append(f"trainer_args.{key}=steps: needs their number; give trainer_args.eval_steps")


def _items(tree: list[Any], problems: list[str], section: str, path: str) -> list[Any]:
    return [translate(item, problems, f"{section}.*", f"{path}.{i}") for i, item in enumerate(tree)]


def _rename(rule: Kept, value: Any, here: str, problems: list[str]) -> Any:
    name = str(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    if name in rule.values:
        return rule.values[name]
    if name in rule.later:
        problems.append(f"{here}={show(value)}: not supported yet (legal: {rule.legal})")
        return None
    if name in rule.refused:
        problems.append(f"{here}={show(value)}: refused; {rule.refused[name]}")
        return None
    return value


def _refuse(rule: Inert | Refused | Group, value: Any, here: str, problems: list[str]) -> None:
    if value is None:
        return
    if isinstance(rule, Refused):
        problems.append(f"{here}={show(value)}: refused; {rule.use}")
    elif isinstance(rule, Group):
        problems.append(f"{here}={show(value)}: legal: null or a mapping")
    elif rule.legal is not ANY and not any(same(value, legal) for legal in rule.legal):
        legal = ", ".join(show(v) for v in (*rule.legal, None))
        if rule.later:
            problems.append(f"{here}={show(value)}: not supported yet (legal: {legal})")
        else:
            problems.append(f"{here}={show(value)}: refused (legal: {legal}){rule.use and f'; {rule.use}'}")


def same(a: Any, b: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _put(ours: dict[str, Any], inside: str, value: Any, here: str, to: str, problems: list[str]) -> None:
    """Sets an alias's target below `ours`; a target given beside it must have the same value."""
    *folders, leaf = inside.split(".")
    for folder in folders:
        below = ours.get(folder)
        if below is not None and not isinstance(below, dict):
            return   # the wrong type of that key is reported by the schema
        ours[folder] = dict(below or {})
        ours = ours[folder]
    given = ours.get(leaf)
    if isinstance(given, dict) and isinstance(value, dict):
        ours[leaf] = dict(given)
        for key, inner in value.items():
            _put(ours[leaf], key, inner, f"{here}.{key}", f"{to}.{key}", problems)
    elif given is not None and not same(given, value):
        problems.append(f"{here}={show(value)}: contradicts {to}={show(given)}, which means the same")
    else:
        ours[leaf] = value
