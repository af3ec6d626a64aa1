"""Pictures and clips as patches, by the library's own rules.

    visuals = Visuals(hf.image_processor, hf.video_processor)
    one = visuals.open(part)                   # decoded, resized, cut
    media = visuals.join([one, other])         # the media tensors of a sample that shows both

The size of a medium and how it is resized come from the library's processors. Its pixels stay bytes
(pixels.py), unless those processors are set to do something with them that is not the usual mean and
deviation; then they are called for the whole work, and the patches are their float32 `pixel_values`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from lmms_engine.datasets.limits import check_size
from lmms_engine.datasets.media import load_picture
from lmms_engine.datasets.processor.pixels import cut_patches, group_frames
from lmms_engine.datasets.video import plan_clip
from lmms_engine.errors import BadRow

if TYPE_CHECKING:
    from lmms_engine.datasets.schema import MediaPart

RESAMPLE = {0: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}


@dataclass(frozen=True)
class Visual:
    """A decoded medium: its patches [t·h·w, dim], its grid in patches, and a clip's clock.

    pixels: uint8, of the first frame in each patch, with the others in `later` for a clip; or float32, of
    all frames.
    """

    kind: Literal["image", "video"]
    pixels: Tensor
    grid: tuple[int, int, int]
    later: Tensor | None = None
    times: np.ndarray | None = None   # seconds of each frame, a multiple of the temporal patch
    rate: float = 0.0                 # frames per second of the sampled clip


class Visuals:
    """See the module's docstring. images, videos: the library's processors, which cut equal patches."""

    def __init__(self, images: Any, videos: Any) -> None:
        self.images, self.videos = images, videos
        self.merge, self.patch = images.merge_size, images.patch_size
        self.temporal_patch = images.temporal_patch_size

    @cached_property
    def levels(self) -> Tensor | None:
        """What the library subtracts from a byte and divides it by, float32 [2, 3]; None if it is set to do
        otherwise, or differently for pictures and clips."""
        pictures, clips = _byte_levels(self.images), _byte_levels(self.videos)
        alike = pictures is not None and clips is not None and torch.equal(pictures, clips)
        return pictures if alike else None

    def open(self, part: MediaPart) -> Visual:
        """The picture or clip; raises BadRow if it cannot be used."""
        return self._picture(load_picture(part)) if part.kind == "image" else self._clip(part)

    def blank(self) -> Visual:
        """A picture of the smallest legal grid, all zeros."""
        grid = (1, self.merge, self.merge)
        depth, dtype = (self.temporal_patch, torch.float32) if self.levels is None else (1, torch.uint8)
        return Visual("image", torch.zeros(math.prod(grid), 3 * depth * self.patch**2, dtype=dtype), grid)

    def join(self, visuals: Sequence[Visual]) -> dict[str, Tensor]:
        """The media tensors of a sample: those of pixels.py, or `pixel_values`, and `image_grid_thw`."""
        patches = [visual.pixels for visual in visuals]
        joined = patches[0].contiguous() if len(patches) == 1 else torch.cat(patches)
        grids = {"image_grid_thw": torch.tensor([visual.grid for visual in visuals])}
        if self.levels is None:
            return {"pixel_values": joined, **grids}
        later = [visual.later for visual in visuals if visual.later is not None]
        frames = [1 if visual.later is None else self.temporal_patch for visual in visuals]
        return {
            "pixel_bytes": joined,
            **({"later_bytes": torch.cat(later)} if later else {}),
            "patch_frames": torch.tensor(frames),
            **grids,
        }

    def _picture(self, picture: Image.Image) -> Visual:
        if self.levels is None:
            # The channel order is said, not guessed: a picture one or three pixels wide is ambiguous.
            out = self.images(images=[picture], input_data_format="channels_first", return_tensors="pt")
            return Visual("image", out["pixel_values"], tuple(out["image_grid_thw"][0].tolist()))
        resized = self.images.resize(
            images=torch.from_numpy(np.array(picture)).permute(2, 0, 1),
            size=self.images.size,
            resample=self.images.resample,
            factor=self.patch * self.merge,
        )
        height, width = (side // self.patch for side in resized.shape[1:])
        return Visual("image", self._patches(resized), (1, height, width))

    def _patches(self, resized: Tensor) -> Tensor:
        return cut_patches(resized, self.patch, self.merge)

    def _clip(self, part: MediaPart) -> Visual:
        """Frames are resized one by one as they are decoded, so that memory holds the small ones only."""
        videos = self.videos
        plan = plan_clip(part, fps=videos.fps, min_frames=videos.min_frames, max_frames=videos.max_frames)
        size, frames, resample = None, [], RESAMPLE[int(videos.resample)]
        for frame in plan.frames():
            image = torch.from_numpy(frame.copy()).permute(2, 0, 1)
            if size is None:
                check_size(frame.shape[1], frame.shape[0], f"clip {part.label}")
                size = self._frame_size(max(len(plan), self.temporal_patch), *frame.shape[:2], part.label)
            small = functional.resize(image, size, resample, antialias=True)
            frames.append(small if self.levels is None else self._patches(small))
        # The last temporal patch is filled with its last frame, as the library does from two frames on.
        missing = -len(frames) % self.temporal_patch
        frames += [frames[-1]] * missing
        times = np.concatenate([plan.times, np.repeat(plan.times[-1:], missing)])
        if self.levels is None:
            first, later, grid = self._clip_floats(frames)
        else:
            first, later = group_frames(frames, self.temporal_patch)
            grid = (len(frames) // self.temporal_patch, *(side // self.patch for side in size))
        return Visual("video", first, grid, later, times, plan.rate)

    def _clip_floats(self, frames: list[Tensor]) -> tuple[Tensor, None, tuple[int, int, int]]:
        """Patches and grid of resized frames by the library's processor."""
        out = self.videos(
            videos=[torch.stack(frames)],
            do_resize=False,
            do_sample_frames=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )
        return out["pixel_values_videos"], None, tuple(out["video_grid_thw"][0].tolist())

    def _frame_size(self, count: int, height: int, width: int, name: str) -> list[int]:
        """Height and width that the library's video processor gives to `count` frames of this size."""
        shape = torch.empty((1, count, 3, height, width), dtype=torch.uint8, device="meta")
        try:
            resized = self.videos.resize(
                videos=shape,
                size=self.videos.size,
                resample=self.videos.resample,
                factor=self.patch * self.merge,
                temporal_factor=self.temporal_patch,
                cap_pixels_per_frame=self.videos.cap_pixels_per_frame,
            )
        except ValueError as error:   # raised for an aspect ratio that the enlargement of tiny frames bends
            raise BadRow("aspect_ratio", f"clip {name} of {width}×{height} pixels: {error}") from None
        return list(resized.shape[-2:])


def _byte_levels(processor: Any) -> Tensor | None:
    """Mean and deviation by channel in bytes, as the library fuses them, float32 [2, 3]; None if it is set
    to do anything else with pixels."""
    if not (processor.do_resize and processor.do_rescale and processor.do_normalize):
        return None
    return torch.tensor([processor.image_mean, processor.image_std]) * (1.0 / processor.rescale_factor)
