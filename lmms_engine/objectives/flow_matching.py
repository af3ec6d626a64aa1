"""Flow matching on the straight path from noise to data: the velocity is the target.

x_t = t * data + (1 - t) * noise, target data - noise, t uniform in 0..1: the published SiT's default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.collate import collate
from lmms_engine.errors import UserError
from lmms_engine.objectives import OBJECTIVES
from lmms_engine.objectives.base import SOURCE_TERM, Drawing, Objective
from lmms_engine.segments import Segments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lmms_engine.datasets.processor import PictureProcessor
    from lmms_engine.models.spec import ModelSpec

DRAWINGS = 8        # pictures for the report
EULER_STEPS = 50


@OBJECTIVES.register("flow_matching")
class FlowMatching(Objective):
    """Sum over patches of weight * squared error of the velocity, term `flow`; its weight counts values.

    A batch holds clean patches `pixel_values` [T, P] and one of `class_labels` [N] a picture. `draw` adds
    `noise` [T, P] and `times` [N], and replaces some classes by the null class; a batch that has its noise
    already is left as it is. In evaluation mode time and noise are functions of the row alone and no class is
    replaced, so that validation gives the same number whatever the layout.

    sources: names of the sources whose part of the loss is wanted too, each as the metric `source/<name>`.
    """

    forward_methods = ("velocity",)

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        config: PretrainedConfig,
        *,
        rmpad: bool = True,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not rmpad:
            raise UserError(f"trainer_args.use_rmpad=false: {spec.name} has no padded path (legal: true)")
        self.model = model
        self._sources = tuple(sources)
        self._source_terms = [SOURCE_TERM + name for name in sources]
        self.coefficients = {"flow": 1.0} | dict.fromkeys(self._source_terms, 0.0)
        self._null_class = config.num_classes
        self._class_dropout = config.class_dropout_prob

    def draw(self, batch: PackedBatch, rng: torch.Generator) -> PackedBatch:
        """Times, noise and dropped classes, picture by picture: how rows are shared out changes nothing."""
        if self._sources:
            batch = batch.with_groups(self._sources)
        if "noise" in batch.media:
            return batch
        clean, labels = batch.media["pixel_values"], batch.media["class_labels"].clone()
        times = torch.empty(batch.segments.num_segments)
        noise = torch.empty_like(clean, pin_memory=clean.is_pinned())
        for i, own in enumerate(pictures(batch.segments)):
            if not self.training:
                rng = row_generator(batch, i)
            times[i] = torch.rand((), generator=rng)
            dropped = torch.rand((), generator=rng) < self._class_dropout
            noise[own].normal_(generator=rng)
            if dropped and self.training:
                labels[i] = self._null_class
        return replace(batch, media={**batch.media, "class_labels": labels, "times": times, "noise": noise})

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        """`flow`: how many values of patches count, from a batch on the host; of a source, its share."""
        values = batch.media["pixel_values"].shape[1]
        weights = batch.loss_weights.double() * values
        own = (weights[batch.groups == i].sum() for i in range(len(self._sources)))
        sums = dict(zip(self._source_terms, own, strict=True))
        return {term: float(total) for term, total in {"flow": weights.sum(), **sums}.items()}

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The sum over this batch, after `draw`."""
        media = batch.media
        clean, noise, times = media["pixel_values"], media["noise"], media["times"]
        of_patch = times.repeat_interleave(batch.segments.cu_seqlens.diff(), output_size=len(clean))[:, None]
        mixed = of_patch * clean + (1 - of_patch) * noise
        velocity = self.velocity(mixed, times, batch)
        error_T = (velocity.float() - (clean - noise)).square().sum(-1) * batch.loss_weights
        total = {"flow": error_T.sum()}
        if not self._sources:
            return total
        by_source = error_T.new_zeros(len(self._sources) + 1).index_add(0, batch.groups + 1, error_T.detach())
        return total | dict(zip(self._source_terms, by_source[1:], strict=True))

    def velocity(self, patches: Tensor, times: Tensor, batch: PackedBatch) -> Tensor:
        """The model's velocity [T, P] of patches [T, P] at times [N], with the batch's classes and places."""
        segments = replace(batch.segments, causal=False)
        return self.model(patches, times, batch.media["class_labels"], batch.position_ids, segments)

    @torch.no_grad()
    def drawings(
        self, processor: PictureProcessor, device: torch.device, rng: torch.Generator
    ) -> list[Drawing]:
        """A few pictures of the processor's classes, by Euler steps without guidance."""
        batch = collate(processor.prompts(DRAWINGS), processor)
        noise = torch.randn(batch.media["pixel_values"].shape, generator=rng).to(device)
        batch = batch.to(device)
        times = torch.ones(batch.segments.num_segments, device=device)
        patches = euler(lambda x, t: self.velocity(x, t * times, batch).float(), noise, EULER_STEPS)
        return [Drawing(*drawn) for drawn in processor.pictures(batch, patches.cpu())]


def euler(velocity: Callable[[Tensor, float], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Follows a velocity field from noise at time 0 to data at time 1, in equal steps."""
    x = noise
    for i in range(steps):
        x = x + velocity(x, i / steps) / steps
    return x


def pictures(segments: Segments) -> Iterator[slice]:
    """Where the patches of each picture lie. Host side only."""
    start = 0
    for length in segments.lengths():
        yield slice(start, start + length)
        start += length


def row_generator(batch: PackedBatch, index: int) -> torch.Generator:
    """The random numbers of a row in validation, by its place in its data: the folder's name is no matter."""
    key = (batch.rows[index].shard, batch.rows[index].row) if index < len(batch.rows) else ()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
