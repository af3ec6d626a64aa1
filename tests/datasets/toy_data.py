"""A small but real processor, and helpers to write rows and build jobs and loaders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor.base import KeyRule
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import MediaPart, Row
from lmms_engine.errors import BadRow
from lmms_engine.segments import RowRef

PICTURE = 256  # the placeholder's token id, after the 256 bytes


class ByteProcessor:
    """One token per UTF-8 byte; a picture is one token, and its feature is a digest of its file's bytes.

    Assistant text is supervised. Pictures must exist.
    """

    tokenizer = None
    keys: Mapping[str, KeyRule] = {"pixel_values": KeyRule(0), "image_grid_thw": KeyRule(0)}
    fingerprint = "bytes-1"

    def __init__(self, with_stand_in: bool = True) -> None:
        self.with_stand_in = with_stand_in

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        ids: list[int] = []
        supervised: list[bool] = []
        pixels: list[Tensor] = []
        for message in row.messages:
            for part in message.content:
                new = [PICTURE] if isinstance(part, MediaPart) else list(part.text.encode())
                if isinstance(part, MediaPart):
                    pixels.append(_pixels(part))
                ids += new
                supervised += [message.role == "assistant"] * len(new)
        if not ids:
            raise BadRow("empty", "no tokens")
        if "crash" in row.meta:
            raise ZeroDivisionError("planted\nfault")
        return _sample(ref, ids, supervised, pixels)

    def stand_in(self) -> Sample | None:
        if not self.with_stand_in:
            return None
        return _sample(RowRef("stand-in", 0, 0, "stand-in"), [PICTURE], [False], [torch.zeros(1, 4)])

    def tower_inputs(self, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
        return {"image_max_seqlen": int(media["image_grid_thw"].prod(1).max())}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "processor.json").write_text("{}", encoding="utf-8")


def _pixels(part: MediaPart) -> Tensor:
    if part.path is not None and not Path(part.path).is_file():
        raise BadRow("media_missing", f"{part.path} does not exist")
    data = part.bytes if part.bytes is not None else Path(part.path).read_bytes()
    return torch.tensor([list(hashlib.sha256(data).digest()[:4])], dtype=torch.float32)


def _sample(ref: RowRef, ids: list[int], supervised: list[bool], pixels: list[Tensor]) -> Sample:
    targets = [*ids[1:], -100]
    weights = [*map(float, supervised[1:]), 0.0]
    media = {}
    if pixels:
        grids = torch.ones(len(pixels), 3, dtype=torch.int64)
        media = {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}
    return Sample(
        row=ref,
        input_ids=torch.tensor(ids),
        labels=torch.tensor([t if w else -100 for t, w in zip(targets, weights, strict=True)]),
        loss_weights=torch.tensor(weights),
        position_ids=torch.arange(len(ids)).expand(3, -1),
        media=media,
    )


def text_row(id_: str, length: int = 10) -> dict[str, Any]:
    """A row of exactly `length` (>= 4) bytes of text, of which 2 are the answer's."""
    return {
        "id": id_,
        "messages": [
            {"role": "user", "content": (id_ * length)[: length - 2]},
            {"role": "assistant", "content": "ok"},
        ],
    }


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One row a line, letters as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def make_job(datasets: list[dict[str, Any]] | Path, *, eval_datasets: Any = (), **keys: Any) -> Job:
    """A job over the given datasets. `keys` go to dataset_config or trainer_args, wherever they belong."""
    if isinstance(datasets, Path):
        datasets = [{"path": str(datasets)}]
    trainer_keys = set(Job.model_fields["trainer"].annotation.model_fields)
    trainer = {"dataloader_num_workers": 0, **{k: v for k, v in keys.items() if k in trainer_keys}}
    dataset = {"packing_length": 64, "num_logical_shards": 4}
    dataset |= {key: value for key, value in keys.items() if key not in trainer_keys}
    return Job.from_dict(
        {
            "model_config": {"load_from_config": {"model_type": "qwen3_vl"}},
            "dataset_config": {"datasets": datasets, "eval_datasets": list(eval_datasets), **dataset},
            "trainer_args": trainer,
        }
    )


def make_loader(job: Job, rank: int = 0, size: int = 1, *, stand_in: bool = True, **options: Any) -> Loader:
    """A loader with the byte processor."""
    return Loader(job, partial(ByteProcessor, stand_in), dp_rank=rank, dp_size=size, **options)


def steps_of_epoch(loader: Loader) -> list[list[PackedBatch]]:
    """All steps up to the end of the epoch."""
    steps = []
    while micros := loader.next_step():
        steps.append(micros)
    return steps


def ids_of(steps: Iterable[list[PackedBatch]]) -> list[str]:
    """Row ids in the order seen."""
    return [row.id for micros in steps for micro in micros for row in micro.rows]


def ids_of_epoch(job: Job, size: int = 1, make: Callable[..., Loader] = make_loader) -> list[list[str]]:
    """Ids of one epoch, rank by rank."""
    out = []
    for rank in range(size):
        loader = make(job, rank, size)
        out.append(ids_of(steps_of_epoch(loader)))
        loader.close()
    return out


def content(batch: PackedBatch) -> tuple[Any, ...]:
    """Everything in a batch as plain values, to compare byte by byte."""
    tensors = {
        "ids": batch.input_ids,
        "labels": batch.labels,
        "weights": batch.loss_weights,
        "positions": batch.position_ids,
        "cu": batch.segments.cu_seqlens,
        **batch.media,
    }
    listed = {key: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for key, t in tensors.items()}
    return listed, batch.rows, batch.segments.max_len, dict(batch.tower)
