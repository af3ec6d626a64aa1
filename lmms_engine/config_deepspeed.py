"""`trainer_args.deepspeed`: which of DeepSpeed's settings are legal, and what DeepSpeed is given.

trainer_args decides everything that it has a key for. DeepSpeed's own key for the same thing may be left out,
be "auto", or say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmms_engine.compat import same
from lmms_engine.config_load import show
from lmms_engine.errors import UserError
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    from lmms_engine.config import Job, TrainerSection

PATH = "trainer_args.deepspeed"
AUTO = "auto"

# DeepSpeed's key -> the key of trainer_args that decides.
OURS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
OPTIMIZER_PARAMS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
# Handed to DeepSpeed as they are.
PASSED = ("communication_data_type", "data_types", "steps_per_print", "wall_clock_breakdown", "comms_logger")
ZERO_PASSED = (
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
    "memory_efficient_linear", "overlap_comm", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "stage", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
)  # fmt: skip
# Which weights DeepSpeed's own save would gather; checkpoints and export here are always whole.
ZERO_INERT = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
OFFLOAD = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}   # at which stages
OFFLOAD_KEYS = ("device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init")
OFF = {   # legal only when they say "no"
    "amp": "use trainer_args.bf16",
    "fp16": "use trainer_args.bf16",
}
INSTEAD = {
    "activation_checkpointing": "use trainer_args.fsdp_config.activation_checkpointing",
    "tensorboard": "use trainer_args.report_to",
    "wandb": "use trainer_args.report_to",
}
TOP = (*OURS, "train_batch_size", "bf16", "fp16", "amp", "optimizer", "scheduler", "zero_optimization",
       "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", *PASSED)  # fmt: skip


def deepspeed_problems(job: Job) -> list[str]:
    """What is wrong with the DeepSpeed settings of a job, or with others because of them."""
    trainer, given = job.trainer, job.trainer.deepspeed
    if job.trainer_type != "deepspeed_trainer":
        if given is None:
            return []
        return [f"{PATH}={show(given)}: contradicts trainer_type={job.trainer_type} "
                "(legal: null; or give trainer_type: deepspeed_trainer)"]  # fmt: skip
    problems = []
    if trainer.fsdp2:
        problems.append("trainer_args.fsdp2=true: contradicts trainer_type=deepspeed_trainer (legal: false)")
    for key, legal in (("ep_degree", 1), ("fsdp_config.hsdp_shard_size", 0), ("use_muon", False)):
        value = _of(trainer, key)
        if value != legal:
            problems.append(
                f"trainer_args.{key}={show(value)}: not possible with trainer_type=deepspeed_trainer "
                f"(legal: {show(legal)}; or use trainer_type: fsdp2_trainer)"
            )
    if not trainer.fsdp_config.reshard_after_forward:
        problems.append(
            "trainer_args.fsdp_config.reshard_after_forward=false: DeepSpeed has no such choice (legal: "
            f"true; to keep parameters gathered use {PATH}.zero_optimization.stage: 2)"
        )
    if trainer.fsdp_config.cpu_offload:
        problems.append(
            "trainer_args.fsdp_config.cpu_offload=true: not possible with trainer_type=deepspeed_trainer "
            f"(legal: false; use {PATH}.zero_optimization.offload_optimizer and offload_param)"
        )
    if given is None:
        return [*problems, f"{PATH}: missing (legal: a ZeRO JSON file or mapping)"]
    return problems + _top_problems(given, trainer) + _zero_problems(given.get("zero_optimization"), trainer)


def _top_problems(given: dict[str, Any], trainer: TrainerSection) -> list[str]:
    problems = []
    for key, value in given.items():
        path = f"{PATH}.{key}"
        if key in INSTEAD:
            problems.append(f"{path}={show(value)}: not legal here; {INSTEAD[key]}")
        elif key not in TOP:
            problems.append(_unknown(path, key, value, TOP))
        elif key in OURS:
            problems += _must_equal(path, value, OURS[key], trainer)
        elif key in OFF and _enabled(value) not in (False, AUTO):
            problems.append(f"{path}={show(value)}: not legal (legal: enabled: false); {OFF[key]}")
    batch, bf16 = given.get("train_batch_size", AUTO), _enabled(given.get("bf16", AUTO))
    each = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps
    if batch != AUTO and (not _is_count(batch) or batch % each):
        problems.append(
            f"{PATH}.train_batch_size={show(batch)}: contradicts trainer_args.per_device_train_batch_size x "
            f"trainer_args.gradient_accumulation_steps = {each} a rank (legal: auto, or that times the ranks)"
        )
    if bf16 not in (AUTO, trainer.bf16):
        problems.append(
            f"{PATH}.bf16.enabled={show(bf16)}: contradicts trainer_args.bf16={show(trainer.bf16)} "
            "(legal: auto)"
        )
    if given.get("zero_force_ds_cpu_optimizer") is True:
        problems.append(
            f"{PATH}.zero_force_ds_cpu_optimizer=true: the optimiser is torch's AdamW (legal: false)"
        )
    return problems + _optimizer_problems(given.get("optimizer"), trainer) + _scheduler_problems(given)


def _optimizer_problems(given: Any, trainer: TrainerSection) -> list[str]:
    if given is None:
        return []
    path = f"{PATH}.optimizer"
    if not isinstance(given, dict) or given.get("type") != "AdamW" or set(given) - {"type", "params"}:
        return [f"{path}={show(given)}: not legal (legal: type: AdamW with params, or leave it out)"]
    problems = []
    for key, value in (given.get("params") or {}).items():
        if key in OPTIMIZER_PARAMS:
            problems += _must_equal(f"{path}.params.{key}", value, OPTIMIZER_PARAMS[key], trainer)
        elif key == "betas":
            ours = [trainer.adam_beta1, trainer.adam_beta2]
            if value not in (AUTO, [AUTO, AUTO], ours):
                problems.append(
                    f"{path}.params.betas={show(value)}: contradicts trainer_args.adam_beta1={ours[0]}, "
                    f"trainer_args.adam_beta2={ours[1]} (legal: auto)"
                )
        elif key not in ("torch_adam", "adam_w_mode") or value is not True:
            legal = (*OPTIMIZER_PARAMS, "betas", "torch_adam: true", "adam_w_mode: true")
            problems.append(f"{path}.params.{key}={show(value)}: not legal (legal: {', '.join(legal)})")
    return problems


def _scheduler_problems(given: dict[str, Any]) -> list[str]:
    scheduler = given.get("scheduler")
    params = (scheduler.get("params") or {}) if isinstance(scheduler, dict) else {None: scheduler}
    if scheduler is None or (params and all(value == AUTO for value in params.values())):
        return []
    return [
        f"{PATH}.scheduler={show(scheduler)}: contradicts trainer_args.lr_scheduler_type, which decides "
        "(legal: params that are all auto, or leave it out)"
    ]


def _zero_problems(zero: Any, trainer: TrainerSection) -> list[str]:
    path = f"{PATH}.zero_optimization"
    if not isinstance(zero, dict) or isinstance(zero.get("stage"), bool) or zero.get("stage") not in range(4):
        stage = zero.get("stage") if isinstance(zero, dict) else zero
        return [f"{path}.stage={show(stage)}: not legal (legal: 0, 1, 2, 3)"]
    stage, problems = zero["stage"], []
    if stage == 0 and trainer.bf16:
        problems.append(
            f"{path}.stage=0: keeps no float32 weights beside bf16 ones (legal: 1, 2, 3; or "
            "trainer_args.bf16: false)"
        )
    for key, value in zero.items():
        if key in OFFLOAD:
            problems += _offload_problems(f"{path}.{key}", value, stage, OFFLOAD[key])
        elif key not in (*ZERO_PASSED, *ZERO_INERT):
            problems.append(_unknown(f"{path}.{key}", key, value, (*ZERO_PASSED, *OFFLOAD)))
    return problems


def _offload_problems(path: str, value: Any, stage: int, stages: tuple[int, ...]) -> list[str]:
    if value is None or (isinstance(value, dict) and value.get("device", "none") == "none"):
        return []
    if not isinstance(value, dict) or value.get("device") != "cpu":
        device = value.get("device") if isinstance(value, dict) else value
        return [f"{path}.device={show(device)}: not legal (legal: none, cpu)"]
    problems = [
        _unknown(f"{path}.{key}", key, value[key], OFFLOAD_KEYS) for key in value if key not in OFFLOAD_KEYS
    ]
    if stage not in stages:
        words = ", ".join(map(str, stages))
        problems.append(f"{path}.device=cpu: not possible at stage={stage} (legal: {words})")
    return problems


def engine_settings(trainer: TrainerSection, *, bf16: bool, world_size: int) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`; every "auto" is resolved.

    bf16: compute type on this machine. Gradients are then added and reduced in float32, as everywhere else.
    Raises UserError if a train_batch_size was given that the number of ranks contradicts.
    """
    given = trainer.deepspeed
    each = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps
    batch = given.get("train_batch_size", AUTO)
    if batch not in (AUTO, each * world_size):
        raise UserError(
            f"{PATH}.train_batch_size={batch}: {world_size} ranks x {each} are {each * world_size} "
            "(legal: auto, or that)"
        )
    zero = {key: value for key, value in given["zero_optimization"].items() if key not in ZERO_INERT}
    settings = {key: given[key] for key in PASSED if given.get(key, AUTO) != AUTO}
    settings |= {
        "train_micro_batch_size_per_gpu": trainer.per_device_train_batch_size,
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        # stage 0 clips through the optimiser, as FSDP2 does
        "gradient_clipping": (trainer.max_grad_norm or 0.0) if zero["stage"] else 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "memory_efficient_linear": False,   # would replace torch's linear for the whole process
            **{key: value for key, value in zero.items() if value not in (AUTO, None)},
        },
    }
    if bf16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings.setdefault("communication_data_type", "fp32")
        settings["data_types"] = {"grad_accum_dtype": "fp32", **settings.get("data_types", {})}
    return settings


def _must_equal(path: str, value: Any, key: str, trainer: TrainerSection) -> list[str]:
    ours = _of(trainer, key)
    if value == AUTO or (isinstance(value, (int, float)) and same(float(value), float(ours))):
        return []
    return [f"{path}={show(value)}: contradicts trainer_args.{key}={show(ours)} (legal: auto, {show(ours)})"]


def _unknown(path: str, key: str, value: Any, legal: tuple[str, ...]) -> str:
    return f"{path}={show(value)}: not legal (legal: {', '.join(sorted(legal))}){nearest(key, list(legal))}"


def _enabled(value: Any) -> Any:
    return value.get("enabled", False) if isinstance(value, dict) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of(trainer: TrainerSection, path: str) -> Any:
    found: Any = trainer
    for part in path.split("."):
        found = getattr(found, part)
    return found
