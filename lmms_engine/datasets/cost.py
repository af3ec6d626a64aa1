"""What a sample costs to train on, roughly, from its lengths alone: what packs are measured by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lmms_engine.datasets.sample import Sample


class WithMedia(Protocol):
    """A sample, or a batch of them."""

    @property
    def media(self) -> Mapping[str, Tensor]: ...


def media_units(sample: WithMedia) -> int:
    """Length of the sample's longest media tensor: patches of pictures and clips, chunks of sound."""
    return max((tensor.shape[0] for tensor in sample.media.values()), default=0)


@dataclass(frozen=True)
class SampleCost:
    """Cost in tokens: 1 is a token's share of the decoder's matrix products.

    attention_length: a sample of so many tokens spends as much on attention as on matrix products. Causal
    attention is quadratic, so that is (decoder weights without embeddings) / (layers * heads * head size).
    media_unit: what the towers spend on one media unit: tower weights / decoder weights, for patches.
    """

    attention_length: float
    media_unit: float

    def __call__(self, sample: Sample) -> float:
        return self.of(len(sample), media_units(sample))

    def of(self, tokens: int, units: int) -> float:
        """The cost of a sample of so many tokens and media units."""
        return tokens + tokens * tokens / self.attention_length + self.media_unit * units
