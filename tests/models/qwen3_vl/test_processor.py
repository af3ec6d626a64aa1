"""Qwen3-VL: time stamps, positions and tower inputs equal the library's own."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from data_prep.clips import write_clip
from data_prep.processors import qwen3_vl
from lmms_engine.datasets.processor.pixels import tower_kwargs
from lmms_engine.datasets.schema import parse_row
from lmms_engine.models.qwen3_vl.processor import Qwen3VLProcessor
from lmms_engine.segments import RowRef

REF = RowRef("test", 0, 0, "row")


@pytest.fixture(scope="module")
def config() -> Qwen3VLConfig:
    text = {"vocab_size": 544, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision)


@pytest.fixture(scope="module")
def processor(config: Qwen3VLConfig, tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLProcessor:
    folder = tmp_path_factory.mktemp("processor")
    qwen3_vl().save_pretrained(folder)
    return Qwen3VLProcessor.from_pretrained(folder, config=config, fps=2.0)


@pytest.fixture(scope="module")
def model(config: Qwen3VLConfig) -> Any:
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).model.eval()


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
        Image.new("RGB", (64, 96), (i * 9, 0, 0)).save(folder / "frames" / f"{i:03}.png")
    return {"type": "video", "path": "frames", "fps": fps}


def stamps(processor: Qwen3VLProcessor, sample: Any) -> list[str]:
    text = processor.tokenizer.decode(sample.input_ids)
    return [piece.split("<")[-1] for piece in text.split(" seconds>")[:-1]]


def test_stamps_of_a_clip_spread_over_the_file(processor: Qwen3VLProcessor, tmp_path: Path) -> None:
    times = [Fraction(i, 30) for i in range(240)]
    write_clip(tmp_path / "c.mp4", [np.full((32, 32, 3), i, np.uint8) for i in range(240)], times)
    sample = processor(ask(tmp_path, {"type": "video", "path": "c.mp4"}), REF)
    assert stamps(processor, sample) == ["0.3", "1.3", "2.4", "3.5", "4.5", "5.6", "6.6", "7.7"]


def test_stamps_of_extracted_frames(processor: Qwen3VLProcessor, tmp_path: Path) -> None:
    sample = processor(ask(tmp_path, frame_folder(tmp_path, 16, 2.0)), REF)
    assert stamps(processor, sample) == ["0.2", "1.2", "2.2", "3.2", "4.2", "5.2", "6.2", "7.2"]


def test_positions_equal_the_librarys(processor: Qwen3VLProcessor, model: Any, tmp_path: Path) -> None:
    parts = [picture(tmp_path, 100, 160), frame_folder(tmp_path, 7, 1.7), picture(tmp_path, 200, 40)]
    sample = processor(ask(tmp_path, *parts), REF)
    ids, grids = sample.input_ids[None], sample.media["image_grid_thw"]
    types = (ids == processor.image_token).int() + 2 * (ids == processor.video_token).int()
    theirs, _ = model.get_rope_index(
        ids, mm_token_type_ids=types, image_grid_thw=grids[[0, 2]], video_grid_thw=grids[[1]]
    )
    assert torch.equal(sample.position_ids, theirs[:, 0])


def test_tower_inputs_change_nothing(processor: Qwen3VLProcessor, model: Any, tmp_path: Path) -> None:
    parts = [picture(tmp_path, 100, 160), frame_folder(tmp_path, 7, 1.7), picture(tmp_path, 200, 40)]
    media = processor(ask(tmp_path, *parts), REF).media
    inputs = tower_kwargs(media, processor.tower_inputs(media))
    values, grids = inputs.pop("pixel_values"), inputs.pop("image_grid_thw")
    assert isinstance(inputs["image_max_seqlen"], int)
    with torch.no_grad():
        plain = model.get_image_features(values, grids, return_dict=True)
        given = model.get_image_features(
            values, grids, return_dict=True, **inputs
        )
        # If they were ignored, wrong ones would change nothing either.
        wrong = {**inputs, "image_interp_weights": inputs["image_interp_weights"] * 0}
        other = model.get_image_features(
            values, grids, return_dict=True, **wrong
        )
    for one, two, three in zip(plain.pooler_output, given.pooler_output, other.pooler_output, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert torch.equal(plain.deepstack_features[0], given.deepstack_features[0])
