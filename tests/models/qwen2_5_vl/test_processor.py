"""Qwen2.5-VL: temporal positions by the published rule, tower inputs equal to the library's own."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from data_prep.clips import write_clip
from data_prep.processors import qwen2_5_vl
from lmms_engine.datasets.processor.pixels import tower_kwargs
from lmms_engine.datasets.schema import parse_row
from lmms_engine.models.qwen2_5_vl.processor import Qwen25VLProcessor, temporal_steps
from lmms_engine.segments import RowRef

REF = RowRef("test", 0, 0, "row")


@pytest.fixture(scope="module")
def config() -> Qwen2_5_VLConfig:
    text = {"vocab_size": 544, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision)


@pytest.fixture(scope="module")
def processor(config: Qwen2_5_VLConfig, tmp_path_factory: pytest.TempPathFactory) -> Qwen25VLProcessor:
    folder = tmp_path_factory.mktemp("processor")
    qwen2_5_vl().save_pretrained(folder)
    return Qwen25VLProcessor.from_pretrained(folder, config=config, fps=2.0)


@pytest.fixture(scope="module")
def model(config: Qwen2_5_VLConfig) -> Any:
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).model.eval()


def ask(folder: Path, *parts: dict[str, Any]) -> Any:
    content = [*parts, {"type": "text", "text": "what?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "that"}]
    return parse_row({"messages": turns}, folder)


def picture(folder: Path, width: int, height: int) -> dict[str, str]:
    name = f"{width}x{height}.png"
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return {"type": "image", "path": name}


def frame_folder(folder: Path, count: int, fps: float) -> dict[str, Any]:
    (folder / "frames").mkdir()
    for i in range(count):
        Image.new("RGB", (56, 84), (i * 9, 0, 0)).save(folder / "frames" / f"{i:03}.png")
    return {"type": "video", "path": "frames", "fps": fps}


STEPS = {1.0: (0, 2, 4, 6), 0.5: (0, 1, 2, 3), 0.75: (0, 1, 3, 4), 1.5: (0, 3, 6, 9), 2.0: (0, 4, 8, 12)}


@pytest.mark.parametrize(("seconds", "expected"), STEPS.items())
def test_the_published_rule(
    processor: Qwen25VLProcessor, tmp_path: Path, seconds: float, expected: tuple[int, ...]
) -> None:
    """Two positions a second, for whole seconds a group and for others."""
    assert temporal_steps(4, seconds, 2) == expected
    sample = processor(ask(tmp_path, frame_folder(tmp_path, 8, 2 / seconds)), REF)
    slots = (sample.input_ids == processor.video_token).nonzero().flatten()
    times = sample.position_ids[0, slots].view(4, -1)
    assert (times == times[:, :1]).all()
    assert tuple((times[:, 0] - times[0, 0]).tolist()) == expected
    # What follows starts after the largest index on any axis.
    assert (sample.position_ids[:, slots[-1] + 1] == sample.position_ids[:, slots].max() + 1).all()


@pytest.mark.parametrize("fps", [2, 4])
@pytest.mark.parametrize("clock", ["steady", "variable"])
def test_the_clock_of_a_file(processor: Qwen25VLProcessor, tmp_path: Path, clock: str, fps: int) -> None:
    """8 s are 16 positions, at either sampling, at a steady rate of 30 or one of 10 and then 30."""
    times = [Fraction(i, 30) for i in range(240)]
    if clock == "variable":
        times = [Fraction(i, 10) for i in range(40)] + [4 + Fraction(i, 30) for i in range(120)]
    write_clip(tmp_path / "c.mp4", [np.zeros((32, 32, 3), np.uint8)] * len(times), times)
    sample = processor(ask(tmp_path, {"type": "video", "path": "c.mp4", "fps": fps}), REF)
    groups = 4 * fps
    assert sample.media["image_grid_thw"][0, 0] == groups
    slots = (sample.input_ids == processor.video_token).nonzero().flatten()
    positions = sample.position_ids[0, slots].view(groups, -1)[:, 0]
    assert (positions - positions[0]).tolist() == list(range(0, 16, 4 // fps))


def test_a_hair_under_a_whole_second_is_that_second() -> None:
    assert temporal_steps(4, 2 * (7.9999999 / 16), 2) == (0, 2, 4, 6)


@pytest.mark.parametrize("fps", [1.0, 2.0])
def test_positions_equal_the_librarys_for_whole_seconds(
    processor: Qwen25VLProcessor, model: Any, tmp_path: Path, fps: float
) -> None:
    # The clip lasts few groups: its height is its largest index, where both rules let the text start alike.
    parts = [picture(tmp_path, 100, 160), picture(tmp_path, 200, 40), frame_folder(tmp_path, 4, fps)]
    if fps == 1.0:
        parts[-1] = {**parts[-1], "end": 2.0}   # one group of two seconds
    sample = processor(ask(tmp_path, *parts), REF)
    ids, grids = sample.input_ids[None], sample.media["image_grid_thw"]
    types = (ids == processor.image_token).int() + 2 * (ids == processor.video_token).int()
    theirs, _ = model.get_rope_index(
        ids,
        mm_token_type_ids=types,
        image_grid_thw=grids[:2],
        video_grid_thw=grids[2:],
        second_per_grid_ts=torch.tensor([2 / fps]),
    )
    assert torch.equal(sample.position_ids, theirs[:, 0])


def test_text_after_a_long_clip_starts_above_it(
    processor: Qwen25VLProcessor, model: Any, tmp_path: Path
) -> None:
    """The published rule. The pinned release counts time alike and lets the text start inside the clip,
    so a trained model is to be given our positions; once this fails, docs/data.md need not say so."""
    sample = processor(ask(tmp_path, frame_folder(tmp_path, 16, 2.0)), REF)
    ids, grids = sample.input_ids[None], sample.media["image_grid_thw"]
    theirs, _ = model.get_rope_index(
        ids,
        mm_token_type_ids=2 * (ids == processor.video_token).int(),
        video_grid_thw=grids,
        second_per_grid_ts=torch.tensor([1.0]),
    )
    slots = (sample.input_ids == processor.video_token).nonzero().flatten()
    after, start = slots[-1] + 1, int(sample.position_ids[0, slots[0]])
    assert torch.equal(sample.position_ids[:, :after], theirs[:, 0, :after])
    assert sample.position_ids[:, after].tolist() == [start + 14 + 1] * 3
    assert theirs[:, 0, after].tolist() == [start + max(grids[0, 1:].tolist()) // 2] * 3


def test_a_picture_beside_a_clip_is_not_scaled(processor: Qwen25VLProcessor, tmp_path: Path) -> None:
    """Its index in time is constant, and that at which the text before it stopped."""
    sample = processor(ask(tmp_path, frame_folder(tmp_path, 8, 1.0), picture(tmp_path, 100, 160)), REF)
    slots = sample.input_ids == processor.image_token
    before = int(slots.nonzero()[0]) - 1
    assert set(sample.position_ids[0, slots].tolist()) == {int(sample.position_ids[0, before]) + 1}


def test_tower_inputs_change_nothing(processor: Qwen25VLProcessor, model: Any, tmp_path: Path) -> None:
    parts = [picture(tmp_path, 170, 160), frame_folder(tmp_path, 7, 1.7), picture(tmp_path, 200, 40)]
    media = processor(ask(tmp_path, *parts), REF).media
    inputs = tower_kwargs(media, processor.tower_inputs(media))
    values, grids = inputs.pop("pixel_values"), inputs.pop("image_grid_thw")
    assert isinstance(inputs["image_max_seqlen"], int)
    assert isinstance(inputs["image_max_window_seqlen"], int)
    edges = inputs["image_cu_window_seqlens"]
    assert inputs["image_max_window_seqlen"] == edges.diff().max()
    with torch.no_grad():
        plain = model.get_image_features(values, grids)
        given = model.get_image_features(values, grids, **inputs)
        # If they were ignored, wrong ones would change nothing either.
        wrong = {**inputs, "image_cu_window_seqlens": edges[[0, -1]]}
        other = model.get_image_features(values, grids, **wrong)
    for one, two in zip(plain.pooler_output, given.pooler_output, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(torch.cat(plain.pooler_output), torch.cat(other.pooler_output))
