"""The tower's index tensors equal the library's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from lmms_engine.datasets.processor.vision_tower import (
    frame_offsets,
    longest,
    patch_positions,
    table_taps,
    windows,
)

MERGE = 2
GRIDS = {
    "smallest": [[1, 2, 2]],
    "picture": [[1, 6, 10]],
    "clip": [[3, 4, 6]],
    "wide": [[1, 2, 60]],
    "mixed": [[1, 8, 8], [2, 2, 12], [1, 34, 18], [5, 10, 4], [1, 2, 2]],
}


@pytest.fixture(params=GRIDS)
def grids(request: pytest.FixtureRequest) -> np.ndarray:
    return np.array(GRIDS[request.param])


def same(ours: np.ndarray, theirs: torch.Tensor) -> None:
    assert str(theirs.dtype).removeprefix("torch.") == str(ours.dtype)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_frame_offsets(grids: np.ndarray) -> None:
    theirs = get_vision_cu_seqlens(torch.from_numpy(grids))
    same(frame_offsets(grids), theirs)
    assert longest(frame_offsets(grids)) == theirs.diff().max().item()


def test_patch_positions(grids: np.ndarray) -> None:
    same(patch_positions(grids, MERGE), get_vision_position_ids(torch.from_numpy(grids), MERGE))


@pytest.mark.parametrize("side", [4, 48])
def test_table_taps(grids: np.ndarray, side: int) -> None:
    theirs = get_vision_interpolation_indices_and_weights(
        torch.from_numpy(grids), side, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    for one, other in zip(table_taps(grids, MERGE, side), theirs, strict=True):
        same(one, other)


@pytest.mark.parametrize("window", [1, 4])
def test_windows(grids: np.ndarray, window: int) -> None:
    theirs = get_vision_window_index(
        torch.from_numpy(grids), spatial_merge_size=MERGE, window_size=window * MERGE * 14, patch_size=14
    )
    for one, other in zip(windows(grids, MERGE, window), theirs, strict=True):
        same(one, other)
