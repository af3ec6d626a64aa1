"""SiT: pictures from classes by flow matching, in pixels; our own modelling code, published names."""

from __future__ import annotations

from typing import Any

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.flops import Flops, Tally
from lmms_engine.models.sit.modeling import FREQUENCIES, SiT, SiTConfig
from lmms_engine.models.sit.tiny import tiny
from lmms_engine.models.spec import MODELS, Layout, ModelSpec

LAYOUT = Layout(body="", blocks=("blocks.*",), attention={"": "decoder"})


def processor(*args: Any, **kwargs: Any) -> Any:
    """The family's processor; imported on first use, as it brings the image libraries."""
    from lmms_engine.models.sit.processor import SiTProcessor

    return SiTProcessor.from_pretrained(*args, **kwargs)


def flops(config: SiTConfig, batch: PackedBatch, frozen: frozenset[str]) -> Flops:
    """FLOPs of the batch's real rows. frozen: names of untrained parameters."""
    lengths = batch.row_lengths()
    patches, pictures, dim = sum(lengths), len(lengths), config.hidden_size
    square = float(sum(n * n for n in lengths))
    condition = Tally(frozen)
    condition.linear(pictures, ("t_embedder.mlp.0", FREQUENCIES, dim))
    condition.linear(pictures, ("t_embedder.mlp.2", dim, dim))
    condition.passes("y_embedder.embedding_table")
    tally = Tally(frozen)
    tally.linear(patches, ("x_embedder.proj", config.patch_dim, dim))
    for i in range(config.depth):
        block = f"blocks.{i}"
        tally.join(_modulation(condition, pictures, f"{block}.adaLN_modulation.1", dim, 6 * dim))
        tally.linear(patches, (f"{block}.attn.qkv", dim, 3 * dim))
        tally.attention(square, square, dim)
        tally.linear(patches, (f"{block}.attn.proj", dim, dim))
        tally.linear(patches, (f"{block}.mlp.fc1", dim, config.mlp_size))
        tally.linear(patches, (f"{block}.mlp.fc2", config.mlp_size, dim))
    tally.join(_modulation(condition, pictures, "final_layer.adaLN_modulation.1", dim, 2 * dim))
    tally.linear(patches, ("final_layer.linear", dim, config.patch_dim))
    tally.strict += condition.strict
    tally.conventional += condition.conventional
    return tally.flops()


def _modulation(condition: Tally, pictures: int, module: str, inputs: int, outputs: int) -> Tally:
    """The branch from a picture's condition to the shifts, scales and gates of one layer."""
    branch = Tally(condition.frozen, differentiable=condition.differentiable)
    branch.linear(pictures, (module, inputs, outputs))
    return branch


SPEC = MODELS.register("sit")(
    ModelSpec(
        name="sit",
        model_types=("sit",),
        model_class=SiT,
        processor=processor,
        layout=LAYOUT,
        flops=flops,
        tiny=tiny,
        objective="flow_matching",
        swaps=(),
    )
)
