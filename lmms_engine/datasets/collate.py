"""Samples to PackedBatch: concatenation along a per-key dimension, and the stand-in.

Every micro-batch holds visual media. One that has none gets, as its last segment, the processor's
stand-in: a tiny picture with weight 0. Without it a rank would not call its vision tower while the others
do, and the collectives inside the sharded tower would wait for ever. A weight of 0 adds exactly 0 to loss
and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.sample import Sample
from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef, Segments

if TYPE_CHECKING:
    from lmms_engine.datasets.processor import Processor

# Keys -> dimension that runs over tokens. `position_ids` is [T] or has leading axes. Rows that are not text
# lack the first two.
TOKEN_DIMS = {"input_ids": 0, "labels": 0, "loss_weights": 0, "position_ids": -1}


def collate(samples: Sequence[Sample], processor: Processor) -> PackedBatch:
    """One micro-batch from the samples of one pack (or none: only a stand-in), complete with tower inputs."""
    return finish([join_samples(samples, processor)] if samples else [], processor)


def join_samples(samples: Sequence[Sample], processor: Processor) -> PackedBatch:
    """The samples as one flat sequence, still without stand-in and tower inputs."""
    media = [(sample.row, sample.media) for sample in samples]
    return PackedBatch(
        segments=Segments.from_lengths([len(sample) for sample in samples]),
        media=_join_media(media, processor),
        rows=tuple(sample.row for sample in samples),
        **_join_tokens(samples),
    )


def finish(packs: Sequence[PackedBatch], processor: Processor) -> PackedBatch:
    """Joins packs in one flat sequence and adds what holds for the micro-batch as a whole.

    packs: from `join_samples`; none gives a batch of the stand-in alone.
    """
    stand_in = processor.stand_in()
    if not packs and stand_in is None:
        stand_in = _blank()
    batch = _join_packs(packs, processor)
    lacks = stand_in is not None and (batch is None or not stand_in.media.keys() <= batch.media.keys())
    if lacks:
        extra = replace(join_samples([stand_in], processor), rows=())  # counts in no row figure
        batch = _join_packs([*packs, extra], processor)
    return replace(batch, tower=processor.tower_inputs(batch.media) if batch.media else {})


def _join_packs(packs: Sequence[PackedBatch], processor: Processor) -> PackedBatch | None:
    if len(packs) < 2:
        return packs[0] if packs else None
    lengths = [length for pack in packs for length in pack.segments.lengths()]
    return PackedBatch(
        segments=Segments.from_lengths(lengths),
        media=_join_media([(pack.rows[0] if pack.rows else None, pack.media) for pack in packs], processor),
        rows=tuple(row for pack in packs for row in pack.rows),
        **_join_tokens(packs),
    )


def _join_tokens(items: Sequence[Any]) -> dict[str, Tensor]:
    def join(key: str, dim: int) -> Tensor | None:
        tensors = [getattr(item, key) for item in items]
        return None if tensors[0] is None else torch.cat(tensors, dim)

    return {key: join(key, dim) for key, dim in TOKEN_DIMS.items()}


def _join_media(
    items: Sequence[tuple[RowRef | None, Mapping[str, Tensor]]], processor: Processor
) -> dict[str, Tensor]:
    columns: dict[str, list[Tensor]] = {}
    for ref, media in items:
        for key, tensor in media.items():
            if key not in processor.keys:
                raise UserError(
                    f"media key '{key}' of row {ref} has no rule in {type(processor).__name__}.keys"
                    f" (legal: {', '.join(sorted(processor.keys))})"
                )
            columns.setdefault(key, []).append(tensor)
    return {key: _cat(tensors, processor.keys[key].concat_dim) for key, tensors in columns.items()}


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Joined; in a loader worker straight into the shared memory in which it travels, which saves a copy."""
    if get_worker_info() is None:
        return torch.cat(tensors, dim)
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * first.element_size())
    return torch.cat(tensors, dim, out=torch.empty(0, dtype=first.dtype).set_(storage, 0, shape))


def _blank() -> Sample:
    """One weight-0 token, for models without media."""
    return Sample(
        row=RowRef("stand-in", 0, 0, "stand-in"),
        input_ids=torch.zeros(1, dtype=torch.int64),
        labels=torch.full((1,), -100, dtype=torch.int64),
        loss_weights=torch.zeros(1),
        position_ids=torch.zeros(1, dtype=torch.int64),
    )
