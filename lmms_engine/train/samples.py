"""Training samples for people's eyes: text with its supervised part, small pictures. No model is built."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.media import load_picture
from lmms_engine.datasets.schema import parse_row
from lmms_engine.datasets.sources import Source
from lmms_engine.errors import BadRow
from lmms_engine.segments import RowRef
from lmms_engine.train.data import build_loader

THUMBNAIL = (240, 160)
MAX_THUMBNAILS = 4
REPEATS_SHOWN = 3  # longer repeats of one token, as for a picture's patches, are shown as "token x count"


@dataclass(frozen=True)
class Shown:
    """One row as the model sees it. text: runs of (text, supervised). thumbnails: JPEG, base64."""

    row: RowRef
    text: list[tuple[str, bool]]
    thumbnails: list[str]


def first_samples(config: dict[str, Any], count: int) -> list[Shown]:
    """The first rows that rank 0 of a run with this config trains on. Opens the data anew."""
    job = Job.from_dict(config)
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"dataloader_num_workers": 0})})
    loader = build_loader(job, 0, 1)
    try:
        return show(loader, loader.next_step(), count)
    finally:
        loader.close()


def show(loader: Loader, micros: list[PackedBatch], count: int) -> list[Shown]:
    """Up to `count` rows of batches that the loader gave."""
    rows = [(batch, index, row) for batch in micros for index, row in enumerate(batch.rows)]
    return [
        Shown(row, text_runs(batch, index, loader.processor), thumbnails(loader.sources, row))
        for batch, index, row in rows[:count]
    ]


def text_runs(batch: PackedBatch, index: int, processor: Any) -> list[tuple[str, bool]]:
    """The text of row `index` of a batch, cut where supervision begins or ends; a picture in words."""
    if batch.input_ids is None:
        return [(processor.describe(batch, index), True)]
    tokenizer = processor.tokenizer
    begin, end = batch.segments.cu_seqlens[index : index + 2].tolist()
    ids = batch.input_ids[begin:end].tolist()
    # Targets are shifted inside the sample: position t supervises the token at t + 1.
    supervised = [False, *(batch.loss_weights[begin : end - 1] > 0).tolist()]
    runs: list[tuple[str, bool]] = []
    at = 0
    while at < len(ids):
        stop = at
        while stop < len(ids) and supervised[stop] == supervised[at]:
            stop += 1
        runs.append((decode(ids[at:stop], tokenizer), supervised[at]))
        at = stop
    return runs


def decode(ids: list[int], tokenizer: Any) -> str:
    """Text with special tokens; a long repeat of one token is written once with its count."""
    parts: list[str] = []
    plain: list[int] = []
    for token, count in _repeats(ids):
        if count <= REPEATS_SHOWN:
            plain += [token] * count
            continue
        parts += [tokenizer.decode(plain), f"{tokenizer.decode([token])}×{count}"]
        plain = []
    return "".join([*parts, tokenizer.decode(plain)])


def _repeats(ids: list[int]) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(ids):
        stop = at
        while stop < len(ids) and ids[stop] == ids[at]:
            stop += 1
        yield ids[at], stop - at
        at = stop


def thumbnails(sources: Sequence[Source], row: RowRef) -> list[str]:
    """Small JPEGs of a row's pictures, base64; clips, unreadable pictures and encoded rows have none."""
    source = next(source for source in sources if source.name == row.source)
    raw = source.read(row.shard, row.row)
    if not isinstance(raw, dict):   # an encoded row holds patches, no pictures
        return []
    parsed = parse_row(raw, source.folder(row.shard))
    small: list[str] = []
    for part in [part for part in parsed.media() if part.kind == "image"][:MAX_THUMBNAILS]:
        try:
            picture = load_picture(part)
        except BadRow:
            continue
        picture.thumbnail(THUMBNAIL)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        small.append(base64.b64encode(buffer.getvalue()).decode("ascii"))
    return small
