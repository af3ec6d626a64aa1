"""Pictures per second of the Loader, against torch's DataLoader with Pillow and the library's processor.

    python benchmarks/loader.py [--rows 300] [--workers 2] [--rounds 3] [--profile]

Both read the same JPEG files of about 700×700 and the same chats, decode them in the same number of worker
processes and hand tensors to the main process; the plain one neither packs nor checks nor computes labels
and positions. They take turns, round by round, so that what else the machine does meets both; a round
counts from the first batch. `--profile` prints where the processor time of our side goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import MARKS, write_chats
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3VLConfig

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.schema import parse_row
from lmms_engine.models.qwen3_vl.processor import Qwen3VLProcessor
from lmms_engine.segments import RowRef


class Plain(Dataset):
    """Rows through `apply_chat_template` and the library's processor."""

    def __init__(self, rows: Path, processor: Path) -> None:
        from transformers import AutoProcessor

        self.folder = rows.parent
        self.rows = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        self.processor = AutoProcessor.from_pretrained(processor)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        messages = self.rows[index]["messages"]
        url = messages[0]["content"][0]["image_url"]["url"]
        picture = Image.open(self.folder / url).convert("RGB")
        turns = [{"role": "user", "content": [{"type": "image"}, messages[0]["content"][1]]}, messages[1]]
        text = self.processor.apply_chat_template(turns, tokenize=False)
        return dict(self.processor(text=[text], images=[picture], return_tensors="pt"))


def plain_batches(plain: Plain, workers: int) -> Iterator[int]:
    """Pictures of each batch."""
    for batch in DataLoader(plain, batch_size=None, shuffle=True, num_workers=workers):
        yield len(batch["image_grid_thw"])


def our_batches(job: Job, make: Callable[[], Any]) -> Iterator[int]:
    """Pictures of each batch of an epoch."""
    loader = Loader(job, make, dp_rank=0, dp_size=1)
    while micros := loader.next_step():
        yield sum(len(micro.rows) for micro in micros)   # one picture a row
    loader.close()


def rate(batches: Iterator[int]) -> float:
    """Pictures per second after the first batch."""
    next(batches)
    began = time.perf_counter()
    pictures = sum(batches)
    return pictures / (time.perf_counter() - began)


def profile(rows: Path, processor: Qwen3VLProcessor, count: int) -> None:
    """The functions in which our processor spends its processor time."""
    parsed = [parse_row(json.loads(line), rows.parent) for line in rows.read_text().splitlines()[:count]]
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    for i, row in enumerate(parsed):
        processor(row, RowRef("a", 0, i, str(i)))
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rows = write_chats(folder, rows=given.rows, pixels=(620, 780))
        write_processors(folder / "processor")
        opened = folder / "processor" / "qwen3_vl"
        make = partial(Qwen3VLProcessor.from_pretrained, opened, config=Qwen3VLConfig(**MARKS))
        if given.profile:
            profile(rows, make(), min(given.rows, 60))
            return
        job = Job.from_dict(
            {
                "model_config": {"load_from_config": {"model_type": "qwen3_vl"}},
                "dataset_config": {"datasets": [{"path": str(rows)}], "packing_length": 4096},
                "trainer_args": {"dataloader_num_workers": given.workers},
            }
        )
        plain = Plain(rows, opened)
        size = sum(file.stat().st_size for file in (folder / "images").iterdir()) / given.rows / 1e6
        rates: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(given.rounds):
            rates["plain"].append(rate(plain_batches(plain, given.workers)))
            rates["ours"].append(rate(our_batches(job, make)))
    ratios = [ours / other for ours, other in zip(rates["ours"], rates["plain"], strict=True)]
    print("| loader | pictures/s | MB/s of JPEG |\n| --- | --- | --- |")
    for name, found in rates.items():
        print(f"| {name} | {median(found):.1f} | {median(found) * size:.1f} |")
    print(f"\nratio by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
