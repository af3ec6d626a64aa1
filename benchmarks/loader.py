"""Pictures per second of the Loader, against torch's DataLoader with Pillow and the library's processor.

    python benchmarks/loader.py [--rows 300] [--workers 2] [--rounds 3] [--profile]

All read the same JPEG files of about 700×700 and the same chats, decode them in the same number of worker
processes and hand tensors to the main process. The plain one neither packs nor checks nor computes labels and
positions; it runs row by row and in batches of as many rows as our packs have. Ours hands over bytes, of
which the model's device makes floats; `ours, floats on the CPU` does that too, in the main process, where
plain leaves it to its workers. They take turns, round by round, so that what else the machine does meets all.
A round counts from the first batch; CPU time is that of the process and its workers; ratios are to the first
line. `--profile` prints where our workers' time goes.
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

import psutil
import torch
from common import MARKS, write_chats
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3VLConfig

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor.pixels import tower_kwargs
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

    def __getitem__(self, index: int) -> tuple[str, Image.Image]:
        messages = self.rows[index]["messages"]
        url = messages[0]["content"][0]["image_url"]["url"]
        picture = Image.open(self.folder / url).convert("RGB")
        turns = [{"role": "user", "content": [{"type": "image"}, messages[0]["content"][1]]}, messages[1]]
        return self.processor.apply_chat_template(turns, tokenize=False), picture

    def collate(self, rows: list[tuple[str, Image.Image]]) -> dict[str, torch.Tensor]:
        """Texts and pictures as a padded batch."""
        torch.set_num_threads(1)
        texts, pictures = map(list, zip(*rows, strict=True))
        return dict(self.processor(text=texts, images=pictures, padding=True, return_tensors="pt"))


def plain_batches(plain: Plain, workers: int, batch_size: int) -> Iterator[int]:
    """Pictures of each batch."""
    feed = DataLoader(plain, batch_size, shuffle=True, num_workers=workers, collate_fn=plain.collate)
    for batch in feed:
        yield len(batch["image_grid_thw"])


def our_batches(job: Job, make: Callable[[], Any], *, floats: bool) -> Iterator[int]:
    """Pictures of each batch of an epoch; floats: with the model's media made as well."""
    loader = Loader(job, make, dp_rank=0, dp_size=1)
    while micros := loader.next_step():
        for micro in micros:
            if floats:
                tower_kwargs(micro.media, micro.tower)
            yield len(micro.rows)   # one picture a row
    loader.close()


def cpu_seconds() -> float:
    """Processor time of this process and of its workers, those that have ended included."""
    process = psutil.Process()
    workers = [child.cpu_times() for child in process.children()]
    return sum(process.cpu_times()[:4]) + sum(times.user + times.system for times in workers)


def rate(batches: Iterator[int]) -> tuple[float, float]:
    """Pictures per second after the first batch, and milliseconds of processor time per picture."""
    next(batches)
    began, used = time.perf_counter(), cpu_seconds()
    pictures = sum(batches)
    return pictures / (time.perf_counter() - began), (cpu_seconds() - used) / pictures * 1000


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
        many = given.rows // sum(1 for _ in our_batches(job, make, floats=False))   # rows of a pack
        sides = {
            "plain, a row at a time": lambda: plain_batches(plain, given.workers, 1),
            f"plain, {many} rows at a time": lambda: plain_batches(plain, given.workers, many),
            "ours": lambda: our_batches(job, make, floats=False),
            "ours, floats on the CPU": lambda: our_batches(job, make, floats=True),
        }
        rounds = [{name: rate(side()) for name, side in sides.items()} for _ in range(given.rounds)]
    print("| loader | pictures/s | MB/s of JPEG | ratio | by round | CPU ms/picture | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first = next(iter(sides))
    for name in sides:
        speed, spent = (median(found[name][i] for found in rounds) for i in range(2))
        ratios = [found[name][0] / found[first][0] for found in rounds]
        saved = median(found[first][1] / found[name][1] for found in rounds)
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"| {name} | {speed:.1f} | {speed * size:.1f} | {median(ratios):.2f} | {each} |"
            f" {spent:.1f} | {saved:.2f} |"
        )


if __name__ == "__main__":
    main()
