"""A tiny random SiT whose every part is at work, and pictures of unlike sizes for it."""

from __future__ import annotations

import torch
from torch import nn

from lmms_engine.datasets.sample import Sample
from lmms_engine.models.sit.modeling import SiT, SiTConfig
from lmms_engine.segments import RowRef

SIZES = ((4, 4), (2, 3), (4, 2), (1, 1))   # rows and columns of patches
CLASSES = 5


def tiny_config() -> SiTConfig:
    """Two heads, three blocks, pictures up to 8 x 8 pixels in patches of 2."""
    return SiTConfig(
        input_size=8, patch_size=2, hidden_size=32, depth=3, num_heads=2, mlp_ratio=2.0, num_classes=CLASSES
    )


def tiny() -> tuple[nn.Module, list[Sample]]:
    """A float32 model on the CPU, always the same; its gates are open, else most gradients were 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SiT(tiny_config()).train()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return model, tiny_samples()


def tiny_samples() -> list[Sample]:
    """Four pictures of unlike sizes and classes."""
    return [_sample(i, *size) for i, size in enumerate(SIZES)]


def _sample(number: int, height: int, width: int) -> Sample:
    rng = torch.Generator().manual_seed(number)
    places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return Sample(
        row=RowRef(source="tiny", shard=0, row=number, id=f"picture {number}"),
        input_ids=None,
        labels=None,
        loss_weights=torch.ones(height * width),
        position_ids=torch.stack(places).flatten(1),
        media={
            "pixel_values": torch.rand(height * width, 12, generator=rng) * 2 - 1,
            "class_labels": torch.tensor([number % CLASSES]),
        },
    )
