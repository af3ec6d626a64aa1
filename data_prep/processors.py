"""Processor folders for the sample data, which `transformers.AutoProcessor` or the engine opens offline.

Patch, merge and temporal sizes, means and deviations are those of the real models; only the least picture
size is smaller, so that 64 x 64 pixels stay four slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from data_prep.chats import drawing_classes
from data_prep.tokenizer import build_tokenizer

_HALF = [0.5, 0.5, 0.5]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def qwen3_vl() -> Qwen3VLProcessor:
    """Processor in the form of Qwen3-VL: patches of 16, clips with time stamps in the text."""
    shared = {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": _HALF,
        "image_std": _HALF,
    }
    tokenizer = build_tokenizer()
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 32 * 32, "longest_edge": 4096 * 32 * 32}, **shared
        ),
        video_processor=Qwen3VLVideoProcessor(
            # Both edges count the pixels of a whole clip here.
            size={"shortest_edge": 4 * 32 * 32, "longest_edge": 16384 * 32 * 32},
            cap_pixels_per_frame=True,
            **shared,
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def qwen2_5_vl() -> Qwen2_5_VLProcessor:
    """Processor in the form of Qwen2.5-VL: patches of 14, clips sampled at 2 frames per second."""
    shared = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
    }
    size = {"shortest_edge": 28 * 28, "longest_edge": 4096 * 28 * 28}
    tokenizer = build_tokenizer()
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(size), **shared),
        video_processor=Qwen2VLVideoProcessor(
            size=dict(size), do_sample_frames=True, fps=2, cap_pixels_per_frame=True, **shared
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def sit() -> dict[str, Any]:
    """Settings in the form of SiT: a label for every class, pictures in their own size, patches of 2."""
    return {
        "processor_class": "SiTProcessor",
        "classes": drawing_classes(),
        "patch_size": 2,
        "image_size": None,
    }


PROCESSORS: dict[str, Callable[[], ProcessorMixin]] = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl}
TEXT_ONLY = ("qwen3_moe",)   # a tokenizer is all they have


def write_processors(folder: Path) -> None:
    """Write one processor folder per model family under `folder`."""
    for name, build in PROCESSORS.items():
        build().save_pretrained(folder / name)
    for name in TEXT_ONLY:
        build_tokenizer().save_pretrained(folder / name)
    (folder / "sit").mkdir(parents=True)
    (folder / "sit" / "preprocessor_config.json").write_text(json.dumps(sit(), indent=2) + "\n")
