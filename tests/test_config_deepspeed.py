"""DeepSpeed's settings: what is legal beside trainer_args, and what DeepSpeed is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.config import Job, load_job
from lmms_engine.config_deepspeed import engine_settings
from lmms_engine.errors import UserError

# As such files look in the field: everything that trainer_args decides is "auto".
FIELD = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1e5,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def tree(deepspeed: Any, trainer_type: str = "deepspeed_trainer", **trainer: Any) -> dict[str, Any]:
    return {
        "trainer_type": trainer_type,
        "model_config": {"load_from_pretrained_path": "org/model"},
        "dataset_config": {"datasets": [{"path": "rows.jsonl"}]},
        "trainer_args": {**trainer, "deepspeed": deepspeed},
    }


def zero(stage: int = 2, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def problems(given: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        Job.from_dict(given)
    return str(caught.value)


def test_a_file_of_the_field_is_legal_and_resolved() -> None:
    job = Job.from_dict(tree(FIELD, gradient_accumulation_steps=4, max_grad_norm=0.5))
    assert job.trainer.fsdp2 is False
    assert Job.from_dict(job.to_dict()) == job
    settings = engine_settings(job.trainer, bf16=True, world_size=8)
    assert settings == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "memory_efficient_linear": False,
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "sub_group_size": 1e9,
        },
    }
    assert "bf16" not in engine_settings(job.trainer, bf16=False, world_size=8)


def test_a_file_is_read_where_it_is_given_and_overlays_merge(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero2.json").write_text(json.dumps(zero(2, overlap_comm=True)))
    Path("zero3.json").write_text(json.dumps(zero(3)))
    Path("config.yaml").write_text(json.dumps(tree("zero2.json")))
    config = Path("config.yaml")
    assert load_job([config], []).trainer.deepspeed == zero(2, overlap_comm=True)
    changed = load_job([config], ["trainer_args.deepspeed.zero_optimization.stage=1"])
    assert changed.trainer.deepspeed == zero(1, overlap_comm=True)
    assert load_job([config], ["trainer_args.deepspeed=zero3.json"]).trainer.deepspeed == zero(3)
    env = {"STAGE": "3"}
    named = load_job([config], ["trainer_args.deepspeed=zero${STAGE}.json"], env=env)
    assert named.trainer.deepspeed == zero(3)
    Path("list.json").write_text("[1]")
    with pytest.raises(UserError, match=r"deepspeed=list.json: holds no mapping"):
        load_job([config], ["trainer_args.deepspeed=list.json"])
    with pytest.raises(UserError, match=r"trainer_args.deepspeed=gone.json: .*gone.json"):
        load_job([config], ["trainer_args.deepspeed=gone.json"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tree(zero(), "fsdp2_trainer"), "contradicts trainer_type=fsdp2_trainer (legal: null"),
        (tree(None), "trainer_args.deepspeed: missing (legal: a ZeRO JSON file or mapping)"),
        (tree(zero(), fsdp2=True), "trainer_args.fsdp2=true: contradicts trainer_type=deepspeed_trainer"),
        (
            tree(zero(), fsdp_config={"reshard_after_forward": False}),
            "fsdp_config.reshard_after_forward=false: DeepSpeed has no such choice",
        ),
        (
            tree(zero(), fsdp_config={"cpu_offload": True}),
            "fsdp_config.cpu_offload=true: not possible with trainer_type=deepspeed_trainer (legal: false;",
        ),
        (tree({}), "zero_optimization.stage=null: not legal (legal: 0, 1, 2, 3)"),
        (tree(zero(4)), "zero_optimization.stage=4: not legal"),
        (tree(zero(True)), "zero_optimization.stage=true: not legal"),
        (tree(zero(0)), "stage=0: keeps no float32 weights"),
        (tree(zero(stage3_max_live_parameter=1)), "did you mean 'stage3_max_live_parameters'?"),
        (tree(zero(offload_param={"device": "cpu"})), "not possible at stage=2 (legal: 3)"),
        (tree(zero(3, offload_param={"device": "nvme"})), "device=nvme: not legal (legal: none, cpu)"),
        (
            tree(zero() | {"train_batch_size": 6}, gradient_accumulation_steps=4),
            "train_batch_size=6: contradicts",
        ),
        (
            tree(zero() | {"gradient_accumulation_steps": 2}),
            "contradicts trainer_args.gradient_accumulation_steps=1",
        ),
        (tree(zero() | {"train_micro_batch_size_per_gpu": 2}), "trainer_args.per_device_train_batch_size=1"),
        (tree(zero() | {"gradient_clipping": 0.3}), "contradicts trainer_args.max_grad_norm=1.0"),
        (tree(zero() | {"optimizer": {"type": "Lamb"}}), "legal: type: AdamW"),
        (
            tree(zero() | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}),
            "optimizer.params.lr=0.0003: contradicts trainer_args.learning_rate",
        ),
        (
            tree(zero() | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}),
            "contradicts trainer_args.adam_beta1=0.9, trainer_args.adam_beta2=0.999",
        ),
        (
            tree(zero() | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}),
            "contradicts trainer_args.lr_scheduler_type",
        ),
        (tree(zero() | {"fp16": {"enabled": True}}), "use trainer_args.bf16"),
        (tree(zero() | {"bf16": {"enabled": False}}), "contradicts trainer_args.bf16=true"),
        (tree(zero() | {"zero_optimisation": {}}), "did you mean 'zero_optimization'?"),
        (
            tree(zero() | {"activation_checkpointing": {"cpu_checkpointing": True}}),
            "use trainer_args.fsdp_config.activation_checkpointing",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(given: dict[str, Any], expected: str) -> None:
    assert expected in problems(given)


def test_values_that_agree_are_legal() -> None:
    same = zero() | {
        "gradient_clipping": 1,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "torch_adam": True}},
    }
    job = Job.from_dict(tree(same, gradient_accumulation_steps=4))
    engine_settings(job.trainer, bf16=False, world_size=2)
    with pytest.raises(UserError, match=r"train_batch_size=8: 4 ranks x 4 are 16 \(legal: auto, or that\)"):
        engine_settings(job.trainer, bf16=False, world_size=4)
