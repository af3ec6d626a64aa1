"""Pixels on their way: bytes from the workers, floats at the model.

The library's processors hand out patches as float32, and a picture is repeated along time to fill a patch
that is several frames deep: eight times the bytes of the picture. Here a worker sends every pixel once, and
`tower_kwargs` makes of it, on the batch's device, what those processors make: bit for bit, as these are the
same operations in the same order.

In the media of a sample or batch of n visuals and P patches, T frames deep:

    pixel_bytes    uint8 [P, 3·p²]           the first frame of every patch, by channel, row, column
    later_bytes    uint8 [Q, T - 1, 3·p²]    the other frames of the Q patches of clips; none for pictures
    patch_frames   int64 [n]                 frames that a patch of each visual holds: 1 (picture) or T (clip)

and, for the batch as a whole, among its tower inputs: `pixel_levels` float32 [2, 3], what is subtracted from
each channel and what it is divided by; `pixel_depth`, T; `clip_patches` int64 [Q], which patches are clips'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.processor.base import KeyRule

KEYS = {"pixel_bytes": KeyRule(0), "later_bytes": KeyRule(0), "patch_frames": KeyRule(0)}
INPUTS = ("pixel_levels", "pixel_depth", "clip_patches")


def cut_patches(pixels: Tensor, patch: int, merge: int) -> Tensor:
    """A picture uint8 [3, H, W] as patches [P, 3·patch²], those of one merge x merge block together."""
    channels, height, width = pixels.shape
    rows, columns = height // patch // merge, width // patch // merge
    # From the back: pixels lie channel by channel inside each other, in which order NumPy copies fastest.
    blocks = pixels.permute(1, 2, 0).numpy().reshape(rows, merge, patch, columns, merge, patch, channels)
    ordered = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5))
    return torch.from_numpy(ordered).view(-1, channels * patch**2)


def group_frames(frames: Sequence[Tensor], depth: int) -> tuple[Tensor, Tensor | None]:
    """The patches of a clip's frames, each [h·w, D], as first frames [P, D] and later ones [P, T - 1, D].

    The number of frames is a multiple of `depth`, T; where that is 1 there are no later ones.
    """
    stacked = torch.stack(list(frames)).unflatten(0, (-1, depth))    # [t, T, h·w, D]
    later = stacked[:, 1:].transpose(1, 2).flatten(0, 1) if depth > 1 else None
    return stacked[:, 0].flatten(0, 1), later


def pixel_inputs(media: Mapping[str, Tensor], levels: Tensor, depth: int) -> dict[str, Tensor | int]:
    """What `tower_kwargs` needs besides the media of a whole batch; from the host."""
    inputs: dict[str, Tensor | int] = {"pixel_levels": levels, "pixel_depth": depth}
    if "later_bytes" in media:
        patches = media["image_grid_thw"].prod(1)
        moving = (media["patch_frames"] > 1).repeat_interleave(patches)
        inputs["clip_patches"] = moving.nonzero().flatten()
    return inputs


def tower_kwargs(media: Mapping[str, Tensor], tower: Mapping[str, Any]) -> dict[str, Any]:
    """The model's keyword arguments, `pixel_values` float32 [P, 3·T·p²] among them.

    Media that hold `pixel_values` already are handed on as they are.
    """
    if "pixel_bytes" not in media:
        return {**media, **tower}
    rest = {**{k: v for k, v in media.items() if k not in KEYS}, **tower}
    levels, depth, moving = (rest.pop(name, None) for name in INPUTS)
    mean, std = levels[:, :, None, None]                             # [3, 1, 1]
    first = media["pixel_bytes"].unflatten(1, (3, 1, -1))            # [P, 3, 1, p²]
    values = levels.new_empty((len(first), 3, depth, first.shape[-1]))
    # Written where they stay and once for all frames: on a CPU, memory is most of what this costs.
    values[:, :, :1] = first
    values[:, :, :1].sub_(mean).div_(std)
    values[:, :, 1:] = values[:, :, :1]
    if moving is not None:
        later = media["later_bytes"].unflatten(2, (3, -1)).transpose(1, 2)   # [Q, 3, T - 1, p²]
        values[moving, :, 1:] = later.float().sub_(mean).div_(std)
    return {**rest, "pixel_values": values.flatten(1)}
