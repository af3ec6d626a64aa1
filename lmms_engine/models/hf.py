"""Library models from and to disk: config, meta-device build, a stream of weights, buffers, export.

Loading is strict: a checkpoint that misses a weight, holds one too many or one of another shape stops the
run. The caller decides which rank reads and where tensors go; nothing here is distributed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_rope_utils import RopeParameters

from lmms_engine.errors import UserError
from lmms_engine.folders import missing_folder
from lmms_engine.models.spec import ModelSpec, for_type
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    from lmms_engine.config import ModelSection

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
METADATA = ("*.json", "*.jinja", "*.txt", "*.model")   # config, processor and tokenizer files


# ---- config ------------------------------------------------------------------------------------------


def read_config(section: ModelSection) -> PretrainedConfig:
    """The model's config, from `load_from_pretrained_path` or `load_from_config`; weights are to be float32.

    Unknown keys and wrong types in `load_from_config` are collected and raised together as UserError.
    """
    if section.load_from_config is not None:
        config = _from_mapping(section.load_from_config)
    else:
        source = section.load_from_pretrained_path
        folder = local_folder(source, weights=False)
        try:
            kind = PretrainedConfig.get_config_dict(folder)[0].get("model_type")
            if kind is not None:
                for_type(kind)   # a family of ours makes its config known on import
            config = AutoConfig.from_pretrained(folder)
        except (ValueError, OSError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
            raise UserError(
                f"model_config.load_from_pretrained_path={source}: no usable config.json: {_line(error)}"
            ) from error
    for_type(config.model_type)
    _check_rope(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32   # masters; the compute type is the backend's business
    return config


def _from_mapping(given: Mapping[str, Any]) -> PretrainedConfig:
    values = dict(given)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError("model_config.load_from_config: `model_type` is missing, e.g. model_type: qwen3_vl")
    where = "model_config.load_from_config"
    if isinstance(values.get("config"), Mapping):
        inner = values.pop("config")
        if values:
            raise UserError(f"{where}: {', '.join(values)} beside `config`; put model keys inside it")
        values, where = dict(inner), f"{where}.config"
    undeclared = for_type(model_type).undeclared
    config_class = type(AutoConfig.for_model(model_type))
    problems = list(_unknown_keys(values, config_class, where, undeclared))
    if problems:
        raise UserError("\n".join(problems))
    try:
        return config_class(**copy.deepcopy(values))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{where}: {_line(error)}") from error


def _unknown_keys(
    values: Mapping[str, Any],
    config_class: type[PretrainedConfig],
    where: str,
    undeclared: tuple[str, ...] = (),
) -> Iterator[str]:
    """One message for each key that a config class, or the class of a nested config, does not have."""
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    names.update(undeclared)
    if "rope_parameters" in names:
        names |= {"rope_scaling", "rope_theta"}   # how older files write it
    legal = sorted(names | {"model_type", "torch_dtype"})
    own_rope_keys = getattr(config_class, "ignore_keys_at_rope_validation", ())
    rope_keys = sorted({"type", *RopeParameters.__annotations__, *own_rope_keys})
    for key, value in values.items():
        if key not in legal:
            yield f"{where}.{key}: {config_class.__name__} has no such key{nearest(key, legal)}"
        elif key in config_class.sub_configs and isinstance(value, Mapping):
            yield from _unknown_keys(value, config_class.sub_configs[key], f"{where}.{key}")
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            for inner in value:
                if inner not in rope_keys:
                    yield f"{where}.{key}.{inner}: no such key{nearest(inner, rope_keys)}"


def _check_rope(config: PretrainedConfig) -> None:
    """M-RoPE sections share out the frequencies; other sums fail deep inside the first forward."""
    text = config.get_text_config()
    sections = (getattr(text, "rope_parameters", None) or {}).get("mrope_section")
    if not sections:
        return
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if sum(sections) != head_dim // 2:
        raise UserError(
            f"mrope_section={sections} sums to {sum(sections)}; "
            f"it must be half the head dimension, {head_dim // 2}"
        )


def _check_widths(config: PretrainedConfig) -> None:
    """Sizes that the library takes as they are, and that fail deep inside the first forward."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"):
        if getattr(text, key, 1) < 1:
            given = f"{type(text).__name__}.{key}={getattr(text, key)}"
            raise UserError(f"model_config: {given}: not legal (legal: a whole number >= 1)")
    heads, shared = getattr(text, "num_attention_heads", 1), getattr(text, "num_key_value_heads", 1)
    if heads % shared:
        raise UserError(
            f"model_config: {type(text).__name__}.num_key_value_heads={shared}: does not divide the {heads} "
            "attention heads"
        )
    out = getattr(vision, "out_hidden_size", None)
    if out is not None and out != text.hidden_size:
        raise UserError(
            f"model_config: vision_config.out_hidden_size={out}: must be the text model's hidden_size, "
            f"{text.hidden_size}"
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---- where the files are -----------------------------------------------------------------------------


def local_folder(path_or_id: str, *, weights: bool) -> Path:
    """The folder of a model: as given, or a hub snapshot (downloaded where it is not cached yet).

    weights: fetch the safetensors files too, not only config and processor. What is neither a folder nor
    reachable raises UserError.
    """
    where = f"model_config.load_from_pretrained_path={path_or_id}"
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if (missing := missing_folder(path_or_id, bare=False)) is not None:
        raise UserError(f"{where}: {missing}")
    patterns = [*METADATA, *(("*.safetensors",) if weights else ())]
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{where}: neither a folder here nor to be had from the hub ({type(error).__name__}); "
            "give a folder, or check the name, the network and access to the model"
        ) from error


# ---- building ----------------------------------------------------------------------------------------


def build_meta(spec: ModelSpec, config: PretrainedConfig) -> nn.Module:
    """The library model without storage, ties in place. Sizes that do not fit raise UserError."""
    _check_widths(config)
    try:
        with torch.device("meta"):
            model = spec.model_class(copy.deepcopy(config))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"model_config: no {spec.name} can be built from this: {_line(error)}") from error
    embed = model.get_submodule(spec.layout.embed) if spec.layout.embed else None
    if isinstance(embed, nn.Embedding):
        embed.padding_idx = None   # where the pad token is content too, it would get no gradient
    return model


def buffers(spec: ModelSpec, config: PretrainedConfig) -> dict[str, Tensor]:
    """Non-persistent buffers (rotary tables), float32 on the CPU: `to_empty` turns them into garbage.

    Modules that build from a config alone are rebuilt; if some other module holds one, the whole model is.
    """
    model = build_meta(spec, config)
    tables: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not module._non_persistent_buffers_set:
            continue
        if not isinstance(getattr(module, "config", None), PretrainedConfig) or list(module.parameters()):
            return _buffers_of(spec.model_class(copy.deepcopy(config)))
        fresh = type(module)(config=module.config)
        for name in module._non_persistent_buffers_set:
            tables[f"{path}.{name}" if path else name] = getattr(fresh, name)
    return tables


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names that are the same parameter as another: alias -> the name under which it is loaded and saved."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


# ---- weights in --------------------------------------------------------------------------------------


def weight_stream(
    spec: ModelSpec, config: PretrainedConfig, source: Path | str | None, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer once, as (name, full float32 tensor on the CPU).

    source: folder or hub id of safetensors, in any layout that the library can convert; None: random, by the
    library's own initialisation under `seed`. Meant for one rank: a random model is built whole in memory.
    """
    if source is None:
        yield from _random_weights(spec, config, seed)
    else:
        yield from _checkpoint_weights(spec, config, local_folder(str(source), weights=True))


def _random_weights(spec: ModelSpec, config: PretrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = spec.model_class(copy.deepcopy(config))
    aliases = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in aliases:
            yield name, _float32(tensor)


@dataclasses.dataclass
class _Conversion:
    """How one or several tensors of a checkpoint become one or several of the model."""

    transform: Any                               # the library's renaming or converter
    sources: list[tuple[str, str]]               # (key in the checkpoint, pattern that it came in by)


def _checkpoint_weights(
    spec: ModelSpec, config: PretrainedConfig, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    model = build_meta(spec, config)
    files = _checkpoint_files(folder)
    like = model.state_dict()
    aliases = tied_names(model)
    conversions, unexpected = _plan(model, list(files))
    wanted = like.keys() - aliases.keys()
    if all(len(conversion.transform.target_patterns) == 1 for conversion in conversions.values()):
        covered = {aliases.get(name, name) for name in conversions}
        _check_complete(folder, covered, unexpected, wanted)   # before anything is read
    done: set[str] = set()
    with _Shards(folder, files) as shards:
        for target, conversion in conversions.items():
            for key, pattern in conversion.sources:
                conversion.transform.add_tensor(target, key, pattern, shards.read(key))
            made = conversion.transform.convert(target, model=model, config=model.config)
            for name, tensor in made.items():
                tensor = tensor[0] if isinstance(tensor, list) else tensor
                _check_fits(folder, name, tensor, like[name])
                name = aliases.get(name, name)   # both of a tied pair may be there: the first one counts
                if name not in done:
                    done.add(name)
                    yield name, _float32(tensor)
    _check_complete(folder, done, [], wanted)


def _check_fits(folder: Path, name: str, tensor: Tensor, like: Tensor) -> None:
    """Shape and kind of number must be the model's: quantised weights, say, are no weights to train on."""
    if tensor.shape != like.shape:
        raise UserError(
            f"{folder}: {name} is {list(tensor.shape)} in the checkpoint and {list(like.shape)} in the model"
        )
    if like.is_floating_point() and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2):
        raise UserError(
            f"{folder}: {name} is {tensor.dtype} in the checkpoint (legal: float of 16 bits or more); "
            "train from the weights before quantisation"
        )


def _plan(model: nn.Module, keys: list[str]) -> tuple[dict[str, _Conversion], list[str]]:
    """Which checkpoint keys make which parameter, by the library's own rules; and the keys that make none."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = model.state_dict()
    prefix = model.base_model_prefix
    plan: dict[str, _Conversion] = {}
    unexpected = []
    for key in sorted(keys):
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and key in targets:   # a name of today that an old rule would spoil
            name, pattern = key, None
        if name not in targets:
            unexpected.append(key)
            continue
        transform = WeightRenaming(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
        plan.setdefault(name, _Conversion(transform, [])).sources.append((key, pattern or key))
    return plan, unexpected


def _check_complete(folder: Path, covered: set[str], unexpected: list[str], wanted: set[str]) -> None:
    missing = sorted(wanted - covered)
    if missing or unexpected:
        raise UserError(
            f"{folder}: the checkpoint does not fit the model: "
            f"{len(missing)} weights missing{_some(missing)}, {len(unexpected)} unknown{_some(unexpected)}"
        )


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else ""


def _checkpoint_files(folder: Path) -> dict[str, str]:
    """Key -> file name, from the index or from the single file."""
    if (folder / INDEX).is_file():
        try:
            return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX}: not a weight index: {_line(error)}") from error
    if not (folder / SINGLE).is_file():
        raise UserError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}")
    with _readable(folder / SINGLE), safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


class _Shards:
    """Open safetensors files of a checkpoint, one handle each."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()   # safetensors has no other way to close a file

    def read(self, key: str) -> Tensor:
        """The full tensor of `key`."""
        name = self._files[key]
        with _readable(self._folder / name):
            if name not in self._open:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            return self._open[name].get_tensor(key)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a whole safetensors file ({_line(error)}); fetch or copy it again"
        ) from error


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


# ---- weights out -------------------------------------------------------------------------------------


def export(
    spec: ModelSpec,
    config: PretrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype,
    processor: Any | None = None,
    source: Path | None = None,
) -> None:
    """Writes a folder that `from_pretrained` and a processor open.

    weights: every name of `weight_stream`, full tensors. processor: anything with `save_pretrained`.
    source: the folder the model came from, whose generation settings are kept.
    The folder appears complete or not at all; one of the same name is replaced.
    """
    model = build_meta(spec, config)
    aliases = tied_names(model)
    state = {name: t.to("cpu", dtype) if t.is_floating_point() else t.cpu() for name, t in weights}
    wanted = model.state_dict().keys() - aliases.keys()
    if state.keys() != wanted:
        wrong = sorted(state.keys() ^ wanted)
        raise ValueError(f"export needs every weight once; these differ: {wrong[:5]}")
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if source is not None and (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished)
        if processor is not None:
            processor.save_pretrained(unfinished)
        _replace(unfinished, folder)
    except SafetensorError as error:
        remedy = "make room or choose another --out"
        raise UserError(f"{folder} could not be written: {error}; {remedy}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _replace(new: Path, folder: Path) -> None:
    """Puts `new` in the place of `folder`; what was there goes last."""
    old = new.with_name(new.name + "-old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
