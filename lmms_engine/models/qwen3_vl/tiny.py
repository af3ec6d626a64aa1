"""A tiny random Qwen3-VL with every special part on, and unlike samples for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from lmms_engine.datasets.sample import Sample
from lmms_engine.models.tiny import Media, Text, Token, Vocabulary, build_sample

WORDS = Vocabulary()
PATCH, MERGE = 4, 2


def tiny_config() -> Qwen3VLConfig:
    """DeepStack at two layers, interleaved M-RoPE, grouped heads with norms, tied head (as the 4B has)."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": WORDS.size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "initializer_range": 0.1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
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
        model = Qwen3VLForConditionalGeneration(tiny_config()).train()
    return model, tiny_samples()


def tiny_samples() -> list[Sample]:
    """One picture; two pictures and a clip; a clip; text only."""
    start, end = Token(WORDS.vision_start), Token(WORDS.vision_end)

    def picture(height: int, width: int) -> list[Token | Media]:
        return [start, Media(WORDS.image, (1, height, width)), end]

    def clip(frames: int, height: int, width: int) -> list[Text | Token | Media]:
        """Every frame is announced by its time stamp, in text, and has positions like a picture."""
        frame = [Text(3), start, Media(WORDS.video, (1, height, width)), end]
        return frame * frames

    rows = [
        ("picture", [Text(4), *picture(4, 6), Text(3), Text(5, answer=True)], [(1, 4, 6)]),
        (
            "several",
            [
                Text(2),
                *picture(4, 4),
                *picture(6, 8),
                Text(3, answer=True),
                *clip(2, 4, 4),
                Text(4, answer=True),
            ],
            [(1, 4, 4), (1, 6, 8), (2, 4, 4)],
        ),
        ("clip", [*clip(3, 4, 6), Text(2), Text(6, answer=True)], [(3, 4, 6)]),
        ("text", [Text(7), Text(4, answer=True), Text(2), Text(3, answer=True)], []),
    ]
    return [
        build_sample(
            name, pieces, seed=i, vocabulary=WORDS, merge_size=MERGE, patch_dim=3 * 2 * PATCH**2, grids=grids
        )
        for i, (name, pieces, grids) in enumerate(rows)
    ]
