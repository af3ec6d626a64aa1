"""Tiny models of every family, for tests: objectives on one of the three paths, packs, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.sample import Sample
from lmms_engine.kernels import attention
from lmms_engine.kernels.loss_head import replace_head
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.next_token import NextToken
from lmms_engine.segments import Segments

FAMILIES = tuple(MODELS)
CPU = torch.device("cpu")


def build(family: str, *, rmpad: bool = True) -> tuple[NextToken, list[Sample]]:
    """The family's tiny model as an objective, always with the same weights, and its samples."""
    spec = MODELS.get(family)
    model, samples = spec.tiny()
    replace_head(model, spec.layout.head, fused=False)
    names = attention.install("sdpa") if rmpad else attention.LIBRARY
    attention.use(model, spec.layout.attention, names)
    return NextToken(model, spec, model.config, rmpad=rmpad), samples


def pack(samples: Sequence[Sample], *, stand_ins: int = 0) -> PackedBatch:
    """The samples as one flat sequence; the last `stand_ins` of them count as no row."""
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
        rows=tuple(s.row for s in samples[: len(samples) - stand_ins]),
    )


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
