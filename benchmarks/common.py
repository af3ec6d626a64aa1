"""What the benchmarks share: real model sizes with random weights, and JPEG chats on disk.

No benchmark downloads anything: sizes are the published ones, weights are random, pictures are drawn here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.tokenizer import IDS

# Published sizes (config.json of Qwen/Qwen3-VL-4B-Instruct and Qwen/Qwen2.5-VL-3B-Instruct).
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
SIZES = {"qwen3_vl_4b": QWEN3_VL_4B, "qwen2_5_vl_3b": QWEN2_5_VL_3B}
FAMILY = {"qwen3_vl_4b": "qwen3_vl", "qwen2_5_vl_3b": "qwen2_5_vl"}
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


def write_chats(
    folder: Path,
    *,
    rows: int,
    seed: int = 0,
    pixels: tuple[int, int] = (384, 1024),
    words_per_answer: tuple[int, int] = (60, 180),
) -> Path:
    """Writes `rows` one-picture chats as JPEG files and JSONL; returns the JSONL path.

    pixels: bounds of each side; the default bounds give about 700 tokens a row. Answers are random words and
    questions all alike, so that only the picture tells which answer is due.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    words = ["red", "green", "circle", "square", "left", "right", "above", "one", "two", "large", "near"]
    lines = []
    for i in range(rows):
        width, height = rng.randint(*pixels), rng.randint(*pixels)
        coarse = noise.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / "images" / f"{i}.jpg", quality=90)
        answer = " ".join(rng.choices(words, k=rng.randint(*words_per_answer)))
        lines.append(
            {
                "id": f"row-{i}",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": f"images/{i}.jpg"}},
                            {"type": "text", "text": "Describe the picture."},
                        ],
                    },
                    {"role": "assistant", "content": answer},
                ],
            }
        )
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
