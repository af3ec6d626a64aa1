"""One tokenised row, ready to be packed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lmms_engine.segments import RowRef


@dataclass(frozen=True)
class Sample:
    """A row after its processor: token ids, targets and media under the model's own names.

    Labels are shifted here, inside the sample: `labels[t]` is the target of position t, i.e. the token at
    t+1, or -100 where `loss_weights[t]` is 0; the last position never has a target.
    """

    row: RowRef
    input_ids: Tensor                # int64 [T]
    labels: Tensor                   # int64 [T]
    loss_weights: Tensor             # float32 [T]
    position_ids: Tensor             # int64 [T], or [3, T] for M-RoPE (time, height, width)
    media: dict[str, Tensor] = field(default_factory=dict)
    truncated: bool = False          # True where `overlong: truncate` shortened the row

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def supervised(self) -> int:
        """Number of positions with a target."""
        return int((self.loss_weights > 0).sum())
