"""Job: defaults, layers, strictness, and what a wrong configuration says."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from lmms_engine.config import Job, load_job
from lmms_engine.config_load import dump_yaml, show
from lmms_engine.errors import UserError

Write = Callable[..., Path]
BASE: dict[str, Any] = {
    "model_config": {"load_from_pretrained_path": "org/model"},
    "dataset_config": {"datasets": [{"path": "data/rows.jsonl"}]},
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(name, tree or text) -> path of the file."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else dump_yaml(content))
        return path

    return write


def base(**sections: Any) -> dict[str, Any]:
    """BASE with keys added to sections: base(trainer_args={…})."""
    tree = {key: dict(value) for key, value in BASE.items()}
    for section, keys in sections.items():
        below = tree.get(section)
        tree[section] = {**below, **keys} if isinstance(below, dict) and isinstance(keys, dict) else keys
    return tree


def job(**sections: Any) -> Job:
    return Job.from_dict(base(**sections))


def problems(tree: Any, *, env: dict[str, str] | None = None) -> list[str]:
    """The lines of the error that a tree raises."""
    with pytest.raises(UserError) as caught:
        Job.from_dict(tree, env=env or {})
    first, *more = str(caught.value).split("\n  ")
    return more or [first]


def problem(tree: Any, **kwargs: Any) -> str:
    (line,) = problems(tree, **kwargs)
    return line


class TestDefaults:
    def test_are_the_documented_ones(self) -> None:
        tree = job().to_dict()
        del tree["dataset_config"]["datasets"]
        assert tree == {
            "trainer_type": "fsdp2_trainer",
            "model_config": {
                "load_from_pretrained_path": "org/model",
                "load_from_config": None,
                "attn_implementation": "auto",
            },
            "dataset_config": {
                "dataset_type": "vision_iterable",
                "dataset_format": "auto",
                "eval_datasets": (),
                "remote_cache": {"folder": None, "size_gb": 20.0},
                "processor_config": {"processor_type": None, "processor_name": None, "extra_kwargs": {}},
                "shuffle": True,
                "packing": True,
                "packing_strategy": "first_fit",
                "packing_length": 32000,
                "packing_kwargs": {
                    "open_bins": 16, "media_units": None, "cost_budget": 1.1, "attention_length": 25000.0,
                    "media_cost": 0.1,
                },
                "filter_overlong": True,
                "overlong": "drop",
                "max_length": None,
                "fps": 1,
                "video_max_pixels": 602112,
                "video_max_frames": 768,
                "on_bad_row": "stop",
                "max_skip_fraction": 0.05,
                "media_timeout_s": 180.0,
                "num_logical_shards": 32,
                "mixture_stop": "all",
            },
            "trainer_args": {
                "output_dir": None,
                "run_name": None,
                "learning_rate": 1e-5,
                "weight_decay": 0.0,
                "adam_beta1": 0.9,
                "adam_beta2": 0.999,
                "adam_epsilon": 1e-8,
                "max_grad_norm": 1.0,
                "max_steps": 1000,
                "num_train_epochs": None,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "lr_scheduler_type": "cosine",
                "lr_scheduler_kwargs": {},
                "warmup_ratio": 0.03,
                "warmup_steps": 0,
                "bf16": True,
                "use_rmpad": True,
                "use_liger_kernel": True,
                "use_muon": False,
                "fsdp2": True,
                "fsdp_config": {
                    "transformer_layer_cls_to_wrap": None,
                    "reshard_after_forward": True,
                    "activation_checkpointing": True,
                    "hsdp_shard_size": 0,
                    "cpu_offload": False,
                },
                "deepspeed": None,
                "sp_ulysses_degree": 1,
                "ep_degree": 1,
                "router_z_loss_coef": 0.0,
                "freeze_modules": (),
                "dataloader_num_workers": 4,
                "save_steps": 500,
                "save_total_limit": 2,
                "eval_steps": None,
                "logging_steps": 1,
                "report_to": ("wandb",),
                "seed": 42,
                "log_rows": False,
                "ddp_timeout": 1800,
            },
            "plugins": (),
        }

    def test_null_resets(self) -> None:
        nothing = dict.fromkeys(job().to_dict()["trainer_args"])
        assert job(trainer_args=nothing) == job()
        assert job(trainer_args=None) == job()
        assert job(trainer_args={"fsdp_config": None}) == job()


class TestRoundTrip:
    def test_yaml_reloads_to_an_equal_job(self, write: Write) -> None:
        plugin = write("mine.py", "")
        first = Job.from_dict(
            base(
                model_config={
                    "load_from_pretrained_path": None,
                    "load_from_config": {
                        "model_type": "m",
                        "config": {"a": None, "b": "1e-5", "c": [1, {"d": 2.5}]},
                    },
                },
                dataset_config={
                    "eval_datasets": [{"path": "held.parquet", "weight": 2, "limit": 3}],
                    "overlong": "error",
                    "processor_config": {"extra_kwargs": {"x": "no"}},
                },
                trainer_args={
                    "num_train_epochs": 2,
                    "warmup_steps": 5,
                    "lr_scheduler_type": "wsd",
                    "lr_scheduler_kwargs": {"decay_ratio": 0.2},
                    "freeze_modules": ["visual"],
                    "report_to": "none",
                    "eval_steps": 3,
                    "fsdp_config": {"transformer_layer_cls_to_wrap": "Block"},
                },
                plugins=[str(plugin)],
            )
        )
        again = load_job([write("resolved/config.yaml", first.to_yaml())], [])
        assert again == first
        assert again.to_yaml() == first.to_yaml()

    def test_default_job(self, write: Write) -> None:
        assert load_job([write("resolved.yaml", job().to_yaml())], []) == job()

    def test_pickles(self) -> None:
        assert pickle.loads(pickle.dumps(job())) == job()

    def test_is_frozen(self) -> None:
        with pytest.raises(ValidationError):
            job().trainer.seed = 1

    def test_output_dir(self) -> None:
        assert job().with_output_dir("runs/x") == job(trainer_args={"output_dir": "runs/x"})


class TestLayers:
    def test_later_beats_earlier(self, write: Write) -> None:
        first = write(
            "a.yaml",
            base(trainer_args={"seed": 1, "save_steps": 1, "eval_steps": None, "freeze_modules": ["a"]}),
        )
        second = write(
            "b.yaml",
            {
                "trainer_args": {
                    "seed": 2,
                    "freeze_modules": ["b", "c"],
                    "fsdp_config": {"reshard_after_forward": False},
                }
            },
        )
        found = load_job(
            [first, second], ["trainer_args.seed=3", "trainer_args.seed=4", "trainer_args.adam_beta1="]
        )
        assert found.trainer.seed == 4
        assert found.trainer.save_steps == 1
        assert found.trainer.freeze_modules == ("b", "c")
        assert found.trainer.fsdp_config.reshard_after_forward is False
        assert found.trainer.fsdp_config.activation_checkpointing is True
        assert found.trainer.adam_beta1 == 0.9
        assert load_job([second, first], []).trainer.seed == 1

    def test_overrides(self, write: Write) -> None:
        file = write("a.yaml", base())
        found = load_job(
            [file],
            [
                "trainer_args.learning_rate=1e-6",
                "trainer_args.fsdp_config.reshard_after_forward=false",
                "dataset_config.datasets.0.path=other.jsonl",
                "dataset_config.processor_config.extra_kwargs.x.y=1",
                "trainer_args.freeze_modules=[visual]",
            ],
        )
        assert found.trainer.learning_rate == 1e-6
        assert found.trainer.fsdp_config.reshard_after_forward is False
        assert Path(found.dataset.datasets[0].path).name == "other.jsonl"
        assert found.dataset.processor_config.extra_kwargs == {"x": {"y": 1}}
        assert found.trainer.freeze_modules == ("visual",)

    def test_all_bad_overrides_at_once(self, write: Write) -> None:
        with pytest.raises(UserError, match="2 problems") as caught:
            load_job([write("a.yaml", base())], ["seed", "dataset_config.datasets.5.path=x"])
        assert "override 'seed'" in str(caught.value)
        assert "dataset_config.datasets.5=x: no such item (legal: 0 to 0)" in str(caught.value)

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            ({"max_steps": 5}, {"num_train_epochs": 2}, {"max_steps": None, "num_train_epochs": 2.0}),
            ({"num_train_epochs": 2}, {"max_steps": 5}, {"max_steps": 5, "num_train_epochs": None}),
            (
                {"max_steps": 5},
                {"num_train_epochs": 2, "max_steps": 7},
                {"max_steps": 7, "num_train_epochs": None},
            ),
            ({"max_steps": 5}, {"max_steps": None}, {"max_steps": 1000, "num_train_epochs": None}),
            ({"warmup_ratio": 0.1}, {"warmup_steps": 5}, {"warmup_steps": 5, "warmup_ratio": 0.0}),
            ({"warmup_steps": 5}, {"warmup_ratio": 0.1}, {"warmup_steps": 0, "warmup_ratio": 0.1}),
            ({}, {"warmup_steps": 0}, {"warmup_steps": 0, "warmup_ratio": 0.0}),
        ],
    )
    @pytest.mark.parametrize("by_override", [False, True])
    def test_alternatives(
        self,
        write: Write,
        first: dict[str, Any],
        second: dict[str, Any],
        expected: dict[str, Any],
        by_override: bool,
    ) -> None:
        files = [write("a.yaml", base(trainer_args=first))]
        overrides = [f"trainer_args.{key}={'' if value is None else value}" for key, value in second.items()]
        if by_override:
            found = load_job(files, overrides)
        else:
            found = load_job([*files, write("b.yaml", {"trainer_args": second})], [])
        assert {key: getattr(found.trainer, key) for key in expected} == expected

    def test_another_source_of_the_model(self, write: Write) -> None:
        over = write("b.yaml", {"model_config": {"load_from_config": {"model_type": "tiny", "x": None}}})
        found = load_job([write("a.yaml", base()), over], [])
        assert found.model.load_from_pretrained_path is None
        assert found.model.load_from_config == {"model_type": "tiny", "x": None}

    def test_max_steps_decides(self) -> None:
        found = job(trainer_args={"max_steps": 7, "num_train_epochs": 3})
        assert (found.trainer.max_steps, found.trainer.num_train_epochs) == (7, None)

    def test_epochs_alone(self) -> None:
        found = job(trainer_args={"num_train_epochs": 3})
        assert (found.trainer.max_steps, found.trainer.num_train_epochs) == (None, 3.0)

    @pytest.mark.parametrize("content", ["", "[1, 2]", "text"])
    def test_file_without_a_mapping(self, write: Write, content: str) -> None:
        with pytest.raises(UserError):
            load_job([write("a.yaml", content)], [])


class TestNumbersAndKeys:
    """Numbers that are strings, keys that are nothing."""

    def test_exponent_without_a_dot(self, write: Write) -> None:
        import torch

        from lmms_engine.optim.groups import build_adamw, build_groups

        file = write("a.yaml", dump_yaml(BASE) + "trainer_args: {learning_rate: 1e-5}\n")
        trainer = load_job([file], []).trainer
        assert trainer.learning_rate == 0.00001
        model = torch.nn.Linear(2, 2)
        optimizer = build_adamw(build_groups(model, trainer.weight_decay), trainer)
        assert {group["lr"] for group in optimizer.param_groups} == {0.00001}

    @pytest.mark.parametrize(
        ("section", "key", "value", "expected"),
        [
            (
                "trainer_args",
                "learning_rat",
                1e-5,
                "trainer_args.learning_rat=1e-05: unknown key; did you mean 'learning_rate'?",
            ),
            (
                "dataset_config",
                "packing_lenght",
                3,
                "dataset_config.packing_lenght=3: unknown key; did you mean 'packing_length'?",
            ),
            (
                "trainer_args",
                "epochs",
                "3",
                "trainer_args.epochs=\"3\": unknown key; did you mean 'num_train_epochs'?",
            ),
            (
                "trainer_args",
                "num_train_epochs",
                "3",
                'trainer_args.num_train_epochs="3": not legal (legal: a number > 0)',
            ),
            (
                "trainer_args",
                "max_steps",
                "3",
                'trainer_args.max_steps="3": not legal (legal: a whole number >= 1)',
            ),
            (
                "trainer_args",
                "max_steps",
                3.0,
                "trainer_args.max_steps=3.0: not legal (legal: a whole number >= 1)",
            ),
            (
                "trainer_args",
                "per_device_train_batch_size",
                -1,
                "trainer_args.per_device_train_batch_size=-1: not legal (legal: a whole number >= 1)",
            ),
            (
                "trainer_args",
                "learning_rate",
                "fast",
                "trainer_args.learning_rate=fast: not legal (legal: a number > 0)",
            ),
            (
                "trainer_args",
                "learning_rate",
                float("nan"),
                "trainer_args.learning_rate=NaN: not legal (legal: a number > 0)",
            ),
            ("trainer_args", "bf16", 1, "trainer_args.bf16=1: not legal (legal: true or false)"),
            ("trainer_args", "bf16", "yes", "trainer_args.bf16=yes: not legal (legal: true or false)"),
            ("trainer_args", "seed", True, "trainer_args.seed=true: not legal (legal: a whole number >= 0"),
            (
                "trainer_args",
                "adam_beta1",
                1,
                "trainer_args.adam_beta1=1: not legal (legal: a number >= 0 and < 1)",
            ),
            (
                "trainer_args",
                "lr_scheduler_type",
                "cosin",
                "trainer_args.lr_scheduler_type=cosin: not legal (legal: linear, cosine, constant, wsd); "
                "did you mean 'cosine'?",
            ),
            (
                "trainer_args",
                "report_to",
                ["wandbb"],
                "trainer_args.report_to.0=wandbb: not legal (legal: wandb, tensorboard); "
                "did you mean 'wandb'?",
            ),
            (
                "trainer_args",
                "fsdp_config",
                {"reshard": 1},
                "trainer_args.fsdp_config.reshard=1: unknown key; did you mean 'reshard_after_forward'?",
            ),
            (
                "trainer_args",
                "freeze_modules",
                "visual",
                "trainer_args.freeze_modules=visual: not legal (legal: a list of text",
            ),
            (
                "trainer_args",
                "packing",
                True,
                "trainer_args.packing=true: unknown key here; it belongs at dataset_config.packing",
            ),
            (
                "model_config",
                "learning_rate",
                1,
                "model_config.learning_rate=1: unknown key here; it belongs at trainer_args.learning_rate",
            ),
            (
                "model_config",
                "weight",
                1,
                "model_config.weight=1: unknown key here; it belongs at "
                "dataset_config.datasets.<number>.weight",
            ),
            (
                "model_config",
                "fp16",
                False,
                "model_config.fp16=false: unknown key here; it belongs at trainer_args.fp16",
            ),
            ("dataset_config", "fps", 0, "dataset_config.fps=0: not legal (legal: a number > 0)"),
            (
                "dataset_config",
                "datasets",
                "x.jsonl",
                "dataset_config.datasets=x.jsonl: not legal (legal: a list of mappings)",
            ),
            (
                "dataset_config",
                "datasets",
                [{"pth": "x"}],
                "dataset_config.datasets.0.pth=x: unknown key; did you mean 'path'?",
            ),
            (
                "dataset_config",
                "datasets",
                [{"path": "x", "weight": 0}],
                "dataset_config.datasets.0.weight=0: not legal (legal: a number > 0)",
            ),
        ],
    )
    def test_says_what_is_wrong(self, section: str, key: str, value: Any, expected: str) -> None:
        assert any(line.startswith(expected) for line in problems(base(**{section: {key: value}})))

    @pytest.mark.parametrize("value", [5, "yess", [5], [""], {"a": 1}, {"a": "partly"}])
    def test_a_key_of_several_kinds_names_them_all_once(self, value: Any) -> None:
        line = problem(base(trainer_args={"fsdp_config": {"activation_checkpointing": value}}))
        assert line == (
            f"trainer_args.fsdp_config.activation_checkpointing={show(value)}: not legal "
            "(legal: true or false, or encoders, selective, or a list of text that is not empty, "
            "or a mapping)"
        )

    @pytest.mark.parametrize(
        "value",
        [True, False, "encoders", "selective", ["visual.*"], {"visual": "full", "a.*": "selective"}],
    )
    def test_a_key_of_several_kinds_takes_each(self, value: Any) -> None:
        found = job(trainer_args={"fsdp_config": {"activation_checkpointing": value}})
        given = found.trainer.fsdp_config.activation_checkpointing
        assert given == (tuple(value) if isinstance(value, list) else value)
        assert Job.from_dict(yaml.safe_load(found.to_yaml())) == found

    def test_unknown_key_names_the_legal_ones(self) -> None:
        line = problem(base(trainer_args={"fsdp_config": {"zzz": 1}}))
        assert (
            "(legal: transformer_layer_cls_to_wrap, reshard_after_forward, activation_checkpointing, " in line
        )

    @pytest.mark.parametrize(
        ("sections", "expected"),
        [
            ({"trainer_args": {1: 2}}, "trainer_args.1: not legal as a key"),
            ({"trainer_args": {"lr_scheduler_kwargs": {1: 0.1}}}, "trainer_args.lr_scheduler_kwargs.1: "),
            ({"trainer_args": [1]}, "trainer_args=[1]: not legal (legal: a mapping with the keys output_dir"),
            ({"dataset_config": {"datasets": [None]}}, "dataset_config.datasets.0=null: not legal"),
            ({"dataset_config": {"datasets": [{"path": ""}]}}, 'dataset_config.datasets.0.path="": not'),
            ({"dataset_config": {"datasets": None, "dataset_path": 3}}, "dataset_config.dataset_path=3: not"),
            ({"plugins": [3]}, "plugins.0=3: not legal (legal: text that is not empty)"),
            ({"trainer_args": {"gradient_checkpointing": True, "fsdp_config": 3}}, "trainer_args.fsdp"),
        ],
    )
    def test_odd_shapes(self, sections: dict[str, Any], expected: str) -> None:
        assert problem(base(**sections)).startswith(expected)

    def test_top_level(self) -> None:
        assert problem({**BASE, "seed": 1}) == "seed=1: unknown key here; it belongs at trainer_args.seed"
        assert problem({**BASE, "trainer_arg": {}}).startswith(
            "trainer_arg={}: unknown key; did you mean 'trainer_args'?"
        )
        assert problem({**BASE, "trainer_args": 3}).startswith(
            "trainer_args=3: not legal (legal: a mapping with the keys output_dir"
        )

    def test_everything_at_once(self) -> None:
        found = problems(
            {
                "model_config": {"load_from_pretrained_path": "a", "load_from_config": {"model_type": "b"}},
                "dataset_config": {
                    "datasets": [{"path": "$NOWHERE/x.jsonl"}],
                    "packing_lenght": 3,
                    "packing_strategy": "worst_fit",
                    "max_length": 64000,
                },
                "trainer_args": {"max_steps": "3", "ep_degree": 0, "fp16": True, "eval_steps": 5},
                "extra": 1,
            }
        )
        keys = sorted(line.split("=")[0].split(":")[0] for line in found)
        assert keys == [
            "dataset_config.datasets.0.path",
            "dataset_config.max_length",
            "dataset_config.packing_lenght",
            "dataset_config.packing_strategy",
            "extra",
            "model_config",
            "trainer_args.ep_degree",
            "trainer_args.eval_steps",
            "trainer_args.fp16",
            "trainer_args.max_steps",
        ]

    def test_no_second_error_about_a_bad_value(self) -> None:
        assert len(problems(base(trainer_args={"eval_steps": "5"}))) == 1
        assert len(problems(base(dataset_config={"datasets": 3}))) == 1

    def test_epochs_are_checked_beside_max_steps(self) -> None:
        assert problem(base(trainer_args={"max_steps": 5, "num_train_epochs": "3"})).startswith(
            "trainer_args.num_train_epochs="
        )

    @pytest.mark.parametrize(
        ("section", "key", "value", "legal"),
        [("trainer_args", "use_muon", True, "false")],
    )
    def test_features_to_come(self, section: str, key: str, value: Any, legal: str) -> None:
        line = problem(base(**{section: {key: value}}))
        assert line.startswith(f"{section}.{key}=")
        assert line.endswith(f": not supported yet (legal: {legal})")

    def test_packing_settings_that_would_be_ignored(self) -> None:
        def packed(**keys: Any) -> list[str]:
            return problems(base(dataset_config=keys))

        legal = {"packing_strategy": "balanced", "packing_kwargs": {"cost_budget": 1.3, "media_units": 9}}
        assert job(dataset_config=legal).dataset.packing_kwargs.cost_budget == 1.3
        assert packed(packing_kwargs={"cost_budget": 1.3}) == [
            "dataset_config.packing_kwargs.cost_budget=1.3: only packing_strategy=balanced uses it"
        ]
        assert packed(packing=False, packing_kwargs={"media_units": 9}) == [
            "dataset_config.packing_kwargs.media_units=9: nothing is packed: packing is false"
        ]
        assert packed(packing=False, packing_strategy="balanced") == [
            "dataset_config.packing_strategy=balanced: nothing is packed: packing is false"
        ]

class TestCombinations:
    @pytest.mark.parametrize(
        ("sections", "expected"),
        [
            ({"model_config": {"load_from_pretrained_path": None}}, "model_config: none is given"),
            ({"model_config": {"load_from_config": {"model_type": "m"}}}, "model_config: both are given"),
            ({"dataset_config": {"datasets": []}}, "dataset_config.datasets: no data"),
            ({"dataset_config": {"max_length": 32001}}, "dataset_config.max_length=32001: longer than"),
            (
                {"dataset_config": {"filter_overlong": True, "overlong": "error"}},
                "dataset_config.filter_overlong=true: contradicts",
            ),
            ({"trainer_args": {"eval_steps": 5}}, "trainer_args.eval_steps=5: there is nothing to evaluate"),
            (
                {"trainer_args": {"warmup_steps": 5, "warmup_ratio": 0.1}},
                "trainer_args.warmup_steps=5: contradicts",
            ),
            (
                {"trainer_args": {"fsdp2": False}},
                "trainer_args.fsdp2=false: contradicts trainer_type=fsdp2_trainer",
            ),
            ({"plugins": ["./gone.py"]}, "plugins.0="),
        ],
    )
    def test_refused(self, sections: dict[str, Any], expected: str) -> None:
        assert problem(base(**sections)).startswith(expected)

    @pytest.mark.parametrize(
        ("kind", "kwargs", "expected"),
        [
            ("cosine", {"decay_ratio": 0.1}, "decay_ratio=0.1: cosine has no such key (legal: min_lr_ratio)"),
            (
                "cosine",
                {"min_lr_rate": 0.1},
                "min_lr_rate=0.1: cosine has no such key (legal: min_lr_ratio); did you mean 'min_lr_ratio'?",
            ),
            ("constant", {"min_lr_ratio": 0.1}, "min_lr_ratio=0.1: constant has no such key (legal: none)"),
            ("linear", {"min_lr_ratio": 2}, "min_lr_ratio=2.0: not legal"),
            ("wsd", {"decay_ratio": 0}, "decay_ratio=0: not legal"),
            ("wsd", {"decay_ratio": 0.99}, "decay_ratio=0.99: together with trainer_args.warmup_ratio=0.03"),
            ("wsd", {"decay_ratio": "x"}, "decay_ratio=x: not legal"),
        ],
    )
    def test_schedules(self, kind: str, kwargs: dict[str, Any], expected: str) -> None:
        line = problem(base(trainer_args={"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs}))
        assert line.startswith(f"trainer_args.lr_scheduler_kwargs.{expected}")

    def test_allowed(self) -> None:
        found = job(
            dataset_config={"max_length": 64000, "packing": False, "eval_datasets": [{"path": "x"}]},
            trainer_args={
                "eval_steps": 5,
                "lr_scheduler_type": "wsd",
                "lr_scheduler_kwargs": {"decay_ratio": 0.2, "min_lr_ratio": 0.1},
            },
        )
        assert found.dataset.max_length == 64000

    @pytest.mark.parametrize(
        ("given", "overlong", "filtered"),
        [
            ({}, "drop", True),
            ({"filter_overlong": False}, "error", False),
            ({"filter_overlong": True}, "drop", True),
            ({"overlong": "error"}, "error", False),
            ({"overlong": "drop", "filter_overlong": True}, "drop", True),
        ],
    )
    def test_overlong(self, given: dict[str, Any], overlong: str, filtered: bool) -> None:
        data = job(dataset_config=given).dataset
        assert (data.overlong, data.filter_overlong) == (overlong, filtered)

    def test_registered_dataset_needs_no_files(self) -> None:
        assert job(dataset_config={"datasets": [], "dataset_type": "mine"}).dataset.dataset_type == "mine"

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("none", ()),
            (["none"], ()),
            ([], ()),
            ("wandb", ("wandb",)),
            (["tensorboard", "wandb"], ("tensorboard", "wandb")),
        ],
    )
    def test_report_to(self, given: Any, expected: tuple[str, ...]) -> None:
        assert job(trainer_args={"report_to": given}).trainer.report_to == expected


class TestPaths:
    def test_datasets_are_absolute(self, tmp_path: Path) -> None:
        (tmp_path / "arrow").mkdir()
        entries = [
            {"path": "data/a.jsonl"},
            {"path": "data/b.jsonl", "data_folder": "images"},
            {"path": "arrow", "data_folder": "../images"},
            {"path": "data/c.jsonl", "data_folder": "/elsewhere"},
            {"path": "s3://bucket/d.parquet", "data_folder": "x"},
            {"path": "org/name@v1:small:test"},
            {"path": "name", "data_type": "hf_dataset"},
            {"path": "arrow/name"},
        ]
        found = job(dataset_config={"datasets": entries}).dataset.datasets
        assert [(entry.path, entry.data_folder) for entry in found] == [
            (f"{tmp_path}/data/a.jsonl", f"{tmp_path}/data"),
            (f"{tmp_path}/data/b.jsonl", f"{tmp_path}/data/images"),
            (f"{tmp_path}/arrow", f"{tmp_path}/images"),
            (f"{tmp_path}/data/c.jsonl", "/elsewhere"),
            ("s3://bucket/d.parquet", "x"),
            ("org/name@v1:small:test", ""),
            ("name", ""),
            (f"{tmp_path}/arrow/name", f"{tmp_path}/arrow"),   # in a folder that is here
        ]

    def test_environment(self, tmp_path: Path) -> None:
        env = {"HOME": "/home/me", "DATA": "/data", "NAME": "model"}
        found = Job.from_dict(
            base(
                model_config={"load_from_pretrained_path": "~/${NAME}"},
                dataset_config={
                    "datasets": [{"path": "$DATA/a.jsonl", "data_folder": "${DATA}/images"}],
                    "processor_config": {"processor_name": "$DATA/p"},
                },
                trainer_args={"output_dir": "$DATA/runs", "run_name": "$NAME"},
            ),
            env=env,
        )
        assert found.model.load_from_pretrained_path == "/home/me/model"
        assert found.dataset.datasets[0].path == "/data/a.jsonl"
        assert found.dataset.datasets[0].data_folder == "/data/images"
        assert found.dataset.processor_config.processor_name == "/data/p"
        assert found.trainer.output_dir == "/data/runs"
        assert found.trainer.run_name == "$NAME", "not a path"

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOMEWHERE", "/there")
        assert job(trainer_args={"output_dir": "$SOMEWHERE/runs"}).trainer.output_dir == "/there/runs"

    def test_unset_variables_are_named_with_their_key(self) -> None:
        tree = base(trainer_args={"output_dir": "$A/x"}, model_config={"load_from_pretrained_path": "${B}"})
        assert sorted(problems(tree)) == [
            "model_config.load_from_pretrained_path=${B}: the environment variable B is not set",
            "trainer_args.output_dir=$A/x: the environment variable A is not set",
        ]

    def test_plugins_are_relative_to_their_file(self, write: Write, tmp_path: Path) -> None:
        plugin = write("recipe/mine.py", "")
        file = write("recipe/config.yaml", {**BASE, "plugins": ["./mine.py", "some.module"]})
        assert load_job([file], []).plugins == (str(plugin), "some.module")
        write("here.py", "")
        assert load_job([file], ["plugins=[here.py]"]).plugins == (str(tmp_path / "here.py"),)


class TestDatasetFile:
    ENTRIES = ({"path": "a.jsonl", "weight": 2.0}, {"path": "b.parquet", "data_type": "parquet"})

    @pytest.mark.parametrize("form", [None, "auto", "yaml"])
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_is_merged(self, write: Write, tmp_path: Path, form: str | None, wrapped: bool) -> None:
        entries = list(self.ENTRIES)
        write("sets/data.yaml", {"datasets": entries} if wrapped else entries)
        tree = base(
            dataset_config={"datasets": None, "dataset_path": "sets/data.yaml", "dataset_format": form}
        )
        inline = job(dataset_config={"datasets": entries})
        assert Job.from_dict(tree) == inline
        assert inline.dataset.datasets[0].path == str(tmp_path / "a.jsonl"), (
            "relative to the working directory"
        )

    def test_for_evaluation(self, write: Write) -> None:
        write("held.yaml", [{"path": "held.jsonl"}])
        found = job(dataset_config={"eval_dataset_path": "held.yaml"}, trainer_args={"eval_steps": 5})
        assert Path(found.dataset.eval_datasets[0].path).name == "held.jsonl"

    def test_of_another_format_is_the_data(self, tmp_path: Path) -> None:
        tree = base(dataset_config={"datasets": None, "dataset_path": "x/rows", "dataset_format": "parquet"})
        (entry,) = Job.from_dict(tree).dataset.datasets
        assert (entry.path, entry.data_type) == (str(tmp_path / "x/rows"), "parquet")
        tree["dataset_config"] |= {"dataset_path": "rows.jsonl", "dataset_format": None}
        assert Job.from_dict(tree).dataset.datasets[0].path == str(tmp_path / "rows.jsonl")

    def test_errors_name_the_file(self, write: Write, tmp_path: Path) -> None:
        write("data.yaml", [{"path": "a.jsonl"}, {"pth": "b.jsonl", "path": "$NOT_SET/b", "weight": "2"}])
        found = problems(base(dataset_config={"datasets": None, "dataset_path": "data.yaml"}))
        assert any(
            line.startswith(f"{tmp_path}/data.yaml: datasets.1.pth=b.jsonl: unknown key") for line in found
        )
        assert any(
            line.startswith(f'{tmp_path}/data.yaml: datasets.1.weight="2": not legal') for line in found
        )
        assert any("NOT_SET is not set" in line for line in found)
        assert len(found) == 3

    @pytest.mark.parametrize("content", ["{a: 1}", "text", "[", ""])
    def test_bad_content(self, write: Write, content: str) -> None:
        write("data.yaml", content)
        assert "data.yaml" in problem(base(dataset_config={"datasets": None, "dataset_path": "data.yaml"}))

    def test_missing(self) -> None:
        line = problem(base(dataset_config={"datasets": None, "dataset_path": "gone.yaml"}))
        assert line.startswith("dataset_config.dataset_path: ")
        assert "gone.yaml: cannot be read" in line

    def test_both_lists(self, write: Write) -> None:
        write("data.yaml", list(self.ENTRIES))
        line = problem(base(dataset_config={"dataset_path": "data.yaml"}))
        assert line.endswith("give either dataset_path or datasets")

    def test_a_later_list_replaces_the_file(self, write: Write) -> None:
        first = write("a.yaml", base(dataset_config={"datasets": None, "dataset_path": "gone.yaml"}))
        second = write("b.yaml", {"dataset_config": {"datasets": [{"path": "b.jsonl"}]}})
        assert Path(load_job([first, second], []).dataset.datasets[0].path).name == "b.jsonl"


def test_importing_it_is_cheap() -> None:
    code = "import sys, lmms_engine.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_folders_of_model_and_processor_are_absolute_and_hub_ids_stay(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    (tmp_path / "marks").mkdir()
    monkeypatch.chdir(tmp_path)
    tree = {
        "model_config": {"load_from_pretrained_path": "weights"},
        "dataset_config": {
            "datasets": [{"path": "rows.jsonl"}],
            "processor_config": {"processor_name": "marks"},
        },
    }
    job = Job.from_dict(tree)
    assert job.model.load_from_pretrained_path == str(tmp_path / "weights")
    assert job.dataset.processor_config.processor_name == str(tmp_path / "marks")
    tree["model_config"]["load_from_pretrained_path"] = "Qwen/Qwen3-VL-4B-Instruct"
    assert Job.from_dict(tree).model.load_from_pretrained_path == "Qwen/Qwen3-VL-4B-Instruct"
