"""Joining samples: order, boundaries, stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmms_engine.datasets.collate import collate, finish, join_samples
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import ByteProcessor, content


def sample(id_: str, text: str, *pictures: bytes) -> Sample:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": "ok"},
    ]
    return ByteProcessor()(parse_row({"messages": turns}, Path("/")), RowRef("s", 0, 0, id_))


SAMPLES = [sample("a", "one", b"1", b"2"), sample("b", "three"), sample("c", "5", b"3")]


def test_samples_are_joined_in_order() -> None:
    batch = collate(SAMPLES, ByteProcessor())
    assert batch.segments.lengths() == [len(s) for s in SAMPLES] == batch.row_lengths()
    assert [row.id for row in batch.rows] == ["a", "b", "c"]
    for name in ("input_ids", "labels", "loss_weights"):
        assert torch.equal(getattr(batch, name), torch.cat([getattr(s, name) for s in SAMPLES]))
    assert torch.equal(batch.position_ids, torch.cat([s.position_ids for s in SAMPLES], dim=1))
    assert torch.equal(
        batch.media["pixel_values"], torch.cat([s.media["pixel_values"] for s in SAMPLES if s.media])
    )
    assert batch.media["image_grid_thw"].tolist() == [[1, 1, 1]] * 3
    assert batch.tower == {"image_max_seqlen": 1}
    assert batch.row_supervised() == [2, 2, 2]


def test_a_batch_without_pictures_gets_one_weightless_stand_in() -> None:
    batch = collate([SAMPLES[1]], ByteProcessor())
    real = len(SAMPLES[1])
    assert batch.segments.lengths() == [real, 1]
    assert (batch.num_tokens, len(batch.rows), batch.row_lengths()) == (real, 1, [real])
    assert batch.media["image_grid_thw"].tolist() == [[1, 1, 1]]
    assert batch.loss_weights[real:].tolist() == [0.0]
    assert batch.labels[real:].tolist() == [-100]
    assert torch.equal(batch.input_ids[:real], SAMPLES[1].input_ids)
    assert collate([SAMPLES[0]], ByteProcessor()).segments.num_segments == 1


@pytest.mark.parametrize("with_stand_in", [True, False])
def test_a_batch_of_nothing_weighs_nothing(with_stand_in: bool) -> None:
    batch = finish([], ByteProcessor(with_stand_in))
    assert (batch.rows, batch.num_tokens, float(batch.loss_weights.sum())) == ((), 0, 0.0)
    assert batch.input_ids.numel() == 1
    assert bool(batch.media) == with_stand_in


def test_joining_packs_equals_joining_their_samples() -> None:
    processor = ByteProcessor()
    packs = [join_samples(SAMPLES[:2], processor), join_samples(SAMPLES[2:], processor)]
    assert content(finish(packs, processor)) == content(collate(SAMPLES, processor))
    text_only = [join_samples([SAMPLES[1]], processor)] * 2
    assert finish(text_only, processor).segments.num_segments == 3  # one stand-in for both


def test_a_media_key_without_a_rule_is_refused() -> None:
    odd = Sample(**{**vars(SAMPLES[1]), "media": {"input_features": torch.zeros(1)}})
    with pytest.raises(UserError, match=r"'input_features'.*id='b'.*legal: image_grid_thw, pixel_values"):
        collate([odd], ByteProcessor())
