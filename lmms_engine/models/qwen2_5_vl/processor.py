"""Rows for Qwen2.5-VL: a clip is one block of slots, and time is a position.

The temporal position of a clip's frame group k is `int(k * seconds per group * tokens_per_second)`, the
model's published rule; the text after a clip starts at 1 + the largest index on any axis. The pinned
transformers release agrees for whole seconds per group in short clips; it truncates seconds to an integer
and lets the text start inside longer clips, so positions are always passed to the model explicitly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.processor import register_processor
from lmms_engine.datasets.processor.vision_language import Piece, Slots, VisionLanguageProcessor, Visual
from lmms_engine.datasets.processor.vision_tower import frame_offsets, longest, patch_positions, windows


def temporal_steps(groups: int, seconds_per_group: float, tokens_per_second: float) -> tuple[int, ...]:
    """Temporal position of each frame group, counted from the first."""
    # Time stamps are fractions of a second in floating point: a hair under a whole number is that number.
    return tuple(int(k * seconds_per_group * tokens_per_second + 1e-6) for k in range(groups))


@register_processor("qwen2_5_vl")
class Qwen25VLProcessor(VisionLanguageProcessor):
    """See the module's docstring. The video processor's pixel range counts one frame in this family."""

    hf_class = "Qwen2_5_VLProcessor"

    @property
    def identity(self) -> dict[str, Any]:
        """The clock of the model's positions is part of it, where the model is known."""
        rate = None if self._config is None else self.vision_config.tokens_per_second
        return {**super().identity, "tokens_per_second": rate}

    def clip_pieces(self, clip: Visual) -> list[Piece]:
        """All slots of the clip, with temporal positions by the second."""
        t, h, w = clip.grid
        steps = (0,)
        if t > 1:
            seconds = self.temporal_patch / clip.rate
            steps = temporal_steps(t, seconds, self.vision_config.tokens_per_second)
        return [Slots(self.video_token, (t, h // self.merge, w // self.merge), steps)]

    def tower_indices(self, grids: np.ndarray) -> dict[str, Tensor | int]:
        """Boundaries of frames and of attention windows, the windows' order, rotary positions."""
        vision = self.vision_config
        order, edges = windows(grids, self.merge, vision.window_size // self.merge // vision.patch_size)
        frames = frame_offsets(grids)
        return {
            "image_cu_seqlens": torch.from_numpy(frames),
            "image_max_seqlen": longest(frames),
            "image_position_ids": torch.from_numpy(patch_positions(grids, self.merge)),
            "image_window_index": torch.from_numpy(order),
            "image_cu_window_seqlens": torch.from_numpy(edges),
            "image_max_window_seqlen": longest(edges),
        }
