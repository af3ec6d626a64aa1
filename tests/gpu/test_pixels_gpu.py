"""Floats of pixels, made on the GPU, against the CPU's, which are the library's."""

from __future__ import annotations

import pytest
import torch

from lmms_engine.datasets.processor.pixels import pixel_inputs, tower_kwargs

pytestmark = pytest.mark.gpu


def test_floats_are_the_same_on_the_gpu() -> None:
    rng = torch.Generator().manual_seed(0)
    grids = torch.tensor([[1, 8, 6], [3, 4, 8], [1, 4, 4]])
    patches, moving, width = int(grids.prod(1).sum()), 3 * 4 * 8, 3 * 16**2
    media = {
        "pixel_bytes": torch.randint(256, (patches, width), dtype=torch.uint8, generator=rng),
        "later_bytes": torch.randint(256, (moving, 1, width), dtype=torch.uint8, generator=rng),
        "patch_frames": torch.tensor([1, 2, 1]),
        "image_grid_thw": grids,
    }
    levels = torch.tensor([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]) * 255
    tower = pixel_inputs(media, levels, 2)
    expected = tower_kwargs(media, tower)["pixel_values"]
    kept = ("patch_frames", "image_grid_thw", "pixel_depth")
    media, tower = (
        {name: value if name in kept else value.cuda() for name, value in of.items()} for of in (media, tower)
    )
    assert torch.equal(tower_kwargs(media, tower)["pixel_values"].cpu(), expected)
