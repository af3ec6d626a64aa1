"""Who sees whom in a flat sequence, and where each row came from.

A pack is one flat sequence of T tokens made of N segments. `Segments` is the only object that attention
reads to keep them apart; it travels through the library's forward as one opaque keyword argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class RowRef(NamedTuple):
    """The address of a row: stable over runs, ranks and workers."""

    source: str   # name of the dataset entry: its path as given
    shard: int    # physical shard within the source (file, row group, record batch)
    row: int      # row within the shard
    id: str       # the row's own `id` if it has one, else "<source>:<shard>:<row>"


@dataclass(frozen=True)
class Segments:
    """Boundaries of the segments in a flat sequence of T tokens.

    cu_seqlens: int32 [N+1], offsets in the whole (unsharded) sequence; first 0, last T.
    max_len: the longest segment, a Python int from the worker, so that no kernel call syncs the device.
    causal: False makes attention bidirectional inside a segment.
    spans: int64 [T] or None; positions with equal ids >= 0 see each other both ways, also when causal.
    """

    cu_seqlens: Tensor
    max_len: int
    causal: bool = True
    spans: Tensor | None = None

    @classmethod
    def from_lengths(cls, lengths: list[int], *, causal: bool = True) -> Segments:
        """Segments of the given lengths (each >= 1), on the CPU."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"segment lengths must be positive, got {lengths}")
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        offsets[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        return cls(cu_seqlens=offsets, max_len=max(lengths), causal=causal)

    @property
    def num_segments(self) -> int:
        return self.cu_seqlens.numel() - 1

    def lengths(self) -> list[int]:
        """Segment lengths as Python ints. Reads the tensor: host side only, never in the step."""
        return self.cu_seqlens.diff().tolist()

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Segments:
        """The same segments with their tensors on `device`."""
        spans = None if self.spans is None else self.spans.to(device, non_blocking=non_blocking)
        return replace(self, cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking), spans=spans)
