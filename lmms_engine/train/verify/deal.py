"""The rows that all cases share, and the ways to deal them out: to micro-batches, and these to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor import Processor
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.skips import kinds_of
from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef
from lmms_engine.train.data import build_processor


@dataclass(frozen=True)
class Pack:
    """A micro-batch as the loader gave it, and the same rows one by one."""

    batch: PackedBatch
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Rows:
    """What is compared: the packs of each step's global batch. fingerprint: of all the data."""

    steps: tuple[tuple[Pack, ...], ...]
    fingerprint: str

    def figures(self) -> dict[str, int]:
        """How much it is."""
        packs = [pack.batch for step in self.steps for pack in step]
        return {
            "packs": len(packs),
            "rows": sum(len(pack.rows) for pack in packs),
            "rows_with_media": sum(bool(s.media) for step in self.steps for p in step for s in p.samples),
            "tokens": sum(pack.num_tokens for pack in packs),
            "supervised_tokens": sum(sum(pack.row_supervised()) for pack in packs),
        }


class _Recording:
    """A processor that remembers the samples it made."""

    def __init__(self, inner: Processor) -> None:
        self.inner = inner
        self.samples: dict[RowRef, Sample] = {}

    def __call__(self, row: Any, ref: RowRef) -> Sample:
        sample = self.samples[ref] = self.inner(row, ref)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def read_rows(job: Job, steps: int) -> Rows:
    """The first global batches that training of this job would see in one process."""
    loader = Loader(job, partial(_recording, job), dp_rank=0, dp_size=1)
    found: list[tuple[Pack, ...]] = []
    try:
        while len(found) < steps:
            micros = loader.next_step()
            if not micros:
                if not found:
                    raise UserError(
                        "dataset_config.datasets: a whole pass gave no usable row"
                        f"{kinds_of(loader.take_skipped())}; `data-prep validate --processor` names them"
                    )
                loader.next_epoch()
                continue
            samples = loader.processor.samples
            found.append(tuple(Pack(b, tuple(samples[ref] for ref in b.rows)) for b in micros))
        return Rows(tuple(found), loader.fingerprint())
    finally:
        loader.close()


def _recording(job: Job) -> _Recording:
    return _Recording(build_processor(job))


def deal(how: str, packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    """The micro-batches of data rank `rank` of `size`, as many on every rank.

    Raises UserError where these rows cannot be dealt out so, on every rank alike.
    """
    ranks = [DEALS[how](packs, processor, rank, size) for rank in range(size)]
    most = max(map(len, ranks))
    return ranks[rank] + [collate([], processor) for _ in range(most - len(ranks[rank]))]


def _packs(packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    return [pack.batch for pack in packs[rank::size]]


def _rows(packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    return [collate([sample], processor) for pack in packs[rank::size] for sample in pack.samples]


def _joined(packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    return [collate([sample for pack in packs[rank::size] for sample in pack.samples], processor)]


def _uneven(packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    """All but the last pack on the first rank, the last one on the last."""
    own = packs[:-1] if rank == 0 else packs[-1:] if rank == size - 1 else ()
    return [pack.batch for pack in own]


def _modalities(packs: Sequence[Pack], processor: Processor, rank: int, size: int) -> list[PackedBatch]:
    """Rows with media on the first rank, the others on the last."""
    parts = [[s for s in pack.samples if bool(s.media) == (rank == 0)] for pack in packs]
    if not any(parts):
        raise UserError(f"these rows all have {'no ' if rank == 0 else ''}pictures")
    return [collate(part, processor) for part in parts] if rank in (0, size - 1) else []


DEALS: dict[str, Callable[[Sequence[Pack], Processor, int, int], list[PackedBatch]]] = {
    "packs": _packs,
    "rows": _rows,
    "joined": _joined,
    "uneven": _uneven,
    "modalities": _modalities,
}
