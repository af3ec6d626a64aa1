"""The tiny SiT with its objective, and packs of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.collate import join_samples
from lmms_engine.datasets.sample import Sample
from lmms_engine.models.sit.processor import Settings, SiTProcessor
from lmms_engine.models.spec import MODELS, ModelSpec
from lmms_engine.objectives.flow_matching import FlowMatching
from lmms_engine.segments import Segments

PROCESSOR = SiTProcessor(Settings(classes=("a", "b", "c", "d", "e"), patch_size=2), largest=8)


def build(**options: object) -> tuple[FlowMatching, ModelSpec, list[Sample]]:
    """The tiny model, always with the same weights, its spec, and four pictures of unlike sizes."""
    spec = MODELS.get("sit")
    model, samples = spec.tiny()
    return FlowMatching(model, spec, model.config, **options), spec, samples


def batch_of(samples: Sequence[Sample], *, stand_ins: int = 0) -> PackedBatch:
    """The samples as one flat sequence; the last `stand_ins` of them count as no row."""
    batch = join_samples(samples, PROCESSOR)
    return replace(batch, rows=batch.rows[: len(samples) - stand_ins])


def with_noise(samples: Sequence[Sample], null: int | None = None) -> list[PackedBatch]:
    """Each sample as a batch of its own with a fixed time and noise; every other one has the null class."""
    batches = []
    for i, sample in enumerate(samples):
        batch = batch_of([sample])
        rng = torch.Generator().manual_seed(100 + sample.row.row)
        media = dict(batch.media)
        media["noise"] = torch.randn(media["pixel_values"].shape, generator=rng)
        media["times"] = torch.rand(1, generator=rng)
        if null is not None and i % 2:
            media["class_labels"] = torch.tensor([null])
        batches.append(replace(batch, media=media))
    return batches


def join(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Batches with their noise as one flat sequence."""
    media = {key: torch.cat([b.media[key] for b in batches]) for key in batches[0].media}
    return PackedBatch(
        segments=Segments.from_lengths([n for b in batches for n in b.segments.lengths()]),
        input_ids=None,
        position_ids=torch.cat([b.position_ids for b in batches], dim=1),
        labels=None,
        loss_weights=torch.cat([b.loss_weights for b in batches]),
        media=media,
        rows=tuple(row for b in batches for row in b.rows),
    )


def loss_and_gradients(
    objective: FlowMatching, batches: Sequence[PackedBatch]
) -> tuple[float, dict[str, Tensor]]:
    """Mean squared error over all batches, and the gradients of it."""
    objective.zero_grad(set_to_none=True)
    total = sum(objective.weights(batch)["flow"] for batch in batches)
    loss = 0.0
    for batch in batches:
        part = objective(batch)["flow"] / total
        part.backward()
        loss += float(part.detach())
    return loss, {name: p.grad.clone() for name, p in objective.model.named_parameters()}
