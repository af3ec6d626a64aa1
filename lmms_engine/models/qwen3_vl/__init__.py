"""Qwen3-VL: transformers' own classes, as data for the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3VLForConditionalGeneration

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.processor.pixels import tower_kwargs
from lmms_engine.models.flops import Flops, Tally, add_decoder, add_head, real_grids
from lmms_engine.models.qwen3_vl.tiny import tiny
from lmms_engine.models.spec import MODELS, Layout, ModelSpec
from lmms_engine.models.spec import shard_inputs as shard_text

LAYOUT = Layout(
    body="model",
    decoder="model.language_model",
    blocks=("model.language_model.layers.*", "model.visual.blocks.*"),
    encoders=("model.visual",),
    head="lm_head",
    norm="model.language_model.norm",
    embed="model.language_model.embed_tokens",
    attention={"text_config": "decoder", "vision_config": "encoder"},
)

PATCH_INPUTS = ("position_ids", "interp_indices", "interp_weights")   # of the tower: a row a patch


def processor(*args: Any, **kwargs: Any) -> Any:
    """The family's processor; imported on first use, as it brings the image libraries."""
    from lmms_engine.models.qwen3_vl.processor import Qwen3VLProcessor

    return Qwen3VLProcessor.from_pretrained(*args, **kwargs)


def extra_kwargs(batch: PackedBatch, config: PretrainedConfig) -> dict[str, Any]:
    """Pictures and clips as one modality: clips take the picture placeholder, so that the tower runs once."""
    ids = batch.input_ids
    if not batch.media:
        return {"input_ids": ids}
    one_id = torch.where(ids == config.video_token_id, config.image_token_id, ids)
    return {"input_ids": one_id, **tower_kwargs(batch.media, batch.tower)}


def shard_inputs(inputs: dict[str, Any], part: slice) -> dict[str, Any]:
    """The decoder's inputs for a part of its sequence, DeepStack's features of that part among them."""
    sliced = shard_text(inputs, part)
    mask, features = inputs.get("visual_pos_masks"), inputs.get("deepstack_visual_embeds")
    if mask is None or features is None:
        return sliced
    feature_of_token = mask[0].cumsum(0) - 1
    own = feature_of_token[part][mask[0, part]]   # may be none: then the features get gradients of 0
    return {
        **sliced,
        "visual_pos_masks": mask[:, part],
        "deepstack_visual_embeds": [level[own] for level in features],
    }


def shard_pictures(inputs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The tower's inputs for pictures [start, end): index tensors have a row a patch or an edge a frame."""
    grids = inputs["grid_thw"]
    patches = grids.prod(-1).tolist()
    own = slice(sum(patches[:start]), sum(patches[:end]))
    frames = slice(int(grids[:start, 0].sum()), int(grids[:end, 0].sum()) + 1)
    cut = {name: inputs[name][own] for name in PATCH_INPUTS if isinstance(inputs.get(name), Tensor)}
    if isinstance(inputs.get("cu_seqlens"), Tensor):
        cut["cu_seqlens"] = inputs["cu_seqlens"][frames] - own.start
    return {**inputs, **cut, "grid_thw": grids[start:end]}


def flops(config: PretrainedConfig, batch: PackedBatch, frozen: frozenset[str]) -> Flops:
    """FLOPs of the batch's real rows. frozen: names of untrained parameters."""
    text, vision = config.text_config, config.vision_config
    embed = LAYOUT.embed
    tally = Tally(frozen)
    tally.passes(embed)
    grids = real_grids(batch, (config.image_token_id, config.video_token_id), vision.spatial_merge_size)
    if grids:
        tally.join(_tower(vision, grids, frozen))
    add_decoder(tally, text, batch, prefix=LAYOUT.decoder, qk_norm=True)
    add_head(tally, text, batch, module=embed if config.tie_word_embeddings else LAYOUT.head)
    return tally.flops()


def _tower(vision: Any, grids: list[tuple[int, int, int]], frozen: frozenset[str]) -> Tally:
    """Patches, blocks with full attention inside each frame, DeepStack mergers, merger."""
    patches = sum(t * h * w for t, h, w in grids)
    square = float(sum(t * (h * w) ** 2 for t, h, w in grids))
    dim, inner = vision.hidden_size, vision.intermediate_size
    tally = Tally(frozen)
    voxels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tally.linear(patches, ("model.visual.patch_embed.proj", voxels, dim))
    tally.passes("model.visual.pos_embed")
    for i in range(vision.depth):
        block = f"model.visual.blocks.{i}"
        tally.passes(f"{block}.norm1")
        tally.linear(patches, (f"{block}.attn.qkv", dim, 3 * dim))
        tally.attention(square, square, dim)
        tally.linear(patches, (f"{block}.attn.proj", dim, dim))
        tally.passes(f"{block}.norm2")
        tally.linear(patches, (f"{block}.mlp.linear_fc1", dim, inner))
        tally.linear(patches, (f"{block}.mlp.linear_fc2", inner, dim))
        if i in vision.deepstack_visual_indexes:
            index = list(vision.deepstack_visual_indexes).index(i)
            tally_branch = Tally(frozen, differentiable=tally.differentiable)
            _merger(tally_branch, vision, patches, f"model.visual.deepstack_merger_list.{index}")
            tally.strict += tally_branch.strict
            tally.conventional += tally_branch.conventional
    _merger(tally, vision, patches, "model.visual.merger")
    return tally


def _merger(tally: Tally, vision: Any, patches: int, module: str) -> None:
    unit = vision.spatial_merge_size**2
    wide = vision.hidden_size * unit
    tally.passes(f"{module}.norm")
    tally.linear(patches // unit, (f"{module}.linear_fc1", wide, wide))
    tally.linear(patches // unit, (f"{module}.linear_fc2", wide, vision.out_hidden_size))


SPEC = MODELS.register("qwen3_vl")(
    ModelSpec(
        name="qwen3_vl",
        model_types=("qwen3_vl",),
        model_class=Qwen3VLForConditionalGeneration,
        processor=processor,
        layout=LAYOUT,
        flops=flops,
        tiny=tiny,
        extra_kwargs=extra_kwargs,
        shard_pictures=shard_pictures,
        tower_features=("pooler_output", "deepstack_features"),
        shard_inputs=shard_inputs,
        swaps=("rms_norm", "swiglu"),
    )
)
