"""A tiny random Qwen2.5-VL with every special part on, and unlike samples for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from lmms_engine.datasets.sample import Sample
from lmms_engine.models.tiny import Media, Text, Token, Vocabulary, build_sample

WORDS = Vocabulary()
PATCH, MERGE = 4, 2


def tiny_config() -> Qwen2_5_VLConfig:
    """Windowed and full blocks, an MLP width no multiple of 8, grouped heads, tied head (as the 3B has)."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": WORDS.size,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.1,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 36,
            "num_heads": 2,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 64,
            "window_size": 16,   # two merged patches a side
            "tokens_per_second": 2,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        image_token_id=WORDS.image,
        video_token_id=WORDS.video,
        vision_start_token_id=WORDS.vision_start,
        vision_end_token_id=WORDS.vision_end,
        tie_word_embeddings=True,
    )


def tiny() -> tuple[nn.Module, list[Sample]]:
    """A float32 model on the CPU, always the same; samples: one picture, several, a clip, text only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(tiny_config()).train()
    return model, tiny_samples()


def tiny_samples() -> list[Sample]:
    """One picture; two pictures and a clip of 0.75 s a step; a clip of 1 s a step; text only."""
    start, end = Token(WORDS.vision_start), Token(WORDS.vision_end)

    def picture(height: int, width: int) -> list[Token | Media]:
        return [start, Media(WORDS.image, (1, height, width)), end]

    def clip(frames: int, height: int, width: int, seconds: float) -> list[Token | Media]:
        return [start, Media(WORDS.video, (frames, height, width), interval=2 * seconds), end]

    rows = [
        ("picture", [Text(4), *picture(4, 6), Text(3), Text(5, answer=True)]),
        (
            "several",
            [
                Text(2),
                *picture(4, 4),
                *picture(6, 10),
                Text(3, answer=True),
                *clip(2, 4, 4, 0.75),
                Text(4, answer=True),
            ],
        ),
        ("clip", [*clip(3, 4, 6, 1.0), Text(2), Text(6, answer=True)]),
        ("text", [Text(7), Text(4, answer=True), Text(2), Text(3, answer=True)]),
    ]
    return [
        build_sample(name, pieces, seed=i, vocabulary=WORDS, merge_size=MERGE, patch_dim=3 * 2 * PATCH**2)
        for i, (name, pieces) in enumerate(rows)
    ]
