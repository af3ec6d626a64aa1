"""What the benchmarks share: real model sizes with random weights, and JPEG chats on disk.

No benchmark downloads anything: sizes are the published ones, weights are random, pictures are drawn here.
"""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.clips import write_clip
from data_prep.tokenizer import IDS

# Published sizes: config.json of Qwen/Qwen3-VL-4B-Instruct, Qwen/Qwen3-VL-8B-Instruct,
# Qwen/Qwen2.5-VL-3B-Instruct and Qwen/Qwen2.5-VL-7B-Instruct.
QWEN3_VL_4B = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000000, "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2560,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
QWEN3_VL_8B = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": QWEN3_VL_4B["text_config"] | {"hidden_size": 4096, "intermediate_size": 12288},
    "vision_config": QWEN3_VL_4B["vision_config"] | {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
QWEN2_5_VL_3B = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    },
}  # fmt: skip
QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": QWEN2_5_VL_3B["text_config"] | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "vision_config": QWEN2_5_VL_3B["vision_config"] | {"out_hidden_size": 3584},
}  # fmt: skip
# For dry runs on a CPU; no published size.
QWEN3_VL_TINY = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 544, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000000, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
SIZES = {
    "qwen3_vl_4b": QWEN3_VL_4B,
    "qwen3_vl_8b": QWEN3_VL_8B,
    "qwen2_5_vl_3b": QWEN2_5_VL_3B,
    "qwen2_5_vl_7b": QWEN2_5_VL_7B,
    "qwen3_vl_tiny": QWEN3_VL_TINY,
}
FAMILY = {size: config["model_type"] for size, config in SIZES.items()}
MARKS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}


def model_config(size: str, *, cut: int | None = None) -> dict:
    """The `load_from_config` mapping of a real size; `cut`: so many decoder layers and vision blocks."""
    config = json.loads(json.dumps(SIZES[size])) | MARKS
    if cut is not None:
        config["text_config"]["num_hidden_layers"] = cut
        config["vision_config"]["depth"] = cut
        if "deepstack_visual_indexes" in config["vision_config"]:
            config["vision_config"]["deepstack_visual_indexes"] = list(range(cut - 1))
        if "fullatt_block_indexes" in config["vision_config"]:
            config["vision_config"]["fullatt_block_indexes"] = [cut - 1]
    return config


WORDS = ("red", "green", "circle", "square", "left", "right", "above", "one", "two", "large", "near")


def write_chats(
    folder: Path,
    *,
    rows: int,
    seed: int = 0,
    pixels: tuple[int, int] = (384, 1024),
    words_per_answer: tuple[int, int] = (60, 180),
    media: str = "pictures",
    per_row: int = 1,
) -> Path:
    """Writes `rows` chats with `per_row` JPEG files or clips each, and JSONL; returns the JSONL path.

    pixels: bounds of each side; the default bounds give about 700 tokens a row with one picture.
    media: "pictures", "clips" (two seconds of 8 frames a second) or "text", which has neither.
    Answers are random words and questions all alike, so that only the picture tells which answer is due.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(rows):
        parts: list[dict] = []
        for k in range(per_row if media != "text" else 0):
            name = str(i * per_row + k)
            width, height = rng.randint(*pixels), rng.randint(*pixels)
            parts.append(_clip(folder, name, width, height, noise) if media == "clips" else
                         _picture(folder, name, width, height, noise))  # fmt: skip
        answer = " ".join(rng.choices(WORDS, k=rng.randint(*words_per_answer)))
        question = "Describe the picture." if parts else "Say something."
        lines.append(
            {
                "id": f"row-{i}",
                "messages": [
                    {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
                    {"role": "assistant", "content": answer},
                ],
            }
        )
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _drawn(width: int, height: int, noise: np.random.Generator) -> Image.Image:
    coarse = noise.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _picture(folder: Path, name: str, width: int, height: int, noise: np.random.Generator) -> dict:
    """The content part of a new JPEG file."""
    _drawn(width, height, noise).save(folder / "images" / f"{name}.jpg", quality=90)
    return {"type": "image_url", "image_url": {"url": f"images/{name}.jpg"}}


def _clip(folder: Path, name: str, width: int, height: int, noise: np.random.Generator) -> dict:
    """The content part of a new MP4 file: one picture that moves sideways."""
    still = np.asarray(_drawn(width // 2 * 2, height // 2 * 2, noise))
    frames = [np.roll(still, 4 * t, axis=1) for t in range(16)]
    write_clip(folder / "images" / f"{name}.mp4", frames, [Fraction(t, 8) for t in range(16)])
    return {"type": "video_url", "video_url": {"url": f"images/{name}.mp4"}}
