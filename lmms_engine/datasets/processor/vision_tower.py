"""Index tensors of vision towers, from grids alone.

The library's towers compute these on the device from `grid_thw`, which costs a host sync for each. Here they
are computed in the worker, equal to the library's bit for bit (tested), and handed over as keyword arguments.

A grid is (t, h, w) in patches: t frames (or groups of frames) of h x w. Patches are ordered frame by frame,
and inside a frame by blocks of merge x merge patches. P patches in all, B = P / merge² blocks.
"""

from __future__ import annotations

import numpy as np


def frame_offsets(grids: np.ndarray) -> np.ndarray:
    """Where each frame begins, int32 [frames + 1]; a frame attends to itself only."""
    return _offsets(np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0]))


def patch_positions(grids: np.ndarray, merge: int) -> np.ndarray:
    """Row and column of every patch in its frame, int64 [P, 2]."""
    return np.concatenate([np.tile(_frame_positions(h, w, merge), (t, 1)) for t, h, w in grids.tolist()])


def table_taps(grids: np.ndarray, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear reading of a side x side table stretched corner to corner over each frame.

    Returns four entries of the flattened table per patch, int64 [P, 4], and their weights, float32 [P, 4].
    """
    indices, weights = [], []
    for t, h, w in grids.tolist():
        at = _frame_positions(h, w, merge)
        (rows, row_weights), (columns, column_weights) = _taps(at[:, 0], h, side), _taps(at[:, 1], w, side)
        index = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
        weight = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)
        indices.append(np.tile(index, (t, 1)))
        weights.append(np.tile(weight, (t, 1)))
    return np.concatenate(indices), np.concatenate(weights)


def windows(grids: np.ndarray, merge: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention windows of window x window blocks, cut off at the frame's right and lower edges.

    Returns the order that brings blocks of one window together, int64 [B], and where each window begins among
    the patches, int32 [windows + 1].
    """
    order, lengths, start = [], [], 0
    for t, h, w in (grids // [1, merge, merge]).tolist():
        tops, lefts = range(0, h, window), range(0, w, window)
        blocks = np.arange(t * h * w).reshape(t, h, w) + start
        for frame in blocks:
            cells = [frame[a : a + window, b : b + window].ravel() for a in tops for b in lefts]
            order.extend(cells)
            lengths.extend(cell.size * merge**2 for cell in cells)
        start += t * h * w
    return np.concatenate(order), _offsets(np.array(lengths))


def longest(offsets: np.ndarray) -> int:
    """The largest gap between neighbouring offsets."""
    return int(np.diff(offsets).max())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _frame_positions(h: int, w: int, merge: int) -> np.ndarray:
    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    blocks = (h // merge, merge, w // merge, merge)
    return np.stack([axis.reshape(blocks).swapaxes(1, 2).ravel() for axis in (rows, columns)], axis=-1)


def _taps(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two nearest entries on one axis, [n, 2], and their weights; float32 as on the device."""
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    raw = floor.astype(np.int64)[:, None] + np.arange(2)
    distance = np.abs(source[:, None] - floor[:, None] - np.arange(2, dtype=np.float32))
    return np.clip(raw, 0, side - 1), np.maximum(np.float32(1) - distance, np.float32(0))
