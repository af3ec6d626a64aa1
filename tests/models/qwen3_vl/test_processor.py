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
from tests.datasets.test_video import SECOND, drawn

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


EIGHT_SECONDS = {
    "steady": [Fraction(i, 30) for i in range(240)],
    "variable": [Fraction(i, 10) for i in range(40)] + [4 + Fraction(i, 30) for i in range(120)],
}
# Of a steady file, by the library's own even spread over its frames
SPREAD = {
    2: "0.3 1.3 2.4 3.5 4.5 5.6 6.6 7.7",
    4: "0.1 0.6 1.2 1.7 2.2 2.7 3.2 3.7 4.2 4.8 5.3 5.8 6.3 6.8 7.3 7.8",
}
# Of frames that were extracted at this rate: the middles of their pairs
EXTRACTED = {
    2: "0.2 1.2 2.2 3.2 4.2 5.2 6.2 7.2",
    4: "0.1 0.6 1.1 1.6 2.1 2.6 3.1 3.6 4.1 4.6 5.1 5.6 6.1 6.6 7.1 7.6",
}


def shown(sample: Any) -> np.ndarray:
    """The second that each frame group shows, by how bright it is."""
    groups = int(sample.media["image_grid_thw"][0, 0])
    pixels = torch.cat([sample.media["pixel_bytes"][:, None], sample.media["later_bytes"]], dim=1).float()
    return (pixels.view(groups, -1).mean(1).numpy() - 20) / SECOND


@pytest.mark.parametrize("fps", [2, 4])
@pytest.mark.parametrize("clock", EIGHT_SECONDS)
def test_stamps_of_a_clip_spread_over_the_file(
    processor: Qwen3VLProcessor, tmp_path: Path, clock: str, fps: int
) -> None:
    """8 s that show their time. A group shows what its stamp says, whatever the rate of the file."""
    times = EIGHT_SECONDS[clock]
    write_clip(tmp_path / "c.mp4", drawn(times), times)
    sample = processor(ask(tmp_path, {"type": "video", "path": "c.mp4", "fps": fps}), REF)
    assert sample.media["image_grid_thw"].tolist() == [[4 * fps, 2, 2]]
    said = stamps(processor, sample)
    if clock == "steady":
        assert said == SPREAD[fps].split()
    assert len(said) == 4 * fps
    # A stamp is rounded to a tenth, and the brightness to a 24th of a second.
    np.testing.assert_allclose(np.array(said, dtype=float), shown(sample), atol=0.05 + 0.06)


@pytest.mark.parametrize("fps", [2, 4])
def test_stamps_of_extracted_frames(processor: Qwen3VLProcessor, tmp_path: Path, fps: int) -> None:
    """They are not sampled again, and keep the rate they were taken at."""
    sample = processor(ask(tmp_path, frame_folder(tmp_path, 8 * fps, fps)), REF)
    assert stamps(processor, sample) == EXTRACTED[fps].split()


def test_a_picture_beside_a_clip_has_no_clock(processor: Qwen3VLProcessor, tmp_path: Path) -> None:
    """It is not scaled like a clip: one index in time, rows and columns from there."""
    parts = [frame_folder(tmp_path, 16, 2.0), picture(tmp_path, 100, 160)]
    sample = processor(ask(tmp_path, *parts), REF)
    assert len(stamps(processor, sample)) == 8
    slots = (sample.input_ids == processor.image_token).nonzero().flatten()
    times, rows, columns = sample.position_ids[:, slots]
    first = int(sample.position_ids[0, slots[0] - 1]) + 1
    assert set(times.tolist()) == {first}
    assert (int(rows.min()), int(columns.min())) == (first, first)


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
