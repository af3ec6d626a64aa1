"""Pixels travel once and as bytes; the floats that the model gets are the library's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.processor.pixels import KEYS, cut_patches, group_frames, pixel_inputs, tower_kwargs
from lmms_engine.datasets.sample import Sample

CPU = torch.device("cpu")


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def picture(folder: Path, width: int, height: int, name: str) -> dict[str, str]:
    Image.fromarray(random_bytes(height, width, 3, seed=width).numpy()).save(folder / name)
    return {"type": "image", "path": name}


def frames(folder: Path, count: int, name: str = "frames") -> dict[str, Any]:
    (folder / name).mkdir()
    for i in range(count):
        Image.fromarray(random_bytes(96, 64, 3, seed=i).numpy()).save(folder / name / f"{i:02}.png")
    return {"type": "video", "path": name, "fps": 2.0}


@pytest.mark.parametrize("strided", [False, True])
def test_patches_are_cut_block_by_block(strided: bool) -> None:
    patch, merge, rows, columns = 3, 2, 4, 6
    pixels = random_bytes(3, rows * patch, columns * patch)
    if strided:   # as pictures come: channel by channel inside each pixel
        pixels = pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    expected = [
        pixels[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].reshape(-1)
        for block_y in range(0, rows, merge)
        for block_x in range(0, columns, merge)
        for y in range(block_y, block_y + merge)
        for x in range(block_x, block_x + merge)
    ]
    assert torch.equal(cut_patches(pixels, patch, merge), torch.stack(expected))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_floats_of_pictures_and_clips_in_any_order(depth: int) -> None:
    levels = torch.tensor([[10.0, 20.5, 30.0], [3.0, 4.0, 7.0]])
    mean, std = levels[:, :, None]
    area, shapes = 4, [(1, 2, 2), (2, 2, 4), (1, 4, 2), (1, 2, 2)]
    moving = [False, True, False, True]
    first, later, expected = [], [], []
    for i, ((t, h, w), moves) in enumerate(zip(shapes, moving, strict=True)):
        shots = [random_bytes(h * w, 3 * area, seed=10 * i + k) for k in range(t * depth if moves else 1)]
        if moves:
            own, others = group_frames(shots, depth)
            later += [] if others is None else [others]
        else:
            own = shots[0]
        first.append(own)
        for group in range(t):
            shown = shots[group * depth : (group + 1) * depth] if moves else shots * depth
            floats = [(frame.view(h * w, 3, area).float() - mean) / std for frame in shown]
            expected.append(torch.stack(floats, dim=2).flatten(1))
    media = {
        "pixel_bytes": torch.cat(first),
        **({"later_bytes": torch.cat(later)} if later else {}),
        "patch_frames": torch.tensor([depth if moves else 1 for moves in moving]),
        "image_grid_thw": torch.tensor(shapes),
    }
    out = tower_kwargs(media, pixel_inputs(media, levels, depth))
    assert out.keys() == {"pixel_values", "image_grid_thw"}   # the library's own names, nothing else
    assert torch.equal(out["pixel_values"], torch.cat(expected))


def test_a_pack_gives_the_floats_of_its_rows(build: Callable, sample: Callable, tmp_path: Path) -> None:
    processor = build()
    one, other = picture(tmp_path, 150, 100, "a.png"), picture(tmp_path, 64, 90, "b.png")
    rows = [
        sample(processor, [one], "a"),
        sample(processor, [{"type": "text", "text": "no picture"}], "b"),
        sample(processor, [frames(tmp_path, 5), other], "c"),
        sample(processor, [one, frames(tmp_path, 2, "short")], "d"),
    ]

    def floats(samples: list[Sample]) -> Tensor:
        batch = collate(samples, processor).to(CPU)
        return tower_kwargs(batch.media, batch.tower)["pixel_values"]

    alone = torch.cat([floats([row]) for row in rows if row.media])
    assert alone.dtype == torch.float32
    assert torch.equal(floats(rows), alone)
    without = collate(rows[1:2], processor)   # the stand-in's tensors join the others'
    assert without.media["pixel_bytes"].shape == rows[0].media["pixel_bytes"][:4].shape
    assert not floats(rows[1:2]).isnan().any()


def test_a_picture_travels_as_an_eighth(build: Callable, sample: Callable, tmp_path: Path) -> None:
    processor = build()
    media = sample(processor, [picture(tmp_path, 200, 200, "a.png")], "a").media
    values = tower_kwargs(media, processor.tower_inputs(media))["pixel_values"]
    sent = sum(tensor.nbytes for key, tensor in media.items() if key in KEYS)
    assert media["pixel_bytes"].nbytes * 8 == values.nbytes
    assert sent - media["pixel_bytes"].nbytes == 8   # one number for the picture


def test_the_host_keeps_what_it_asks_for(build: Callable, sample: Callable, tmp_path: Path) -> None:
    processor = build()
    batch = collate([sample(processor, [frames(tmp_path, 4)], "a")], processor)
    moved = batch.to(torch.device("meta"))
    here = {name for name, tensor in {**moved.media, **moved.tower}.items() if not _is_meta(tensor)}
    assert {"patch_frames", "image_grid_thw", "pixel_depth"} <= here
    assert not here & {"pixel_bytes", "later_bytes", "pixel_levels", "clip_patches"}
    assert tower_kwargs(moved.media, moved.tower)["pixel_values"].is_meta   # asks the device for nothing


def _is_meta(value: Tensor | int) -> bool:
    return isinstance(value, Tensor) and value.is_meta


OTHERWISE = {
    "no rescaling": {"do_rescale": False},
    "no mean": {"do_normalize": False},
    "no resizing": {"do_resize": False},
    "another mean for clips": {"image_mean": [0.1, 0.2, 0.3]},
}


@pytest.mark.parametrize("change", OTHERWISE)
def test_a_processor_set_otherwise_does_it_all_itself(
    build: Callable, sample: Callable, tmp_path: Path, change: str
) -> None:
    processor = build()
    for name, value in OTHERWISE[change].items():
        for of in (processor.videos,) if "clips" in change else (processor.images, processor.videos):
            setattr(of, name, value)
    side = 4 * processor.patch * processor.merge
    media = sample(processor, [picture(tmp_path, side, side, "a.png"), frames(tmp_path, 4)], "a").media
    theirs = processor.images(images=[Image.open(tmp_path / "a.png")], return_tensors="pt")["pixel_values"]
    assert media.keys() == {"pixel_values", "image_grid_thw"}
    assert torch.equal(media["pixel_values"][: len(theirs)], theirs)
    assert media["pixel_values"].dtype == processor.stand_in().media["pixel_values"].dtype
    passed = tower_kwargs(media, processor.tower_inputs(media))
    assert passed["pixel_values"] is media["pixel_values"]
