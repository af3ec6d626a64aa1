"""Qwen3-MoE: transformers' own class, as data for the engine."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen3MoeForCausalLM

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.flops import Flops, Tally, add_decoder, add_experts, add_head, add_mlp
from lmms_engine.models.qwen3_moe.tiny import tiny
from lmms_engine.models.spec import MODELS, Layout, ModelSpec

LAYOUT = Layout(
    body="model",
    decoder="model",
    blocks=("model.layers.*",),
    encoders=(),
    head="lm_head",
    norm="model.norm",
    embed="model.embed_tokens",
    experts="model.layers.*.mlp.experts",
    attention={"": "decoder"},
)


def processor(*args: Any, **kwargs: Any) -> Any:
    """The family's processor; imported on first use."""
    from lmms_engine.models.qwen3_moe.processor import Qwen3MoeProcessor

    return Qwen3MoeProcessor.from_pretrained(*args, **kwargs)


def flops(config: PretrainedConfig, batch: PackedBatch, frozen: frozenset[str]) -> Flops:
    """FLOPs of the batch's real rows: of the experts, those that a token visits."""
    tally = Tally(frozen)
    tally.passes(LAYOUT.embed)
    add_decoder(tally, config, batch, prefix=LAYOUT.decoder, qk_norm=True, feed_forward=_feed_forward)
    add_head(tally, config, batch, module=LAYOUT.embed if config.tie_word_embeddings else LAYOUT.head)
    return tally.flops()


def _feed_forward(tally: Tally, config: Any, layer: str, index: int, tokens: int) -> None:
    """Some layers may be dense, as the library decides it."""
    dense = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step
    (add_mlp if dense else add_experts)(tally, config, layer, index, tokens)


SPEC = MODELS.register("qwen3_moe")(
    ModelSpec(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        model_class=Qwen3MoeForCausalLM,
        processor=processor,
        layout=LAYOUT,
        flops=flops,
        tiny=tiny,
        swaps=("rms_norm",),
        undeclared=("head_dim",),
    )
)
