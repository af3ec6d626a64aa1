"""PackedBatch: what a rank trains on in one micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lmms_engine.segments import RowRef, Segments

# Media whose values the host needs (grids, counts): they never move to the device, which saves syncs.
HOST_SUFFIXES = ("_grid_thw", "_frames")


@dataclass(frozen=True)
class PackedBatch:
    """One flat sequence of T tokens: N rows, then weight-0 stand-ins.

    Segment i belongs to `rows[i]`; segments past `len(rows)` are stand-ins (see collate.py), which count in
    no token, FLOP or row figure. In a part made by `shard` the targets are one rank's, [T / ranks].
    """

    segments: Segments
    input_ids: Tensor | None          # int64 [T]
    position_ids: Tensor | None       # int64 [T] or [3, T]
    labels: Tensor | None             # int64 [T], shifted inside each sample; -100 where weight is 0
    loss_weights: Tensor | None       # float32 [T]
    media: dict[str, Tensor] = field(default_factory=dict)       # e.g. pixel_bytes, image_grid_thw
    # what the family's `extra_kwargs` needs besides the media: encoder boundaries and positions, pixel levels
    tower: dict[str, Tensor | int] = field(default_factory=dict)
    rows: tuple[RowRef, ...] = ()
    # Filled by `to` from the host's weights, so that the loss need not ask the device:
    supervised: Tensor | None = None  # int64 [S], where loss_weights > 0
    uniform_weights: bool = False     # all S weights are 1
    # Filled by `with_groups`, for objectives that tell sources apart:
    groups: Tensor | None = None      # int64 [T]

    @property
    def num_tokens(self) -> int:
        """Tokens of real rows (stand-ins left out). Host side only."""
        return int(self.segments.cu_seqlens[len(self.rows)])

    def row_lengths(self) -> list[int]:
        """Length of each real row. Host side only."""
        return self.segments.lengths()[: len(self.rows)]

    def row_supervised(self) -> list[int]:
        """Number of supervised positions of each real row. Host side only."""
        edges = self.segments.cu_seqlens.tolist()
        return [
            int((self.loss_weights[a:b] > 0).sum())
            for a, b in itertools.islice(itertools.pairwise(edges), len(self.rows))
        ]

    def shard(self, rank: int, size: int) -> PackedBatch:
        """Part `rank` of `size` for ranks that share the sequence, from a batch on the host.

        Targets are this rank's alone; ids, positions, segments and media stay whole, since the model splits
        its activations itself, behind the embedding. T is filled up to a multiple of `size` by one more
        weight-0 segment. Needs no neighbour: labels were shifted inside each sample.
        """
        if size == 1:
            return self
        whole = self._filled_up(-self.labels.numel() % size)
        own = slice(rank * whole.labels.numel() // size, (rank + 1) * whole.labels.numel() // size)
        groups = None if whole.groups is None else whole.groups[own]
        return replace(whole, labels=whole.labels[own], loss_weights=whole.loss_weights[own], groups=groups)

    def _filled_up(self, extra: int) -> PackedBatch:
        """The batch with `extra` tokens more, in a segment of their own that belongs to no row."""
        if not extra:
            return self
        segments, places = self.segments, self.position_ids
        spans = None if segments.spans is None else F.pad(segments.spans, (0, extra), value=-1)
        edges = torch.cat([segments.cu_seqlens, segments.cu_seqlens[-1:] + extra])
        return replace(
            self,
            segments=replace(
                segments, cu_seqlens=edges, max_len=max(segments.max_len, extra), spans=spans
            ),
            input_ids=F.pad(self.input_ids, (0, extra)),
            position_ids=torch.cat([places, torch.arange(extra).expand(*places.shape[:-1], extra)], -1),
            labels=F.pad(self.labels, (0, extra), value=-100),
            loss_weights=F.pad(self.loss_weights, (0, extra)),
            groups=None if self.groups is None else F.pad(self.groups, (0, extra), value=-1),
        )

    def _map_tensors(self, move, media_move) -> PackedBatch:
        def one(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else move(tensor)

        return replace(
            self,
            input_ids=one(self.input_ids),
            position_ids=one(self.position_ids),
            labels=one(self.labels),
            loss_weights=one(self.loss_weights),
            media={name: media_move(name, tensor) for name, tensor in self.media.items()},
            tower={k: media_move(k, v) if isinstance(v, Tensor) else v for k, v in self.tower.items()},
            supervised=one(self.supervised),
            groups=one(self.groups),
        )

    def _with_supervised(self) -> PackedBatch:
        """The batch with its supervised positions listed, where its weights are on the host."""
        weights = self.loss_weights
        if weights is None or weights.device.type != "cpu":
            return self
        supervised = (weights > 0).nonzero().flatten()
        uniform = bool((weights[supervised] == 1).all())
        if weights.is_pinned():
            supervised = supervised.pin_memory()
        return replace(self, supervised=supervised, uniform_weights=uniform)

    def with_groups(self, sources: Sequence[str]) -> PackedBatch:
        """The batch with `groups`: the number of each position's source, -1 where it is none of `sources`.

        Host side only.
        """
        number = {name: i for i, name in enumerate(sources)}
        numbers = [number.get(row.source, -1) for row in self.rows]
        numbers += [-1] * (self.segments.num_segments - len(self.rows))
        groups = torch.tensor(numbers).repeat_interleave(self.segments.cu_seqlens.diff())
        if self.loss_weights is not None and self.loss_weights.is_pinned():
            groups = groups.pin_memory()
        return replace(self, groups=groups)

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on `device`; dtypes are kept, grids stay on the host."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        def media_move(name: str, tensor: Tensor) -> Tensor:
            return tensor if name.endswith(HOST_SUFFIXES) else move(tensor)

        moved = self._with_supervised()._map_tensors(move, media_move)
        return replace(moved, segments=self.segments.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked memory, so that `to` is asynchronous. Called by torch's DataLoader."""
        pinned = self._map_tensors(Tensor.pin_memory, lambda _, tensor: tensor.pin_memory())
        segments = replace(self.segments, cu_seqlens=self.segments.cu_seqlens.pin_memory())
        return replace(pinned, segments=segments)
