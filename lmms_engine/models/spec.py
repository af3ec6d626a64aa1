"""A model family as data: how to load it, where its parts are, what it trains with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.registry import Registry

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lmms_engine.datasets.processor import Processor
    from lmms_engine.datasets.sample import Sample
    from lmms_engine.models.flops import Flops


SEQUENCES = ("input_ids", "inputs_embeds")   # a decoder gets one of them, [1, T] or [1, T, dim]


@dataclass(frozen=True)
class Layout:
    """Module paths and patterns (`*` is one path component) inside the model. Each must match a module.

    What a family does not have is left out; the objective `next_token` needs body, head, norm and embed.
    """

    body: str                        # called by the objective; returns `.last_hidden_state` before the head
    blocks: tuple[str, ...]          # units of activation checkpointing, compile and FSDP
    encoders: tuple[str, ...] = ()   # towers; one FSDP unit each, freezable
    decoder: str | None = None       # gets `inputs_embeds`; sequence parallelism hooks in here
    head: str | None = None          # the output projection, replaced by LossHead
    norm: str | None = None          # final norm before the head
    embed: str | None = None         # input embedding
    experts: str | None = None       # modules of stacked expert weights; expert parallelism spreads them
    # sub-config name ("" = the top) -> "decoder" | "encoder"
    attention: dict[str, str] = field(default_factory=dict)


def shard_inputs(inputs: dict[str, Any], part: slice) -> dict[str, Any]:
    """A decoder's keyword arguments for a part of its sequence: ids or embeddings [1, T, ...], positions."""
    sliced = {name: inputs[name][:, part] for name in SEQUENCES if inputs.get(name) is not None}
    return {**inputs, **sliced, "position_ids": inputs["position_ids"][..., part]}


@dataclass(frozen=True)
class ModelSpec:
    """Everything the engine knows of a family. One spec may serve several `model_types`."""

    name: str                                                  # folder = registry name = recipe name
    model_types: tuple[str, ...]                               # config.model_type values
    model_class: Callable[[PretrainedConfig], nn.Module]       # config -> unmodified library module
    processor: Callable[..., Processor]                        # (folder_or_id, **settings) -> Processor
    layout: Layout
    flops: Callable[[PretrainedConfig, PackedBatch, frozenset[str]], Flops]
    tiny: Callable[[], tuple[nn.Module, list[Sample]]]         # tests: random model and a few unlike samples
    objective: str = "next_token"
    # keywords of the body's forward beyond ids and positions; may replace `input_ids` (flat)
    extra_kwargs: Callable[[PackedBatch, PretrainedConfig], dict[str, Any]] = lambda batch, config: {}
    # keywords of the decoder's forward -> the same for the tokens of a slice (sequence parallelism)
    shard_inputs: Callable[[dict[str, Any], slice], dict[str, Any]] = shard_inputs
    # keywords of a tower's forward -> the same for some of its pictures, by number (start, end)
    shard_pictures: Callable[[dict[str, Any], int, int], dict[str, Any]] | None = None
    tower_features: tuple[str, ...] = ()                       # parts of a tower's output, a row a token
    # kernels/liger.py: swaps that must match; None: what Liger itself knows of the model type
    swaps: tuple[str, ...] | None = None
    undeclared: tuple[str, ...] = ()   # config keys that the library's config class takes without naming them


MODELS: Registry[ModelSpec] = Registry(
    "model", {name: f"lmms_engine.models.{name}" for name in ("qwen2_5_vl", "qwen3_moe", "qwen3_vl", "sit")}
)


def for_type(model_type: str) -> ModelSpec:
    """The spec that serves a config's `model_type`."""
    for name in MODELS:
        spec = MODELS.get(name)
        if model_type in spec.model_types:
            return spec
    return MODELS.get(model_type)   # raises with the legal names
