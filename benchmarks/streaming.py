"""Start time and host memory of the Loader over data sets of 1 to 200 GB.

    python benchmarks/streaming.py --folder /tmp/streaming [--batches 2000] [--workers 4]

The folder gets one shard of 1 GB, as Parquet and as JSONL, with hard links to it that make sets of 10 and of
200 GB, and one JSONL file of 10 GB: 12 GB on disk, which are deleted at the end. Rows are chats with one JPEG
inside. Each line of the table is a process of its own with Qwen3-VL's processor and the given number of
workers; `first batch` counts from the call of the Loader, memory is the proportional set size (PSS) of the
whole process tree. Free the page cache first to see a cold start.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

GB = 10**9
PICTURES, WORDS = 64, ("red", "green", "circle", "square", "left", "right", "above", "one", "two")
ROW_GROUP = 1000
SAMPLE_EVERY = 50
SETS = ("parquet-1", "parquet-10", "parquet-200", "jsonl-1", "jsonl-10", "jsonl-200", "large.jsonl")


def rows(count: int):
    """Chats of one picture of 224 × 224 each; the bytes of the picture under `image`."""
    noise, rng = np.random.default_rng(0), random.Random(0)
    pictures = []
    for _ in range(PICTURES):
        out = io.BytesIO()
        Image.fromarray(noise.integers(0, 256, (56, 56, 3), dtype=np.uint8)).resize((224, 224)).save(
            out, "JPEG", quality=95
        )
        pictures.append(out.getvalue())
    for i in range(count):
        question = f"<image>\nWhat is shown in picture {i}?"
        answer = " ".join(rng.choices(WORDS, k=rng.randint(20, 80)))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"id": f"r{i}", "image": pictures[i % PICTURES], "messages": turns}


def write_shards(folder: Path) -> None:
    """One shard of 1 GB in each format, the links, and the file of 10 GB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = len(next(rows(1))["image"])
    with (folder / "shard.jsonl").open("w") as file:
        for row in rows(GB // (size * 4 // 3 + 500)):
            data = base64.b64encode(row["image"]).decode()
            file.write(json.dumps({**row, "image": f"data:image/jpeg;base64,{data}"}) + "\n")
    writer, held = None, []
    for row in rows(GB // (size + 500)):
        held.append(row)
        if len(held) == ROW_GROUP:
            table = pa.Table.from_pylist(held)
            # Pictures do not become smaller, and 64 of them as a dictionary would.
            writer = writer or pq.ParquetWriter(folder / "shard.parquet", table.schema, use_dictionary=False,
                                                compression="none")  # fmt: skip
            writer.write_table(table)
            held = []
    writer.close()
    with (folder / "large.jsonl").open("wb") as out:
        for _ in range(10):
            with (folder / "shard.jsonl").open("rb") as shard:
                shutil.copyfileobj(shard, out, 1 << 24)
    for suffix in ("parquet", "jsonl"):
        for links in (1, 10, 200):
            (folder / f"{suffix}-{links}").mkdir()
            for i in range(links):
                os.link(folder / f"shard.{suffix}", folder / f"{suffix}-{links}" / f"{i:03}.{suffix}")


def pss() -> float:
    """GB of this process and all below it."""
    own = psutil.Process()
    return sum(process.memory_full_info().pss for process in (own, *own.children(recursive=True))) / GB


def measure(path: Path, processor: Path, workers: int, batches: int) -> None:
    """Prints one JSON line: seconds to the first batch, GB of memory along the way, batches and rows."""
    from common import MARKS
    from transformers import Qwen3VLConfig

    from lmms_engine.config import Job
    from lmms_engine.datasets.loader import Loader
    from lmms_engine.models.qwen3_vl.processor import Qwen3VLProcessor

    job = Job.from_dict(
        {
            "model_config": {"load_from_config": {"model_type": "qwen3_vl"}},
            "dataset_config": {"datasets": [{"path": str(path)}], "packing_length": 256},
            "trainer_args": {"dataloader_num_workers": workers},
        }
    )
    make = partial(Qwen3VLProcessor.from_pretrained, processor, config=Qwen3VLConfig(**MARKS))
    began = time.perf_counter()
    loader = Loader(job, make, dp_rank=0, dp_size=1)
    ready = time.perf_counter() - began
    count = sum(len(micro.rows) for micro in loader.next_step())
    first = time.perf_counter() - began
    memory = [pss()]
    for i in range(1, batches):
        count += sum(len(micro.rows) for micro in loader.next_step())
        if i % SAMPLE_EVERY == 0:
            memory.append(pss())
    took = time.perf_counter() - began
    loader.close()
    print(json.dumps({"ready": ready, "first": first, "memory": memory, "rows": count, "took": took}))


def child(folder: Path, name: str, workers: int, batches: int) -> dict:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--measure", name]
    command += ["--workers", str(workers), "--batches", str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--keep", action="store_true", help="use the files again and leave them")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        processor = given.folder / "processor" / "qwen3_vl"
        measure(given.folder / given.measure, processor, given.workers, given.batches)
        return
    from data_prep.processors import write_processors

    if not given.keep or not given.folder.exists():
        given.folder.mkdir(parents=True)
        if shutil.disk_usage(given.folder).free < 20 * GB:
            raise SystemExit(f"{given.folder}: 12 GB are written and 8 more must stay free")
        write_processors(given.folder / "processor")
        write_shards(given.folder)
    try:
        print("| set | size | Loader made | first batch | PSS at batch 100 | most PSS | at the end | rows |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        large = ("parquet-200", "jsonl-200", "large.jsonl")
        for name in given.sets:
            batches = given.batches if name in large else 101
            found = child(given.folder, name, given.workers, batches)
            path, memory = given.folder / name, found["memory"]
            files = [path] if path.is_file() else list(path.iterdir())
            size = sum(file.stat().st_size for file in files) / GB
            end = f"{memory[-1]:.2f} GB" if batches > 101 else "–"
            print(
                f"| {name} | {size:.0f} GB, {len(files)} | {found['ready']:.2f} s | {found['first']:.2f} s |"
                f" {memory[100 // SAMPLE_EVERY]:.2f} GB | {max(memory):.2f} GB | {end} |"
                f" {found['rows']} in {found['took']:.0f} s |",
                flush=True,
            )
    finally:
        if not given.keep:
            shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
