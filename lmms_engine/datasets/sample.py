"""One row as a sequence, ready to be packed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lmms_engine.segments import RowRef


@dataclass(frozen=True)
class Sample:
    """A row after its processor: token ids, targets and media under the model's own names.

    A row whose sequence is not text (the patches of a picture) has neither ids nor labels: its T positions
    are those of `loss_weights`, and what stands there is in `media`.

    Labels are shifted here, inside the sample: `labels[t]` is the target of position t, i.e. the token at
    t+1, or -100 where `loss_weights[t]` is 0; the last position never has a target.
    """

    row: RowRef
    input_ids: Tensor | None         # int64 [T]
    labels: Tensor | None            # int64 [T]
    loss_weights: Tensor             # float32 [T]
    position_ids: Tensor             # int64 [T]; [3, T]: time, height, width; [2, T]: row, column
    media: dict[str, Tensor] = field(default_factory=dict)
    truncated: bool = False          # True where `overlong: truncate` shortened the row

    def __len__(self) -> int:
        return self.loss_weights.numel()

    @property
    def supervised(self) -> int:
        """Number of positions with a target."""
        return int((self.loss_weights > 0).sum())
