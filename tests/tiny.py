"""Tiny models of every family, for tests: objectives on one of the three paths, packs, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, vision_utils

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.sample import Sample
from lmms_engine.kernels import attention, experts
from lmms_engine.kernels.fused_rotary import fuse_rotary
from lmms_engine.kernels.loss_head import replace_head
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.next_token import NextToken
from lmms_engine.parallel.paths import resolve
from lmms_engine.segments import Segments

FAMILIES = tuple(name for name in MODELS if MODELS.get(name).layout.encoders)   # vision and language
TEXT_FAMILIES = ("qwen3_moe",)
DECODERS = FAMILIES + TEXT_FAMILIES
CPU = torch.device("cpu")


def build(family: str, *, rmpad: bool = True) -> tuple[NextToken, list[Sample]]:
    """The family's tiny model as an objective, always with the same weights, and its samples."""
    spec = MODELS.get(family)
    model, samples = spec.tiny()
    replace_head(model, spec.layout.head, fused=False)
    names = attention.install("sdpa") if rmpad else attention.LIBRARY
    attention.use(model, spec.layout.attention, names)
    if rmpad:
        fuse_rotary(model)
    if spec.layout.experts is not None:
        modules = resolve(model, spec.layout.experts)
        experts.use(model, modules, experts.install("loop") if rmpad else experts.LIBRARY)
    return NextToken(model, spec, model.config, rmpad=rmpad), samples


def pack(
    samples: Sequence[Sample], *, stand_ins: int = 0, config: PretrainedConfig | None = None
) -> PackedBatch:
    """The samples as one flat sequence; the last `stand_ins` of them count as no row.

    config: the model's, to bring what its tower needs to know of the grids; on a CPU it can see for itself.
    """
    media = {
        key: torch.cat([s.media[key] for s in samples if key in s.media])
        for key in {key for s in samples for key in s.media}
    }
    return PackedBatch(
        segments=Segments.from_lengths([len(s) for s in samples]),
        input_ids=torch.cat([s.input_ids for s in samples]),
        position_ids=torch.cat([s.position_ids for s in samples], dim=-1),
        labels=torch.cat([s.labels for s in samples]),
        loss_weights=torch.cat([s.loss_weights for s in samples]),
        media=media,
        tower=tower_inputs(config.vision_config, media["image_grid_thw"]) if config and media else {},
        rows=tuple(s.row for s in samples[: len(samples) - stand_ins]),
    )


def tower_inputs(vision: PretrainedConfig, grids: Tensor) -> dict[str, Tensor | int]:
    """Boundaries and positions by the library's own functions, named as its models take them."""
    merge = vision.spatial_merge_size
    frames = vision_utils.get_vision_cu_seqlens(grids)
    inputs = {
        "image_cu_seqlens": frames,
        "image_max_seqlen": int(frames.diff().max()),
        "image_position_ids": vision_utils.get_vision_position_ids(grids, merge),
    }
    if hasattr(vision, "num_position_embeddings"):
        side = int(vision.num_position_embeddings**0.5)
        inputs["image_interp_indices"], inputs["image_interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grids, num_grid_per_side=side, align_corners=True, spatial_merge_size=merge
            )
        )
    if hasattr(vision, "window_size"):
        order, edges = vision_utils.get_vision_window_index(
            grids, merge, vision.window_size, vision.patch_size
        )
        inputs |= {"image_window_index": order, "image_cu_window_seqlens": edges}
        inputs["image_max_window_seqlen"] = int(edges.diff().max())
    return inputs


def loss_and_gradients(
    objective: NextToken, batches: Sequence[PackedBatch]
) -> tuple[float, dict[str, Tensor | None]]:
    """Sum of the losses in float64 and the gradients of their sum."""
    objective.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = objective(batch.to(CPU))["ce"]
        loss.backward()
        total += loss.double().item()
    return total, {name: parameter.grad for name, parameter in objective.model.named_parameters()}


def assert_same_gradients(
    ours: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None], tolerance: float = 1e-5
) -> None:
    """Per tensor max|difference| <= tolerance * max|reference|; tensors that hardly count, absolutely."""
    assert ours.keys() == reference.keys()
    assert all(gradient is not None for gradient in reference.values())
    norm = torch.stack([g.double().norm() for g in reference.values()]).norm().item()
    for name, expected in reference.items():
        scale = max(expected.abs().max().item(), 1e-7 * norm)
        worst = (ours[name] - expected).abs().max().item()
        assert worst <= tolerance * scale, f"{name}: differs by {worst:.3g} where the largest is {scale:.3g}"


def logits(objective: NextToken, batch: PackedBatch) -> Tensor:
    """[T, V] of a flat batch."""
    head: nn.Module = objective.model.get_submodule(objective._head)
    with torch.no_grad():
        return head.logits(objective.hidden(batch.to(CPU)))
