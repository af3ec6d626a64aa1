"""A batch that several ranks share: parts that join to the whole, filled up with what counts nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.segments import RowRef, Segments


def batch(lengths: list[int], *, rotary: bool = True, spans: bool = False) -> PackedBatch:
    tokens = sum(lengths)
    weights = (torch.arange(tokens) % 3 == 1).float()
    segments = Segments.from_lengths(lengths)
    if spans:
        segments = replace(segments, spans=torch.zeros(tokens, dtype=torch.int64))
    return PackedBatch(
        segments=segments,
        input_ids=torch.arange(tokens) + 5,
        position_ids=torch.arange(3 * tokens).view(3, tokens) if rotary else torch.arange(tokens),
        labels=(torch.arange(tokens) + 6).masked_fill(weights == 0, -100),
        loss_weights=weights,
        media={"pixel_values": torch.ones(2, 3)},
        rows=tuple(RowRef("s", 0, i, f"s-{i}") for i in range(len(lengths))),
    )


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [[1], [7], [5, 1, 9, 7], [8]])
@pytest.mark.parametrize("rotary", [True, False])
def test_the_parts_join_to_the_whole(lengths, size, rotary):
    whole = batch(lengths, rotary=rotary)
    tokens = sum(lengths)
    extra = -tokens % size
    filled = torch.arange(extra).expand(*whole.position_ids.shape[:-1], extra)
    parts = [whole.shard(rank, size) for rank in range(size)]
    labels = torch.cat([part.labels for part in parts])
    weights = torch.cat([part.loss_weights for part in parts])
    assert len({part.labels.numel() for part in parts}) == 1
    assert torch.equal(labels[:tokens], whole.labels)
    assert torch.equal(weights[:tokens], whole.loss_weights)
    assert labels[tokens:].tolist() == [-100] * extra
    assert weights[tokens:].tolist() == [0.0] * extra
    for part in parts:
        assert part.segments.lengths() == [*lengths, *([extra] if extra else [])]
        assert part.segments.max_len == max(part.segments.lengths())
        assert part.input_ids[:tokens].equal(whole.input_ids)
        assert part.position_ids.shape[-1] == part.input_ids.numel() == tokens + extra
        assert part.position_ids[..., :tokens].equal(whole.position_ids)
        assert part.position_ids[..., tokens:].equal(filled)
        assert part.num_tokens == tokens   # what fills up counts as no token and no row
        assert part.row_lengths() == lengths
        assert part.media is whole.media
        on_device = part.to(torch.device("cpu"))
        assert on_device.supervised.tolist() == (part.loss_weights > 0).nonzero().flatten().tolist()


def test_the_way_to_the_device_rounds_nothing():
    """Integers stay int64 and rates float32, also past 256, where bfloat16 has gaps."""
    tokens = 4096
    media = {
        "pixel_bytes": torch.zeros(2, 3, dtype=torch.uint8),
        "image_grid_thw": torch.tensor([[1, 259, 4095]]),
        "seconds_per_group": torch.tensor([1 / 3, 0.07]),
    }
    whole = replace(batch([tokens]), media=media, tower={"image_position_ids": torch.arange(tokens)})
    moved = whole.shard(1, 2).to(torch.device("cpu"))
    assert torch.equal(moved.position_ids, whole.position_ids)
    assert torch.equal(moved.input_ids, whole.input_ids)
    assert torch.equal(moved.tower["image_position_ids"], torch.arange(tokens))
    assert {name: tensor.dtype for name, tensor in moved.media.items()} == {
        "pixel_bytes": torch.uint8, "image_grid_thw": torch.int64, "seconds_per_group": torch.float32
    }  # fmt: skip
    assert all(torch.equal(moved.media[name], tensor) for name, tensor in media.items())
    assert moved.segments.cu_seqlens.tolist() == [0, tokens]


def test_one_rank_keeps_the_batch():
    whole = batch([7])
    assert whole.shard(0, 1) is whole


def test_spans_do_not_reach_into_what_fills_up():
    part = batch([5], spans=True).shard(0, 4)
    assert part.segments.spans.tolist() == [0] * 5 + [-1] * 3


def test_groups_are_cut_with_the_targets():
    whole = batch([5, 2]).with_groups(["s"])
    parts = [whole.shard(rank, 4).groups.tolist() for rank in range(4)]
    assert parts == [[0, 0], [0, 0], [0, 0], [0, -1]]
