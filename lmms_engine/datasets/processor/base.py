"""What the data path asks of a processor, and the rule by which its media are joined into a pack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lmms_engine.datasets.sample import Sample
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from lmms_engine.datasets.batch import PackedBatch
    from lmms_engine.datasets.schema import Row


@dataclass(frozen=True)
class KeyRule:
    """How one media tensor of several samples becomes one of the pack: joined along `concat_dim`."""

    concat_dim: int


class Processor(Protocol):
    """Row to Sample, for one model. Lives in the loader's workers: no device, no global state."""

    tokenizer: PreTrainedTokenizerFast | None   # None for a PictureProcessor

    @property
    def keys(self) -> Mapping[str, KeyRule]:
        """A rule for every key that `Sample.media` may hold."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for processors that make equal samples; kept in the run's manifest and checkpoints.

        A processor may name what it is made of in `identity`, a nested mapping: what `encoded.py` compares.
        """
        ...

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        """The row, tokenised, with labels shifted; raises BadRow if it cannot be used."""
        ...

    def stand_in(self) -> Sample | None:
        """A sample without weight that runs every tower once; None for models without towers."""
        ...

    def tower_inputs(self, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
        """What the family's `extra_kwargs` needs besides the media of a whole batch, so that nothing is read
        back from the device: mostly keyword arguments of its towers."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Writes the library's processor files, with the settings trained with."""
        ...


def digest(*parts: object) -> str:
    """SHA-256 over values that have a JSON form, or `str`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class PictureProcessor(Processor, Protocol):
    """A processor whose rows are pictures to be drawn instead of text."""

    def describe(self, batch: PackedBatch, index: int) -> str:
        """A row of a batch in words."""
        ...

    def prompts(self, count: int) -> list[Sample]:
        """Up to `count` samples that ask for a picture; their pixels are blank."""
        ...

    def pictures(self, batch: PackedBatch, patches: Tensor) -> Iterable[tuple[str, Tensor]]:
        """(caption, uint8 [height, width, 3]) of each row, from values [T, P] of the batch's positions."""
        ...


class ProcessorClass(Protocol):
    """What is registered: a class that opens its Processor from a folder or the hub."""

    def from_pretrained(
        self,
        folder_or_id: str | Path,
        *,
        config: PretrainedConfig | None,
        max_length: int | None,
        fps: float,
        video_max_pixels: int,
        video_max_frames: int,
        extra_kwargs: Mapping[str, Any] | None,
        overlong: str,
    ) -> Processor:
        """The processor of a model with `config`; the settings are `dataset_config`'s."""
        ...
