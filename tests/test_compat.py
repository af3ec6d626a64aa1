"""The reference system's keys: what loads, what is refused, and what is said then."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from lmms_engine import compat
from lmms_engine.compat import ANY, TABLE, Alias, Group, Inert, Kept, Refused
from lmms_engine.config import SCHEMA, Job, load_job
from lmms_engine.config_load import parse_yaml
from lmms_engine.errors import UserError

# Every key of the reference's trainer section in a dump of a Qwen3-VL fine-tune, with values of its kind.
DUMP = """
accelerator_config: {dispatch_batches: null, even_batches: true, gradient_accumulation_kwargs: null,
  non_blocking: false, split_batches: false, use_seedable_sampler: true}
adafactor: false
adam_beta1: 0.9
adam_beta2: 0.98
adam_epsilon: 1.0e-08
auto_find_batch_size: false
average_tokens_across_devices: true
batch_eval_metrics: false
bf16: true
bf16_full_eval: false
data_seed: null
dataloader_drop_last: false
dataloader_num_workers: 3
dataloader_persistent_workers: false
dataloader_pin_memory: true
dataloader_prefetch_factor: null
ddp_backend: null
ddp_broadcast_buffers: null
ddp_bucket_cap_mb: null
ddp_find_unused_parameters: null
ddp_timeout: 1800
debug: []
deepspeed: null
disable_tqdm: false
do_eval: false
do_predict: false
do_train: false
enable_profiler: false
eval_accumulation_steps: null
eval_delay: 0
eval_do_concat_batches: true
eval_on_start: false
eval_steps: null
eval_strategy: no
eval_use_gather_object: false
fp16: false
fp16_backend: auto
fp16_full_eval: false
fp16_opt_level: O1
freeze_modules: null
fsdp: []
fsdp2: true
fsdp_config: {min_num_params: 0, reshard_after_forward: false, xla: false, xla_fsdp_grad_ckpt: false,
  xla_fsdp_v2: false, transformer_layer_cls_to_wrap: [Qwen3VLTextDecoderLayer]}
fsdp_min_num_params: 0
fsdp_transformer_layer_cls_to_wrap: null
full_determinism: false
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs: null
greater_is_better: null
group_by_length: false
half_precision_backend: auto
hub_always_push: false
hub_model_id: null
hub_private_repo: null
hub_revision: null
hub_strategy: every_save
hub_token: <HUB_TOKEN>
ignore_data_skip: false
include_for_metrics: []
include_inputs_for_metrics: false
include_num_input_tokens_seen: no
include_tokens_per_second: false
jit_mode_eval: false
label_names: null
label_smoothing_factor: 0.0
learning_rate: 0.0002
length_column_name: length
liger_kernel_config: null
load_best_model_at_end: false
local_rank: 0
log_level: passive
log_level_replica: warning
log_on_each_node: true
logging_dir: ./output/runs/somewhere
logging_first_step: false
logging_nan_inf_filter: true
logging_steps: 5
logging_strategy: steps
lr_scheduler_kwargs: {}
lr_scheduler_type: cosine
max_grad_norm: 1.0
max_steps: 700
metric_for_best_model: null
mp_parameters: ''
neftune_noise_alpha: null
no_cuda: false
num_train_epochs: 1
optim: adamw_torch_fused
optim_args: null
optim_target_modules: null
output_dir: ./output/vl
output_dtype: bfloat16
overwrite_output_dir: false
parallelism_config: null
past_index: -1
per_device_eval_batch_size: 8
per_device_train_batch_size: 1
per_gpu_eval_batch_size: null
per_gpu_train_batch_size: null
prediction_loss_only: false
print_batch_input_steps: 5
profiler_config: {end_step: 3, start_step: 1}
project: huggingface
push_to_hub: false
push_to_hub_model_id: null
push_to_hub_organization: null
ray_scope: last
reduce_dtype: bfloat16
remove_unused_columns: true
report_to: []
restore_callback_states_from_checkpoint: false
resume_from_checkpoint: null
run_name: vl
save_on_each_node: false
save_only_model: false
save_safetensors: true
save_steps: 900
save_strategy: steps
save_total_limit: 1
seed: 42
skip_memory_metrics: true
sp_ulysses_degree: 1
tf32: null
torch_compile: false
torch_compile_backend: null
torch_compile_mode: null
torch_empty_cache_steps: null
torchdynamo: null
tpu_metrics_debug: false
tpu_num_cores: null
trackio_space_id: trackio
use_cpu: false
use_legacy_prediction_loop: false
use_liger_kernel: true
use_mps_device: false
use_muon: false
use_rmpad: true
warmup_ratio: 0.1
warmup_steps: 0
weight_decay: 0.0
"""
DATA = """
bucket_name: null
data_seed: 42
dataset_format: yaml
dataset_path: sets.yaml
dataset_type: qwen3_vl_iterable
datasets: null
eval_dataset_path: null
extra_kwargs: {}
filter_overlong: true
filter_overlong_workers: 8
fps: 1
frame_num: 64
max_length: null
object_storage: none
packing: false
packing_length: 51200
packing_strategy: first_fit
processor_config: {processor_name: "", processor_type: nit}
shuffle: true
video_backend: qwen_vl_utils
video_max_frames: 512
video_max_pixels: 50176
video_sampling_strategy: fps
"""
MODEL = """
attn_implementation: flash_attention_2
extra_kwargs: {}
load_from_config: null
load_from_pretrained_path: Qwen/Qwen3-VL-8B-Instruct
model_type: null
monkey_patch_kwargs: null
overwrite_config: null
torch_dtype: bfloat16
"""
# Keys of its older examples, where the trainer's stand beside the sections.
OLD_FORM = """
- type: trainer
  config:
    trainer_type: fsdp2_trainer
    dataset_config:
      dataset_type: vision
      dataset_format: yaml
      datasets: [{path: data/rows.parquet, data_folder: "", data_type: parquet}]
      processor_config: {processor_name: Qwen/Qwen3-8B, processor_type: qwen2}
      packing: false
      video_backend: qwen_vl_utils
    model_config:
      load_from_pretrained_path: Qwen/Qwen3-8B
      monkey_patch_kwargs: {patch_type: [liger], use_rmpad: true, rope: false, swiglu: false,
        cross_entropy: false, fused_linear_cross_entropy: true, rms_norm: false}
    learning_rate: 1.0e-06
    gradient_checkpointing: false
    max_steps: 500
    num_train_epochs: 1
    report_to: "none"
    warmup_ratio: 0.0
    warmup_steps: 100
    eval_strategy: "no"
    group_by_length: true
    fsdp2: true
    fsdp_config: {transformer_layer_cls_to_wrap: [Qwen3DecoderLayer], reshard_after_forward: false}
    ep_degree: 1
"""
# The remaining keys of its example files and of its defaults, by section.
OTHER_KEYS = {
    "": "extra_kwargs config_yaml ray_train rl_runtime",
    "model_config": "model_general_type load_with_custom_loader",
    "model_config.monkey_patch_kwargs": "add_faster_video faster_token_stride mm_spatial_pool_stride "
    "mm_spatial_pool_mode block_size compress_type kernel_size kernel_stride topk init_blocks local_blocks "
    "window_size",
    "dataset_config": "eval_dataset_path data_seed video_min_pixels test_max_samples frame_num",
    "dataset_config.datasets.*": "path data_folder data_type kwargs",
    "dataset_config.processor_config": "kwargs extra_kwargs do_resize size do_normalize image_mean image_std",
    "trainer_args": "evaluation_strategy enable_cuda_event_profiler cuda_event_profiler_config tp_degree "
    "ema_enabled "
    "ema_decay ema_update_every ema_start_step ema_requires_grad_only ema_param_filter ema_resume_from_ema "
    "eval_config rl_config",
    "trainer_args.fsdp_config": "fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch "
    "fsdp_state_dict_type "
    "fsdp_use_orig_params backward_prefetch forward_prefetch use_orig_params cpu_ram_efficient_loading "
    "sync_module_states limit_all_gathers activation_checkpointing sharding_strategy hsdp_shard_size",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets.yaml").write_text("datasets:\n- {path: rows, data_folder: media, data_type: arrow}\n")


def tree(**trainer: Any) -> dict[str, Any]:
    return {
        "model_config": {"load_from_pretrained_path": "org/model"},
        "dataset_config": {"datasets": [{"path": "rows.jsonl"}]},
        "trainer_args": trainer,
    }


def problems(content: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        Job.from_dict(content)
    first, *more = str(caught.value).split("\n  ")
    return more or [first]


def load(text: str, *overrides: str) -> Job:
    Path("example.yaml").write_text(text)
    return load_job([Path("example.yaml")], list(overrides))


class TestTable:
    def test_kept_keys_are_exactly_ours(self) -> None:
        for section, table in TABLE.items():
            kept = {key for key, rule in table.items() if isinstance(rule, Kept)}
            if section in ("model_config.monkey_patch_kwargs", "trainer_args.accelerator_config"):
                assert not kept
            else:
                assert kept == set(SCHEMA.keys(section)), section

    def test_aliases_lead_to_our_keys(self) -> None:
        for section, table in TABLE.items():
            for rule in table.values():
                if isinstance(rule, Alias):
                    parent, _, key = rule.to.rpartition(".")
                    free = parent.endswith("extra_kwargs")
                    assert free or key in SCHEMA.keys(parent), rule
                    assert rule.to.startswith(f"{section}."), "translate() moves keys inside a section only"

    def test_groups_have_keys(self) -> None:
        for section, table in TABLE.items():
            for key, rule in table.items():
                assert not isinstance(rule, Group) or TABLE[f"{section}.{key}"]

    def test_every_training_argument_has_a_line(self) -> None:
        from transformers import TrainingArguments

        missing = {field.name for field in dataclasses.fields(TrainingArguments)} - set(TABLE["trainer_args"])
        assert not missing

    def test_the_defaults_of_training_arguments_load(self) -> None:
        from transformers import TrainingArguments

        values = {
            field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(TrainingArguments)
        }
        plain = {name: getattr(value, "value", value) for name, value in values.items()}
        found = Job.from_dict(tree(**plain)).trainer
        assert (found.learning_rate, found.num_train_epochs, found.max_steps) == (5e-5, 3.0, None)
        assert found.fsdp_config.activation_checkpointing is False

    @pytest.mark.parametrize("section", OTHER_KEYS)
    def test_every_other_key_has_a_line(self, section: str) -> None:
        assert not set(OTHER_KEYS[section].split()) - set(TABLE[section])

    def test_refusals_say_what_to_do(self) -> None:
        for section, table in TABLE.items():
            for key, rule in table.items():
                path = f"{section.replace('.*', '.0')}.{key}"
                assert not isinstance(rule, Refused) or rule.use, path
                if isinstance(rule, Inert) and rule.legal is not ANY:
                    found: list[str] = []
                    compat._refuse(rule, "another value", path, found)
                    assert re.search(r": (refused|not supported yet) \(legal: .*null\)", found[0]), path
                    for legal in (*rule.legal, None):
                        compat._refuse(rule, legal, path, found)
                    assert len(found) == 1, path


class TestExamplesThatLoad:
    def test_qwen3_vl(self, tmp_path: Path) -> None:
        content = {
            "trainer_type": "fsdp2_trainer",
            "extra_kwargs": None,
            "trainer_args": parse_yaml(DUMP, "dump"),
            "dataset_config": parse_yaml(DATA, "dump"),
            "model_config": parse_yaml(MODEL, "dump"),
        }
        found = Job.from_dict(content)
        assert found.model.attn_implementation == "flash_attn"
        assert found.model.load_from_pretrained_path == "Qwen/Qwen3-VL-8B-Instruct"
        assert found.dataset.dataset_type == "vision_iterable"
        assert found.dataset.packing is False
        (entry,) = found.dataset.datasets
        assert (entry.path, entry.data_folder) == (f"{tmp_path}/rows", f"{tmp_path}/media")
        assert found.dataset.processor_config.processor_type is None
        assert found.dataset.processor_config.processor_name is None
        trainer = found.trainer
        assert (trainer.max_steps, trainer.num_train_epochs) == (700, None)
        assert (trainer.warmup_ratio, trainer.warmup_steps) == (0.1, 0)
        assert trainer.fsdp_config.activation_checkpointing is True
        assert trainer.fsdp_config.reshard_after_forward is False
        assert trainer.fsdp_config.transformer_layer_cls_to_wrap == ("Qwen3VLTextDecoderLayer",)
        assert trainer.report_to == ()
        assert trainer.freeze_modules == ()
        assert trainer.learning_rate == 2e-4
        assert trainer.adam_beta2 == 0.98
        assert trainer.output_dir == "./output/vl"

    def test_old_form(self) -> None:
        found = load(OLD_FORM, "trainer_args.logging_steps=7")
        assert found.dataset.dataset_type == "vision_iterable"
        assert found.dataset.processor_config.processor_name == "Qwen/Qwen3-8B"
        assert (found.trainer.max_steps, found.trainer.warmup_steps, found.trainer.warmup_ratio) == (
            500,
            100,
            0,
        )
        assert found.trainer.fsdp_config.activation_checkpointing is False
        assert found.trainer.report_to == ()
        assert found.trainer.logging_steps == 7

    def test_old_form_with_a_trainer_section(self) -> None:
        text = OLD_FORM.replace("- type:", "- task_type:").replace(
            "    learning_rate", "    trainer_args: {seed: 7}\n    learning_rate"
        )
        assert load(text).trainer.seed == 7
        assert load(text).trainer.learning_rate == 1e-6

    def test_old_form_is_as_strict(self) -> None:
        with pytest.raises(UserError, match=r"trainer_args\.learning_rat=.* did you mean 'learning_rate'"):
            load(OLD_FORM.replace("learning_rate", "learning_rat"))

    def test_flat_trainer_keys_belong_to_the_old_form_alone(self) -> None:
        (line,) = problems({**tree(), "learning_rate": 1e-6})
        assert line == "learning_rate=1e-06: unknown key here; it belongs at trainer_args.learning_rate"

    def test_several_tasks_are_refused(self) -> None:
        with pytest.raises(UserError, match="not a configuration"):
            load(OLD_FORM + "- type: eval\n  config: {}\n")


# Examples of families and features to come, reduced to what matters: every error names such a feature.
LATER = {
    "omni": (
        """
- type: trainer
  config:
    trainer_type: hf_trainer
    dataset_config:
      dataset_type: qwen_omni
      dataset_format: json
      dataset_path: rows.json
      processor_config: {processor_name: a/b, processor_type: Qwen2_5OmniProcessor,
        extra_kwargs: {audio_max_length: 60, use_audio_in_video: true}}
      video_sampling_strategy: fps
      fps: 1
    model_config: {load_from_pretrained_path: a/b, attn_implementation: flash_attention_2,
      model_type: qwen2_5_omni, torch_dtype: bfloat16}
    fsdp: full_shard
    fsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B], fsdp_backward_prefetch: backward_pre,
      fsdp_state_dict_type: sharded_state_dict, fsdp_use_orig_params: true}
    torch_empty_cache_steps: 10
    eval_strategy: steps
    report_to: wandb
    run_name: ""
    output_dir: ""
""",
        [
            "dataset_config.dataset_type=qwen_omni",
            "dataset_config.processor_config.processor_type=Qwen2_5Omni",
        ],
    ),
    "video diffusion": (
        """
- task_type: trainer
  config:
    trainer_type: wan_trainer
    dataset_config:
      dataset_type: vision
      dataset_format: jsonl
      dataset_path: rows.jsonl
      video_sampling_strategy: frame_num
      frame_num: 49
      processor_config: {processor_type: wanvideo, do_resize: true, size: {height: 8, width: 8},
        kwargs: {do_normalize: true, image_mean: [0.5, 0.5, 0.5]}}
    model_config: {load_from_config: {model_type: wanvideo, config: {dit_hidden_size: 64, dit_eps: 1.0e-6}}}
    num_train_epochs: 10000
    tf32: true
    remove_unused_columns: false
    optim: adamw_torch
""",
        [
            "dataset_config.processor_config.processor_type=wanvideo",
            "dataset_config.video_sampling_strategy=frame_num",
        ],
    ),
    "compiled": (
        "trainer_args: {torch_compile: true, torch_compile_backend: inductor}\n"
        "model_config: {load_from_pretrained_path: a/b}\ndataset_config: {datasets: [{path: x}]}\n",
        ["trainer_args.torch_compile=true"],
    ),
    "hub data": (
        "model_config: {load_from_pretrained_path: a/b}\n"
        "dataset_config: {datasets: [{path: a/b, data_type: hf, kwargs: {split: train}}]}\n",
        ["dataset_config.datasets.0.kwargs="],
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_examples_to_come(name: str) -> None:
    text, expected = LATER[name]
    with pytest.raises(UserError) as caught:
        load(text)
    first, *more = str(caught.value).split("\n  ")
    lines = sorted(more or [first])
    assert len(lines) == len(expected), lines
    for line, start in zip(lines, sorted(expected), strict=True):
        assert line.startswith(start)
        assert re.search(r": not supported yet \(legal: .+\)$", line)


class TestRefusals:
    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("fp16", True, "refused (legal: false, null); use bf16: true"),
            ("fp16", 0, "refused (legal: false, null)"),
            ("push_to_hub", True, "refused (legal: false, null)"),
            ("save_strategy", "epoch", "refused (legal: steps, null); use save_steps"),
            (
                "resume_from_checkpoint",
                "runs/x/checkpoint-3",
                'refused (legal: true, "", null); a run resumes',
            ),
            ("label_smoothing_factor", 0.1, "refused (legal: 0.0, null)"),
            ("per_gpu_train_batch_size", 2, "refused (legal: null); "),
            ("rl_config", 1, "refused; reinforcement learning"),
            ("data_seed", 7, "refused (legal: 42, null); trainer_args.seed"),
            ("dataloader_drop_last", True, "refused (legal: false, null); no row is dropped"),
            ("dataloader_pin_memory", False, "refused (legal: true, null); "),
            ("project", "mine", "refused (legal: huggingface, null); name the project by the variable WANDB"),
            ("lr_scheduler_type", "cosine_with_restarts", "refused; there are no restarts; use cosine"),
            ("lr_scheduler_type", "polynomial", "refused; use linear with trainer_args.lr_scheduler_kwargs."),
            ("lr_scheduler_type", "cosine_with_min_lr", "refused; use cosine with trainer_args.lr_scheduler"),
            ("accelerator_config", {"split_batches": True}, None),
            ("accelerator_config", {"split_batchs": True}, None),
            ("accelerator_config", "x", "legal: null or a mapping"),
        ],
    )
    def test_names_the_replacement(self, key: str, value: Any, expected: str | None) -> None:
        (line,) = problems(tree(**{key: value}))
        assert line.startswith(f"trainer_args.{key}")
        if expected is not None:
            assert line.split(": ", 1)[1].startswith(expected)

    def test_every_scheduler_of_transformers_is_ours_or_has_a_replacement(self) -> None:
        from transformers.trainer_utils import SchedulerType

        renamed = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
        for name in (kind.value for kind in SchedulerType):
            content = tree(lr_scheduler_type=name)
            if name in ("linear", "cosine", "constant", *renamed):
                assert Job.from_dict(content).trainer.lr_scheduler_type == renamed.get(name, name)
            else:
                (line,) = problems(content)
                assert re.search(rf"={name}: refused; .*\buse (linear|cosine)", line)

    def test_tf32_only_where_it_does_nothing(self) -> None:
        assert Job.from_dict(tree(tf32=True)).trainer.bf16
        (line,) = problems(tree(tf32=True, bf16=False))
        assert line == "trainer_args.tf32=true: contradicts trainer_args.bf16=false"

    def test_splitting_names_the_key_to_use(self) -> None:
        (line,) = problems(tree(accelerator_config={"split_batches": True}))
        assert line.startswith("trainer_args.accelerator_config.split_batches=true: refused (legal: false")
        assert "trainer_args.per_device_train_batch_size" in line

    def test_custom_loader(self) -> None:
        content = tree()
        content["model_config"]["load_with_custom_loader"] = True
        (line,) = problems(content)
        assert line == "model_config.load_with_custom_loader=true: not supported yet (legal: false, null)"
        content["model_config"]["load_with_custom_loader"] = False
        Job.from_dict(content)

    def test_evaluation_by_steps_needs_their_number(self) -> None:
        content = tree(eval_strategy="steps")
        Job.from_dict(content)   # nothing to evaluate
        content["dataset_config"]["eval_datasets"] = [{"path": "held.jsonl"}]
        (line,) = problems(content)
        assert line == "trainer_args.eval_strategy=steps: needs their number; give trainer_args.eval_steps"

    def test_inside_a_group(self) -> None:
        (line,) = problems(tree(accelerator_config={"split_batchs": True}))
        assert line.endswith("unknown key; did you mean 'split_batches'?")

    def test_reinforcement_learning(self) -> None:
        content = {**tree(), "trainer_type": "bagel_grpo_trainer", "ray_train": {"num_workers": 8}}
        assert len([line for line in problems(content) if "reinforcement learning" in line]) == 2

    def test_contradicting_aliases(self) -> None:
        (line,) = problems(tree(gradient_checkpointing=False, fsdp_config={"activation_checkpointing": True}))
        assert line.startswith("trainer_args.gradient_checkpointing=false: contradicts")
        agreeing = tree(gradient_checkpointing=False, fsdp_config={"activation_checkpointing": False})
        assert Job.from_dict(agreeing).trainer.fsdp_config.activation_checkpointing is False

    def test_an_alias_is_typed_like_its_key(self) -> None:
        (line,) = problems(tree(gradient_checkpointing="yes"))
        assert line.startswith("trainer_args.fsdp_config.activation_checkpointing=yes: not legal")

    def test_evaluation_switched_off_and_on(self) -> None:
        content = tree(eval_strategy="no", eval_steps=5)
        content["dataset_config"]["eval_datasets"] = [{"path": "held.jsonl"}]
        (line,) = problems(content)
        assert line == "trainer_args.eval_strategy=no: contradicts trainer_args.eval_steps=5"
        content["trainer_args"]["eval_strategy"] = "steps"
        assert Job.from_dict(content).trainer.eval_steps == 5

    def test_evaluation_switched_off_on_top_of_a_file(self) -> None:
        Path("a.yaml").write_text(
            "model_config: {load_from_pretrained_path: a}\ntrainer_args: {eval_steps: 5}\n"
            "dataset_config: {datasets: [{path: x}], eval_datasets: [{path: y}]}"
        )
        for key in ("eval_strategy", "evaluation_strategy"):
            off = f"trainer_args.{key}=no"
            assert load_job([Path("a.yaml")], [off]).trainer.eval_steps is None
            assert load_job([Path("a.yaml")], [off, "trainer_args.eval_steps=3"]).trainer.eval_steps == 3

    def test_layers_of_aliases(self) -> None:
        Path("a.yaml").write_text(
            "trainer_args: {gradient_checkpointing: true}\nmodel_config: {load_from_pretrained_path: a}\n"
            "dataset_config: {datasets: [{path: x}]}"
        )
        override = "trainer_args.fsdp_config.activation_checkpointing=false"
        assert load_job([Path("a.yaml")], [override]).trainer.fsdp_config.activation_checkpointing is False
        again = "trainer_args.gradient_checkpointing=true"
        assert (
            load_job([Path("a.yaml")], [override, again]).trainer.fsdp_config.activation_checkpointing is True
        )

    def test_pixels_go_to_the_processor(self) -> None:
        content = tree()
        content["dataset_config"] |= {
            "video_min_pixels": 3136,
            "processor_config": {"extra_kwargs": {"a": 1}},
        }
        extra = Job.from_dict(content).dataset.processor_config.extra_kwargs
        assert extra == {"a": 1, "video_min_pixels": 3136}

    def test_processor_settings_go_to_the_processor(self) -> None:
        content = tree()
        content["dataset_config"]["processor_config"] = {"do_resize": False, "kwargs": {"size": 8}}
        extra = Job.from_dict(content).dataset.processor_config.extra_kwargs
        assert extra == {"size": 8, "do_resize": False}


@pytest.mark.parametrize(
    "content", [3, [1], [{"type": "trainer"}], [{"type": "eval", "config": {}}], None, {"a": 1}]
)
def test_unwrap_leaves_the_rest(content: Any) -> None:
    assert compat.unwrap(content) == content


def test_example_of_image_diffusion_is_read() -> None:
    """Its processor and model are ours; what the model's config lacks is said when it is built."""
    job = Job.from_dict(
        {
            "trainer_type": "sit_trainer",
            "dataset_config": {
                "dataset_type": "vision",
                "processor_config": {"processor_type": "sit", "extra_kwargs": {"image_size": 256}},
                "datasets": [{"path": "rows", "data_type": "arrow"}],
            },
            "model_config": {"load_from_config": {"model_type": "sit", "depth": 28, "loss_weight": None}},
        }
    )
    assert job.dataset.processor_config.processor_type == "sit"
    assert job.dataset.processor_config.extra_kwargs == {"image_size": 256}
