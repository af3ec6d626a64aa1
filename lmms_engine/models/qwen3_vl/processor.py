"""Rows for Qwen3-VL: clips are written frame group by frame group, each after its time stamp.

A clip's placeholder becomes, for every group of two frames, `<1.3 seconds>` (the middle between its first
and last frame), a start mark, the slots, an end mark. For positions every group is a picture. The template's
own marks around the placeholder stay, as in the pinned transformers release.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.processor import register_processor
from lmms_engine.datasets.processor.vision_language import Piece, Slots, VisionLanguageProcessor, Visual
from lmms_engine.datasets.processor.vision_tower import frame_offsets, longest, patch_positions, table_taps


@register_processor("qwen3_vl")
class Qwen3VLProcessor(VisionLanguageProcessor):
    """See the module's docstring. The video processor's pixel range counts a whole clip in this family."""

    hf_class = "Qwen3VLProcessor"

    def clip_pieces(self, clip: Visual) -> list[Piece]:
        """Time stamp, marks and slots of every frame group."""
        t, h, w = clip.grid
        slots = Slots(self.video_token, (1, h // self.merge, w // self.merge))
        groups = clip.times.reshape(t, self.temporal_patch)
        stamps = [f"<{(group[0] + group[-1]) / 2:.1f} seconds>" for group in groups]
        texts = self.tokenizer(stamps, add_special_tokens=False)["input_ids"]
        pieces: list[Piece] = []
        for text in texts:
            pieces += [[*text, self.vision_start], slots, [self.vision_end]]
        return pieces

    def tower_indices(self, grids: np.ndarray) -> dict[str, Tensor | int]:
        """Frame boundaries, rotary positions, and the taps into the learned position table."""
        side = int(self.vision_config.num_position_embeddings**0.5)
        taps, weights = table_taps(grids, self.merge, side)
        frames = frame_offsets(grids)
        return {
            "image_cu_seqlens": torch.from_numpy(frames),
            "image_max_seqlen": longest(frames),
            "image_position_ids": torch.from_numpy(patch_positions(grids, self.merge)),
            "image_interp_indices": torch.from_numpy(taps),
            "image_interp_weights": torch.from_numpy(weights),
        }

    def _cap_frames(self, max_pixels: int) -> None:
        # The library states this family's limit per frame in slots, and never goes below the least clip size.
        unit = (self.patch * self.merge) ** 2
        self.videos.max_video_tokens = max(1, max_pixels // unit)
        least = min(self.videos.size.shortest_edge, int(max(max_pixels, unit) / 1.05))
        self.videos.size = type(self.videos.size)(
            shortest_edge=least, longest_edge=self.videos.size.longest_edge
        )
