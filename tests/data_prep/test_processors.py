"""The processor folders, opened by transformers' own Auto classes as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from transformers.video_utils import VideoMetadata

from data_prep.clips import read_clip
from data_prep.processors import PROCESSORS
from data_prep.shapes import Shape, picture
from data_prep.tokenizer import CHAT_TEMPLATE, IDS, build_tokenizer

CLASSES = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
PATCH = {"qwen3_vl": 16, "qwen2_5_vl": 14}


@pytest.fixture(params=list(PROCESSORS), scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def processor(name: str, sample: Path) -> Any:
    return AutoProcessor.from_pretrained(sample / "processor" / name, local_files_only=True)


def render(processor: Any, *parts: str) -> str:
    content = [{"type": part} for part in parts] + [{"type": "text", "text": "Which?"}]
    return processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)


def count(ids: Any, token: str) -> int:
    return int((ids == IDS[token]).sum())


def test_the_real_classes_open_the_folder(processor: Any, name: str, sample: Path) -> None:
    assert type(processor).__name__ == CLASSES[name]
    assert type(processor.tokenizer).__name__ == "Qwen2Tokenizer"
    assert processor.image_processor.patch_size == processor.video_processor.patch_size == PATCH[name]
    assert processor.image_processor.merge_size == processor.video_processor.merge_size == 2
    assert (processor.image_token_id, processor.video_token_id) == (
        IDS["<|image_pad|>"],
        IDS["<|video_pad|>"],
    )
    assert processor.chat_template == processor.tokenizer.chat_template == CHAT_TEMPLATE
    alone = AutoTokenizer.from_pretrained(sample / "processor" / name)
    text = "<|im_start|>user\nWhat colour is the circle?<0.3 seconds><tool_call>"
    assert (
        alone(text)["input_ids"]
        == processor.tokenizer(text)["input_ids"]
        == build_tokenizer()(text)["input_ids"]
    )


@pytest.mark.parametrize(
    ("size", "slots"), [((64, 64), 4), ((96, 64), 6), ((64, 96), 6), ((80, 64), 4), ((96, 96), 9)]
)
def test_pictures_keep_their_size(size: tuple[int, int], slots: int, processor: Any) -> None:
    if size == (80, 64) and processor.image_processor.patch_size == 14:
        slots = 6  # 80 pixels are nearer to three slots of 28 than to two
    out = processor(text=[render(processor, "image")], images=[Image.new("RGB", size)], return_tensors="pt")
    assert count(out["input_ids"], "<|image_pad|>") == slots
    assert out["image_grid_thw"].prod() == 4 * slots


def test_several_pictures(processor: Any) -> None:
    shapes = [Shape("circle", "red", (32, 32), 20)]
    images = [picture((64, 64), "white", shapes), picture((96, 64), "grey", shapes)]
    out = processor(text=[render(processor, "image", "image")], images=images, return_tensors="pt")
    assert count(out["input_ids"], "<|image_pad|>") == 4 + 6
    assert count(out["input_ids"], "<|vision_start|>") == 2
    patch_dim = 3 * 2 * processor.image_processor.patch_size**2
    assert tuple(out["pixel_values"].shape) == (16 + 24, patch_dim)


def test_clip(processor: Any, name: str, sample: Path) -> None:
    frames, times = read_clip(sorted((sample / "videos").iterdir())[0])
    metadata = VideoMetadata(total_num_frames=len(frames), fps=8.0, duration=float(times[-1]) + 1 / 8)
    out = processor(
        text=[render(processor, "video")],
        videos=[np.stack(frames)],
        video_metadata=[metadata],
        return_tensors="pt",
    )
    groups, height, width = out["video_grid_thw"][0].tolist()
    assert (groups, height, width) == (2, 4, 4)  # four frames are the least that either processor samples
    assert count(out["input_ids"], "<|video_pad|>") == 8
    text = processor.decode(out["input_ids"][0])
    assert text.count(" seconds>") == (2 if name == "qwen3_vl" else 0)


def test_classes_are_those_of_the_rows(sample: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Every row to draw is one the engine's own processor takes, and every class occurs."""
    from lmms_engine.datasets.processor import PROCESSORS as ENGINE
    from lmms_engine.datasets.schema import parse_row
    from lmms_engine.segments import RowRef

    processor = ENGINE.get("sit").from_pretrained(sample / "processor" / "sit")
    made = [
        processor(parse_row(raw, sample), RowRef("classes", 0, 0, raw["id"]))
        for raw in (*rows["classes"], *rows["classes_heldout"])
    ]
    assert {len(one) for one in made} == {64}
    assert {int(one.media["class_labels"]) for one in made} == set(range(24))


def test_a_text_model_gets_the_same_tokenizer(sample: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample / "processor" / "qwen3_moe")
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("What is 1 plus 2?")["input_ids"] == build_tokenizer()("What is 1 plus 2?")["input_ids"]
