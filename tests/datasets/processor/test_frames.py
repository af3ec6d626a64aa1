"""A clip that is a list of pictures is, to a model, the same as the folder that holds them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lmms_engine.datasets.sample import Sample
from lmms_engine.errors import BadRow


def write_frames(folder: Path, count: int) -> list[str]:
    """Names of pictures that were written."""
    folder.mkdir()
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return [f"{folder.name}/{i:03}.png" for i in range(count)]


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_list_is_the_folder(
    build: Callable[..., Any], sample: Callable[..., Sample], tmp_path: Path, count: int
) -> None:
    processor = build()
    names: list[Any] = list(write_frames(tmp_path / "frames", count))
    data = base64.b64encode((tmp_path / names[-1]).read_bytes()).decode()
    names[-1] = f"data:image/png;base64,{data}"
    text = {"type": "text", "text": "What happens?"}
    listed = sample(processor, [{"type": "video", "video": names, "fps": 2}, text], "a")
    folder = sample(processor, [{"type": "video", "video": "frames", "fps": 2}, text], "a")
    assert torch.equal(listed.input_ids, folder.input_ids)
    assert torch.equal(listed.position_ids, folder.position_ids)
    assert listed.media.keys() == folder.media.keys()
    assert all(torch.equal(listed.media[key], tensor) for key, tensor in folder.media.items())
    if count > 2:   # more than one group: the rate tells how far apart they are
        slower = sample(processor, [{"type": "video", "video": names, "fps": 1}, text], "a")
        ids = torch.equal(slower.input_ids, listed.input_ids)
        assert not (ids and torch.equal(slower.position_ids, listed.position_ids))


def test_a_list_without_a_rate_is_refused(
    build: Callable[..., Any], sample: Callable[..., Sample], tmp_path: Path
) -> None:
    names = write_frames(tmp_path / "frames", 2)
    with pytest.raises(BadRow, match="need their rate") as caught:
        sample(build(), [{"type": "video", "video": names}, {"type": "text", "text": "?"}], "a")
    assert caught.value.kind == "video_rate"
