"""Qwen2.5-VL: transformers' own classes, as data for the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen2_5_VLForConditionalGeneration

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.processor.pixels import tower_kwargs
from lmms_engine.models.flops import Flops, Tally, add_decoder, add_head, real_grids
from lmms_engine.models.qwen2_5_vl.tiny import tiny
from lmms_engine.models.spec import MODELS, Layout, ModelSpec

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


def processor(*args: Any, **kwargs: Any) -> Any:
    """The family's processor; imported on first use, as it brings the image libraries."""
    from lmms_engine.models.qwen2_5_vl.processor import Qwen25VLProcessor

    return Qwen25VLProcessor.from_pretrained(*args, **kwargs)


def extra_kwargs(batch: PackedBatch, config: PretrainedConfig) -> dict[str, Any]:
    """Pictures and clips as one modality: clips take the picture placeholder, so that the tower runs once."""
    ids = batch.input_ids
    if not batch.media:
        return {"input_ids": ids}
    one_id = torch.where(ids == config.video_token_id, config.image_token_id, ids)
    return {"input_ids": one_id, **tower_kwargs(batch.media, batch.tower)}


def shard_pictures(inputs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The tower's inputs for pictures [start, end); no window crosses from one picture into another."""
    grids = inputs["grid_thw"]
    patches = grids.prod(-1).tolist()
    first, last = sum(patches[:start]), sum(patches[:end])
    frames = slice(int(grids[:start, 0].sum()), int(grids[:end, 0].sum()) + 1)
    cut: dict[str, Any] = {"grid_thw": grids[start:end]}
    if isinstance(inputs.get("cu_seqlens"), Tensor):
        cut["cu_seqlens"] = inputs["cu_seqlens"][frames] - first
        cut["position_ids"] = inputs["position_ids"][first:last]
        unit = inputs["position_ids"].shape[0] // inputs["window_index"].shape[0]   # patches of a token
        cut["window_index"] = inputs["window_index"][first // unit : last // unit] - first // unit
        edges = inputs["cu_window_seqlens"]
        cut["cu_window_seqlens"] = edges[(edges >= first) & (edges <= last)] - first
    return {**inputs, **cut}


def flops(config: PretrainedConfig, batch: PackedBatch, frozen: frozenset[str]) -> Flops:
    """FLOPs of the batch's real rows. frozen: names of untrained parameters."""
    text, vision = config.text_config, config.vision_config
    embed = LAYOUT.embed
    tally = Tally(frozen)
    tally.passes(embed)
    grids = real_grids(batch, (config.image_token_id, config.video_token_id), vision.spatial_merge_size)
    if grids:
        tally.join(_tower(vision, grids, frozen))
    add_decoder(tally, text, batch, prefix=LAYOUT.decoder, qk_norm=False)
    add_head(tally, text, batch, module=embed if config.tie_word_embeddings else LAYOUT.head)
    return tally.flops()


def _tower(vision: Any, grids: list[tuple[int, int, int]], frozen: frozenset[str]) -> Tally:
    """Patches, blocks with attention inside windows or, where listed, inside whole frames, merger."""
    patches = sum(t * h * w for t, h, w in grids)
    full = float(sum(t * (h * w) ** 2 for t, h, w in grids))
    windowed = float(sum(t * _window_pairs(h, w, vision) for t, h, w in grids))
    dim, inner = vision.hidden_size, vision.intermediate_size
    tally = Tally(frozen)
    voxels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tally.linear(patches, ("model.visual.patch_embed.proj", voxels, dim))
    for i in range(vision.depth):
        block = f"model.visual.blocks.{i}"
        tally.passes(f"{block}.norm1")
        tally.linear(patches, (f"{block}.attn.qkv", dim, 3 * dim))
        pairs = full if i in vision.fullatt_block_indexes else windowed
        tally.attention(pairs, pairs, dim)   # the convention has no figure for windows: theirs
        tally.linear(patches, (f"{block}.attn.proj", dim, dim))
        tally.passes(f"{block}.norm2")
        mlp = f"{block}.mlp"
        tally.linear(patches, (f"{mlp}.gate_proj", dim, inner), (f"{mlp}.up_proj", dim, inner))
        tally.linear(patches, (f"{mlp}.down_proj", inner, dim))
    unit = vision.spatial_merge_size**2
    tally.passes("model.visual.merger.ln_q")
    tally.linear(patches // unit, ("model.visual.merger.mlp.0", dim * unit, dim * unit))
    tally.linear(patches // unit, ("model.visual.merger.mlp.2", dim * unit, vision.out_hidden_size))
    return tally


def _window_pairs(height: int, width: int, vision: Any) -> int:
    """Pairs of patches in one frame that share a window; a window at the border is cut, not padded."""
    merge = vision.spatial_merge_size
    side = vision.window_size // merge // vision.patch_size

    def squares(patches: int) -> int:
        whole, rest = divmod(patches // merge, side)
        return whole * side**2 + rest**2

    return merge**4 * squares(height) * squares(width)


SPEC = MODELS.register("qwen2_5_vl")(
    ModelSpec(
        name="qwen2_5_vl",
        model_types=("qwen2_5_vl",),
        model_class=Qwen2_5_VLForConditionalGeneration,
        processor=processor,
        layout=LAYOUT,
        flops=flops,
        tiny=tiny,
        extra_kwargs=extra_kwargs,
        shard_pictures=shard_pictures,
        tower_features=("pooler_output",),
        swaps=("rms_norm", "swiglu"),
    )
)
