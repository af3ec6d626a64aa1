"""Objective: model plus loss, as differentiable sums. The FSDP root."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmms_engine.datasets.batch import PackedBatch

if TYPE_CHECKING:
    from lmms_engine.datasets.processor import Processor

SOURCE_TERM = "source/"   # then a source's name: the part of the loss that its rows make, a metric


class Drawing(NamedTuple):
    """A picture that a model made. pixels: uint8 [height, width, 3]."""

    caption: str
    pixels: Tensor


class Objective(nn.Module):
    """Owns the trained `model` and, outside it, whatever frozen helpers the loss needs.

    The step calls, in this order: `draw` on every micro-batch (host, cheap), `weights` on every micro-batch
    (host), then for one micro-batch at a time `prepare` (device, may be heavy) and `forward`.
    """

    model: nn.Module
    coefficients: dict[str, float]   # term -> factor in the loss; 0 makes a term a metric
    forward_methods: ClassVar[tuple[str, ...]] = ()   # methods besides `forward` that call the model
    sequence_group: dist.ProcessGroup | None = None   # the ranks that share this rank's sequences
    shares_sequences: ClassVar[bool] = False   # whether `forward` takes a batch made by `PackedBatch.shard`

    def draw(self, batch: PackedBatch, rng: torch.Generator) -> PackedBatch:
        """Random choices that decide the targets (masks, timesteps); `rng` is on the CPU. Default: none."""
        return batch

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        """Local denominators, one per term, from a batch on the host."""
        raise NotImplementedError(f"{type(self).__name__} states no weights")

    def prepare(self, batch: PackedBatch, rng: torch.Generator) -> PackedBatch:
        """Work without gradient on the device before the forward (frozen encoders, noise). Default: none."""
        return batch

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Float32 scalar sums, the same keys as `coefficients`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def drawings(self, processor: Processor, device: torch.device, rng: torch.Generator) -> list[Drawing]:
        """Pictures that the model makes now, for the report; `rng` is on the CPU. Default: none.

        All ranks call it together, with equal generators, in evaluation mode.
        """
        return []
