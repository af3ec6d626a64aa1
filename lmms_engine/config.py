"""Job: everything a run is told. Read from YAML files and `section.key=value` overrides by `load_job`.

Strict: unknown keys, wrong types and impossible combinations are collected and raised together, before
anything heavy is imported. A field exists only if something uses it. The names in YAML are `model_config`,
`dataset_config` and `trainer_args`; in code `job.model`, `job.dataset`, `job.trainer`. `null` resets a key to
its default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lmms_engine import compat
from lmms_engine.config_check import Schema, check, without_nulls
from lmms_engine.config_load import (
    dump_yaml,
    expand,
    is_elsewhere,
    layer_for,
    merge,
    parse_override,
    read_yaml,
    show,
)
from lmms_engine.config_rules import contradictions
from lmms_engine.errors import UserError

Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Format = Literal["auto", "json", "jsonl", "csv", "arrow", "parquet", "hf_dataset"]


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _listed(value)


def _trackers(value: Any) -> Any:
    names = _one_or_more(value)
    return () if names in (("none",), ("",)) else names


Names = Annotated[tuple[Name, ...], BeforeValidator(_listed)]
OneOrMoreNames = Annotated[tuple[Name, ...], BeforeValidator(_one_or_more)]
Recomputed = Annotated[
    bool | Literal["encoders", "selective"] | tuple[Name, ...] | dict[Name, Literal["full", "selective"]],
    BeforeValidator(_listed),
]
Trackers = Annotated[tuple[Literal["wandb", "tensorboard"], ...], BeforeValidator(_trackers)]


class Section(BaseModel):
    """A mapping of the configuration: frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelSection(Section):
    """Which model. Exactly one of the two sources is given."""

    load_from_pretrained_path: Name | None = None   # hub id or folder
    load_from_config: dict[str, Any] | None = None  # nested or flat; models/hf.py checks it
    attn_implementation: Literal["auto", "flash_attn", "flash_attn_4", "varlen", "flex", "sdpa"] = "auto"


class DatasetEntry(Section):
    """One source of rows."""

    path: Name                                # absolute after loading, unless it is an address or a hub id
    data_folder: str = ""                     # what media paths are relative to; absolute after loading
    data_type: Format = "auto"
    weight: PositiveFloat = 1.0               # how often it is drawn, relative to the other entries
    limit: Positive | None = None             # the first rows only


class ProcessorConfig(Section):
    """Which processor turns rows into samples; null: the model family's own, from the model's folder."""

    processor_type: Name | None = None
    processor_name: Name | None = None
    extra_kwargs: dict[str, Any] = {}


class RemoteCache(Section):
    """Blocks of data that lie elsewhere, on this machine's disk; those used last are kept."""

    folder: Name | None = None                # null: ~/.cache/lmms_engine/remote
    size_gb: Annotated[float, Field(ge=0.1)] = 20.0


class PackingKwargs(Section):
    """How packs are filled; the last three with `balanced` only, see docs/packing.md."""

    open_bins: Positive = 16                  # packs filled at the same time, by all shards of a rank
    media_units: Positive | None = None       # most patches (pictures, clips) or chunks (sound) of a pack
    cost_budget: PositiveFloat = 1.1          # a pack's cost, times `packing_length` tokens of short samples
    attention_length: PositiveFloat = 25000.0  # tokens at which attention costs as much as matrix products
    media_cost: Annotated[float, Field(ge=0)] = 0.1   # of a media unit, in tokens


Entries = Annotated[tuple[DatasetEntry, ...], BeforeValidator(_listed)]


class DatasetSection(Section):
    """Which rows, in which order, packed how."""

    dataset_type: Name = "vision_iterable"
    dataset_format: Literal["auto", "yaml", "json", "jsonl", "csv", "arrow", "parquet", "hf_dataset"] = "auto"
    datasets: Entries = ()
    eval_datasets: Entries = ()
    remote_cache: RemoteCache = RemoteCache()
    processor_config: ProcessorConfig = ProcessorConfig()
    shuffle: bool = True
    packing: bool = True
    packing_strategy: Literal["first_fit", "best_fit", "balanced"] = "first_fit"
    packing_length: Positive = 32000          # tokens of a pack
    packing_kwargs: PackingKwargs = PackingKwargs()
    filter_overlong: bool = True              # the reference's name for `overlong`: true drop, false error
    overlong: Literal["drop", "error", "truncate"] = "drop"
    max_length: Positive | None = None        # tokens of a row; null: what a pack holds
    fps: PositiveFloat = 1.0
    video_max_pixels: Positive = 602112
    video_max_frames: Positive = 768
    media_timeout_s: PositiveFloat = 180.0    # for one picture, clip or sound; beyond it the row is bad
    on_bad_row: Literal["stop", "skip"] = "stop"
    max_skip_fraction: Fraction = 0.05        # with skip: more bad rows than this stop the run
    num_logical_shards: Annotated[int, Field(ge=1, le=65536)] = 32   # decides the order of the data
    mixture_stop: Literal["first", "all"] = "all"   # an epoch ends with the first, or with the last source

    @model_validator(mode="before")
    @classmethod
    def _one_policy(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if "overlong" in given:
            return {"filter_overlong": given["overlong"] != "error"} | given
        if given.get("filter_overlong") is False:
            return given | {"overlong": "error"}
        return given


class FsdpConfig(Section):
    """How parameters are sharded and what is recomputed."""

    transformer_layer_cls_to_wrap: OneOrMoreNames | None = None   # if given, exactly the layout's classes
    reshard_after_forward: bool = True
    activation_checkpointing: Recomputed = True   # parallel/activation_checkpoint.py
    hsdp_shard_size: Annotated[int, Field(ge=0)] = 0
    cpu_offload: bool = False   # parameters, gradients and optimiser rest in the host's memory


class TrainerSection(Section):
    """How the model is trained. Exactly one of max_steps and num_train_epochs is not None."""

    output_dir: Name | None = None
    run_name: Name | None = None
    learning_rate: PositiveFloat = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    max_steps: Positive | None = 1000
    num_train_epochs: PositiveFloat | None = None
    per_device_train_batch_size: Positive = 1     # packs, joined in one flat sequence
    gradient_accumulation_steps: Positive = 1
    lr_scheduler_type: Literal["linear", "cosine", "constant", "wsd"] = "cosine"
    lr_scheduler_kwargs: dict[str, float] = {}
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03   # 0 where warmup_steps is in use
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    bf16: bool = True
    use_rmpad: bool = True
    use_liger_kernel: bool = True
    use_muon: bool = False
    fsdp2: bool = True
    fsdp_config: FsdpConfig = FsdpConfig()
    deepspeed: dict[str, Any] | None = None   # with deepspeed_trainer; a path is read where it is given
    sp_ulysses_degree: Positive = 1
    ep_degree: Positive = 1
    router_z_loss_coef: Annotated[float, Field(ge=0)] = 0.0   # of models with experts
    freeze_modules: Names = ()
    dataloader_num_workers: Annotated[int, Field(ge=0)] = 4
    save_steps: Positive = 500
    save_total_limit: Positive = 2
    eval_steps: Positive | None = None
    logging_steps: Positive = 1
    report_to: Trackers = ("wandb",)
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    log_rows: bool = False
    ddp_timeout: Positive = 1800   # seconds that a rank waits for the others in a collective

    @model_validator(mode="before")
    @classmethod
    def _alternatives(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = dict(given)
        epochs = given.get("num_train_epochs")
        if "max_steps" in given and isinstance(epochs, (int, float)) and epochs > 0:
            del given["num_train_epochs"]   # max_steps decides, as in transformers
        elif "max_steps" not in given and epochs is not None:
            given["max_steps"] = None
        if "warmup_steps" in given:
            given.setdefault("warmup_ratio", 0.0)
        return given


class Job(Section):
    """A whole run. `Job.from_dict` and `load_job` are the ways to make one."""

    trainer_type: Literal["fsdp2_trainer", "deepspeed_trainer"] = "fsdp2_trainer"
    model: ModelSection = Field(default=ModelSection(), alias="model_config")
    dataset: DatasetSection = Field(default=DatasetSection(), alias="dataset_config")
    trainer: TrainerSection = Field(default=TrainerSection(), alias="trainer_args")
    plugins: Names = ()

    @model_validator(mode="before")
    @classmethod
    def _one_backend(cls, given: Any) -> Any:
        trainer = given.get("trainer_args", {}) if isinstance(given, dict) else None
        if not isinstance(trainer, dict) or given.get("trainer_type") != "deepspeed_trainer":
            return given
        return given | {"trainer_args": {"fsdp2": False} | trainer}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, env: Mapping[str, str] = os.environ) -> Job:
        """The job that a mapping in the form of a YAML file describes; raises UserError with all problems."""
        return _build([(dict(data), Path.cwd())], [], env)

    def to_dict(self) -> dict[str, Any]:
        """Plain data under the YAML names, every key given; `Job.from_dict` makes an equal job of it."""
        return self.model_dump(by_alias=True)

    def to_yaml(self) -> str:
        """The resolved configuration; loading it gives an equal job."""
        return dump_yaml(self.to_dict())

    def with_output_dir(self, output_dir: str) -> Self:
        """The same job, writing into another run folder."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"output_dir": output_dir})})


# Keys whose feature is still to come: the values that are legal until then.
LEGAL_NOW: dict[str, tuple[Any, ...]] = {
    "trainer_args.use_muon": (False,),
}

# Pairs of keys that say one thing in two ways. Given in a later layer, one drops the other of earlier layers.
ALTERNATIVES = (
    ("model_config", "load_from_pretrained_path", "load_from_config"),
    ("dataset_config", "datasets", "dataset_path"),
    ("dataset_config", "eval_datasets", "eval_dataset_path"),
    ("dataset_config", "filter_overlong", "overlong"),
    ("trainer_args", "max_steps", "num_train_epochs"),
    ("trainer_args", "warmup_ratio", "warmup_steps"),
)

# Keys that name a file or folder: ~ and environment variables are expanded.
PATHS = (
    "model_config.load_from_pretrained_path",
    "dataset_config.datasets.*.path",
    "dataset_config.datasets.*.data_folder",
    "dataset_config.eval_datasets.*.path",
    "dataset_config.eval_datasets.*.data_folder",
    "dataset_config.dataset_path",
    "dataset_config.eval_dataset_path",
    "dataset_config.processor_config.processor_name",
    "dataset_config.remote_cache.folder",
    "trainer_args.output_dir",
    "plugins.*",
)

FOLDERS = ("model_config.load_from_pretrained_path", "dataset_config.processor_config.processor_name")
DATASET_FILES = (("datasets", "dataset_path"), ("eval_datasets", "eval_dataset_path"))
SCHEMA = Schema(
    Job,
    LEGAL_NOW,
    input_only=[f"dataset_config.{key}" for _, key in DATASET_FILES],
    known=[f"{section}.{key}".lstrip(".") for section, table in compat.TABLE.items() for key in table],
)


def load_job(configs: list[Path], overrides: list[str], *, env: Mapping[str, str] = os.environ) -> Job:
    """The job of some YAML files and `section.key=value` overrides; later beats earlier.

    Mappings merge, lists replace, null resets to the default. Raises one UserError that lists every problem.
    """
    layers = [(read_yaml(Path(path)), Path(path).absolute().parent) for path in configs]
    return _build(layers, overrides, env)


def _build(layers: list[tuple[Any, Path]], overrides: list[str], env: Mapping[str, str]) -> Job:
    problems: list[str] = []
    tree: dict[str, Any] = {}
    for content, folder in layers:
        tree = _stack(tree, content, folder, env, problems)
    for text in overrides:
        try:
            parts, value = parse_override(text)
            layer = layer_for(tree, parts, value)
        except UserError as error:
            problems.append(str(error))
            continue
        tree = _stack(tree, layer, Path.cwd(), env, problems, keep=_given_on_command_line(overrides))
    tree = _expand_paths(tree, env, problems)
    origins = dict(_read_dataset_file(tree, env, name, key, problems) for name, key in DATASET_FILES)
    _settle_entries(tree)
    _settle_folders(tree)
    tree = without_nulls(tree, Job)
    job, bad = check(SCHEMA, Job, tree, origins, problems)
    if job is not None:
        problems += [text for keys, text in contradictions(job) if not bad & set(keys)]
    if job is None or problems:
        raise UserError(_report(problems))
    return job


def _report(problems: list[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return "\n  ".join([f"{len(unique)} problems in the configuration:", *unique])


def _stack(
    tree: dict[str, Any],
    content: Any,
    folder: Path,
    env: Mapping[str, str],
    problems: list[str],
    keep: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """`tree` with one more layer on top, in our own keys. keep: keys that the same layer gives elsewhere."""
    content = compat.unwrap(content)
    if content is None:
        return tree
    if not isinstance(content, dict):
        legal = ", ".join(SCHEMA.keys(""))
        problems.append(f"{show(content)}: not a configuration (legal: a mapping with the keys {legal})")
        return tree
    layer = compat.translate(content, problems)
    if isinstance(layer.get("plugins"), list):
        layer["plugins"] = [_plugin(name, folder, env) for name in layer["plugins"]]
    tree = _drop_deepspeed(tree) if _read_deepspeed_file(layer, env, problems) else dict(tree)
    for section, *pair in ALTERNATIVES:
        new, old = layer.get(section), tree.get(section)
        if not (isinstance(new, dict) and isinstance(old, dict)):
            continue
        for one, other in (pair, pair[::-1]):
            if new.get(one) is not None and other not in new and f"{section}.{other}" not in keep:
                old = {key: value for key, value in old.items() if key != other}
        tree[section] = old
    return merge(tree, layer)


def _read_deepspeed_file(layer: dict[str, Any], env: Mapping[str, str], problems: list[str]) -> bool:
    """Puts what the file `trainer_args.deepspeed` says in its place; True if the layer names a file."""
    section = layer.get("trainer_args")
    name = section.get("deepspeed") if isinstance(section, dict) else None
    if not isinstance(name, str):
        return False
    called = f"trainer_args.deepspeed={show(name)}"
    layer["trainer_args"] = section = {**section, "deepspeed": None}
    try:
        content = read_yaml(Path(expand(name, env)).absolute())   # JSON is YAML
        if isinstance(content, dict):
            section["deepspeed"] = content
        else:
            problems.append(f"{called}: holds no mapping (legal: a ZeRO JSON file or mapping)")
    except KeyError as variable:
        problems.append(f"{called}: the environment variable {variable.args[0]} is not set")
    except UserError as error:
        problems.append(f"{called}: {error}")
    return True


def _drop_deepspeed(tree: dict[str, Any]) -> dict[str, Any]:
    """A file replaces what earlier layers say; only mappings merge."""
    section = tree.get("trainer_args")
    if not isinstance(section, dict):
        return dict(tree)
    return tree | {"trainer_args": {key: value for key, value in section.items() if key != "deepspeed"}}


def _given_on_command_line(overrides: list[str]) -> frozenset[str]:
    return frozenset(text.partition("=")[0] for text in overrides)


def _plugin(name: Any, folder: Path, env: Mapping[str, str]) -> Any:
    """A plugin file as an absolute path, relative to the file that names it; module names stay."""
    if not isinstance(name, str) or not (name.endswith(".py") or "/" in name):
        return name
    try:
        return os.path.normpath(folder / expand(name, env))
    except KeyError:
        return name   # reported with all other paths


def _expand_paths(tree: Any, env: Mapping[str, str], problems: list[str], parts: tuple[str, ...] = ()) -> Any:
    """`tree` with ~ and variables replaced in the values of PATHS."""
    if isinstance(tree, dict):
        return {key: _expand_paths(value, env, problems, (*parts, str(key))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_expand_paths(value, env, problems, (*parts, str(i))) for i, value in enumerate(tree)]
    path = ".".join(parts)
    pattern = ".".join("*" if part.isdigit() else part for part in parts)
    if not isinstance(tree, str) or pattern not in PATHS:
        return tree
    try:
        return expand(tree, env)
    except KeyError as name:
        problems.append(f"{path}={show(tree)}: the environment variable {name.args[0]} is not set")
        return tree


def _read_dataset_file(
    tree: dict[str, Any], env: Mapping[str, str], name: str, key: str, problems: list[str]
) -> tuple[str, str]:
    """Puts what `dataset_path` names in place of the list `datasets`.

    Returns the list's dotted path and how it is called in messages.
    """
    path = f"dataset_config.{name}"
    section = tree.get("dataset_config")
    file = section.pop(key, None) if isinstance(section, dict) else None
    if file is None:
        return path, path
    if not isinstance(file, str) or not file:
        problems.append(f"dataset_config.{key}={show(file)}: not legal (legal: the path of a file)")
        section[name] = section.get(name) or [{"path": "?"}]   # so that "no data" is not reported too
        return path, path
    if section.get(name):
        problems.append(f"dataset_config.{key}={show(file)}: give either {key} or {name}")
        return path, path
    form = section.get("dataset_format") or "auto"
    if form != "yaml" and not (form == "auto" and file.endswith((".yaml", ".yml"))):
        section[name] = [{"path": file}]
        return path, path
    if form == "yaml":
        section.pop("dataset_format")   # it said how to read this file; the entries say how they are stored
    called = f"{Path(file).absolute()}: {name}"
    try:
        content = read_yaml(Path(file).absolute())
    except UserError as error:
        problems.append(f"dataset_config.{key}: {error}")
        section[name] = [{"path": file}]   # so that "no data" is not reported too
        return path, path
    entries = content["datasets"] if isinstance(content, dict) and set(content) == {"datasets"} else content
    if not isinstance(entries, list):
        legal = ", ".join(SCHEMA.keys(f"{path}.*"))
        problems.append(f"{called}: not a list of datasets (legal: a list of mappings with the keys {legal})")
        entries = [{"path": file}]
    entries = compat.translate(entries, problems, path, called)
    section[name] = _expand_paths(entries, env, problems, tuple(path.split(".")))
    return path, called


def _settle_entries(tree: dict[str, Any]) -> None:
    """Makes the paths of datasets absolute and gives entries without a format the section's.

    Paths are relative to the working directory, `data_folder` to the folder of its dataset.
    """
    section = tree.get("dataset_config")
    if not isinstance(section, dict):
        return
    form, stored = section.get("dataset_format"), get_args(Format)
    for name, _ in DATASET_FILES:
        entries = section.get(name)
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
                continue
            if form in stored and entry.get("data_type") is None:
                entry["data_type"] = form
            if is_elsewhere(entry["path"], entry.get("data_type")):
                continue
            path = Path(os.path.abspath(entry["path"]))
            base = path if path.is_dir() else path.parent
            entry["path"] = str(path)
            folder = entry.get("data_folder")
            if folder is None or (isinstance(folder, str) and "://" not in folder):
                entry["data_folder"] = os.path.normpath(base / (folder or ""))


def _settle_folders(tree: dict[str, Any]) -> None:
    """Makes the folders of model and processor absolute where they are folders here; hub ids stay.

    So that a saved configuration can be used from another working directory, by `export` say.
    """
    for path in FOLDERS:
        *parents, leaf = path.split(".")
        section: Any = tree
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        folder = section.get(leaf) if isinstance(section, dict) else None
        if isinstance(folder, str) and folder and Path(folder).expanduser().is_dir():
            section[leaf] = os.path.abspath(Path(folder).expanduser())
