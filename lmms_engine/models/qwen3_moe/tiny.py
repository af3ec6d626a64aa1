"""A tiny random Qwen3-MoE and unlike samples for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lmms_engine.datasets.sample import Sample
from lmms_engine.models.tiny import Text, Vocabulary, build_text_sample

WORDS = Vocabulary()


def tiny_config() -> Qwen3MoeConfig:
    """Three layers of 8 experts, 3 for each token, weights summing to 1, grouped heads, untied head."""
    return Qwen3MoeConfig(
        vocab_size=WORDS.size,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
    )


def tiny() -> tuple[nn.Module, list[Sample]]:
    """A float32 model on the CPU, always the same, and four rows of different length and supervision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(tiny_config()).train()
    return model, tiny_samples()


def tiny_samples() -> list[Sample]:
    """One answer; two answers; hardly any text before the answer; a long question with a short answer."""
    rows = [
        ("one", [Text(7), Text(5, answer=True)]),
        ("two", [Text(6), Text(4, answer=True), Text(5), Text(8, answer=True)]),
        ("answer", [Text(1), Text(9, answer=True)]),
        ("question", [Text(21), Text(2, answer=True)]),
    ]
    return [build_text_sample(name, parts, seed=i, vocabulary=WORDS) for i, (name, parts) in enumerate(rows)]
