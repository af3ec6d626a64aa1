"""What a rank does for `scaling.py`: timed training in a layout, and batches whose modality differs by rank.

A case is a model, a layout and a packing strategy, written `qwen3_vl_8b/fsdp/first_fit`.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import MARKS, SIZES, write_chats
from vlm import RealSize, full_window, make_job, recompute, release

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train.data import build_loader

LAYOUTS = ("fsdp", "hsdp", "sp2", "sp4")
PACKINGS = ("first_fit", "best_fit", "balanced")
MODALITIES = ("text", "pictures", "clips")


@dataclass(frozen=True)
class Scale:
    """How much data and work a case takes. Lengths in tokens; words: of an answer, at least and at most."""

    pack: int
    long_pack: int         # where ranks share a sequence
    accumulation: int
    workers: int           # processes of each rank's loader
    rows: int
    long_rows: int
    pictures_per_long_row: int
    pixels: tuple[int, int]
    words: tuple[int, int]
    learning_rate: float


REAL = Scale(
    pack=16384, long_pack=131072, accumulation=2, workers=8, rows=400, long_rows=32,
    pictures_per_long_row=64, pixels=(384, 1024), words=(60, 180), learning_rate=1e-5,
)  # fmt: skip
TINY = Scale(
    pack=256, long_pack=512, accumulation=2, workers=0, rows=48, long_rows=16,
    pictures_per_long_row=4, pixels=(48, 96), words=(4, 20), learning_rate=1e-3,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One line of the table at one number of ranks."""

    model: str
    layout: str
    packing: str

    @classmethod
    def parse(cls, word: str) -> Case:
        """From `model/layout/packing`; ValueError names what is not legal."""
        parts = word.split("/")
        if len(parts) != 3:
            raise ValueError(f"{word}: a case is MODEL/LAYOUT/PACKING, such as qwen3_vl_8b/fsdp/first_fit")
        for part, legal in zip(parts, (tuple(SIZES), LAYOUTS, PACKINGS), strict=True):
            if part not in legal:
                raise ValueError(f"{word}: no {part} (legal: {', '.join(legal)})")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.model}/{self.layout}/{self.packing}"

    @property
    def sp(self) -> int:
        """Ranks that share a sequence."""
        return int(self.layout[2:]) if re.fullmatch(r"sp\d+", self.layout) else 1

    def shortage(self, ranks: int) -> str | None:
        """Why the layout needs other ranks, or None."""
        if ranks % self.sp:
            return f"{self.layout} needs a multiple of {self.sp} ranks"
        if self.layout == "hsdp" and (ranks < 4 or ranks % 2):
            return "hsdp needs two replicas of at least two ranks"
        return None

    def layout_of(self, ranks: int) -> dict[str, Any]:
        """The keys of trainer_args that ask for the layout, apart from recomputation."""
        return {
            "sp_ulysses_degree": self.sp,
            "fsdp_config": {"hsdp_shard_size": ranks // 2} if self.layout == "hsdp" else {},
        }


@dataclass(frozen=True)
class Work:
    """What all cases of a run have in common."""

    folder: Path            # holds the data and processors; made by the first run
    scale: Scale
    steps: int
    warmup: int
    mixed_steps: int
    recomputed: str         # "full", "selective", "none", or how many decoder layers are recomputed fully
    keep_gathered: bool     # weights from the forward to the backward
    timeout: int            # of collectives, seconds


def write_data(work: Work, cases: list[Case], parts: list[str]) -> None:
    """The files that these cases read, unless they are there. One process does it."""
    scale, folder = work.scale, work.folder
    usual = {"pixels": scale.pixels, "words_per_answer": scale.words}
    if not (folder / "processor").exists():
        write_processors(folder / "processor")
    wanted: dict[str, dict[str, Any]] = {}
    if "throughput" in parts:
        if any(case.sp == 1 for case in cases):
            wanted["usual"] = {"rows": scale.rows}
        if any(case.sp > 1 for case in cases):
            wanted["long"] = {"rows": scale.long_rows, "per_row": scale.pictures_per_long_row}
    if "mixed" in parts:
        wanted |= {name: {"rows": max(scale.rows // 4, 32), "media": name} for name in MODALITIES}
    for name, options in wanted.items():
        if not (folder / name / "train.jsonl").exists():
            write_chats(folder / name, **usual, **options)


def job_of(case: Case, ranks: int, work: Work, data: str, **changes: Any) -> Job:
    """The job of a case on one of the sets of `write_data`."""
    long, data_ranks, scale = data == "long", ranks // case.sp, work.scale
    layout = case.layout_of(ranks)
    layout["fsdp_config"] |= {
        "activation_checkpointing": checkpointing(work.recomputed),
        "reshard_after_forward": not work.keep_gathered,
    }
    settings = {
        "packing_length": scale.long_pack if long else scale.pack,
        "gradient_accumulation_steps": 1 if long else scale.accumulation,
        # as many rows and shards for each data rank at every size, so that epochs and packs are alike
        "repeats": 4 * data_ranks, "num_logical_shards": 4 * data_ranks,
    }  # fmt: skip
    return make_job(
        case.model, work.folder / data / "train.jsonl", work.folder / "processor",
        packing_strategy=case.packing, learning_rate=scale.learning_rate,
        dataloader_num_workers=scale.workers, ddp_timeout=work.timeout, **layout, **(settings | changes),
    )  # fmt: skip


def checkpointing(word: str) -> bool | dict[str, str]:
    """fsdp_config.activation_checkpointing for `--recompute`."""
    if word.isdecimal():
        return recompute(full=int(word), others="selective")
    named = {"full": True, "selective": recompute(full=0, others="selective"), "none": False}
    if word not in named:
        raise ValueError(f"--recompute {word}: not legal (legal: {', '.join(named)}, or a number of layers)")
    return named[word]


def throughput(case: Case, work: Work, ranks: int) -> dict[str, Any]:
    """Timed steps of one case on these ranks. Collective."""
    release()
    job = job_of(case, ranks, work, "long" if case.sp > 1 else "usual")
    mesh = build_mesh(job.trainer)
    began = time.perf_counter()
    run = RealSize(job, mesh)
    built = time.perf_counter() - began
    measured = asdict(run.measure(job, steps=work.steps, warmup=work.warmup))
    return {
        **asdict(case), "ranks": ranks, "data_ranks": mesh.dp_size, **measured,
        "data_share": measured["data_s"] / measured["step_s"], "pack": job.dataset.packing_length,
        "accumulation": job.trainer.gradient_accumulation_steps, "recomputed": work.recomputed,
        "built_s": built,
    }  # fmt: skip


def mixed(case: Case, work: Work, ranks: int) -> dict[str, Any]:
    """Steps in which each data rank has another modality than its neighbours, in turns. Collective.

    A collective that some ranks leave out, because their batch has no picture, hangs here.
    """
    release()
    sets = {name: job_of(case, ranks, work, name, gradient_accumulation_steps=1) for name in MODALITIES}
    mesh = build_mesh(sets["text"].trainer)
    run = RealSize(sets["text"], mesh)
    loaders = {
        name: build_loader(job, mesh.dp_rank, mesh.dp_size, pin_memory=mesh.device.type == "cuda")
        for name, job in sets.items()
    }
    losses: list[float] = []
    seen: Counter[str] = Counter()
    began = time.perf_counter()
    for step in range(work.mixed_steps):
        name = MODALITIES[(mesh.dp_rank + step) % len(MODALITIES)]
        micros = full_window(loaders[name], 1)
        seen[f"{name}: packs"] += 1
        for what, tokens in placeholders(micros).items():
            seen[f"{name}: {what} tokens"] += tokens
        losses.append(run.step(micros))
    seconds = time.perf_counter() - began
    for loader in loaders.values():
        loader.close()
    return {
        **asdict(case), "ranks": ranks, "steps": len(losses), "seconds": seconds,
        "first_loss": losses[0], "last_loss": losses[-1],
        "finite": all(math.isfinite(loss) for loss in losses), "seen": over_ranks(mesh, seen),
    }  # fmt: skip


def placeholders(micros: list[PackedBatch]) -> dict[str, int]:
    """Tokens that stand for pictures and clips of rows. Behind the rows may come a stand-in for the tower."""
    marks = {"picture": MARKS["image_token_id"], "clip": MARKS["video_token_id"]}
    ids = [micro.input_ids[: sum(micro.segments.lengths()[: len(micro.rows)])] for micro in micros]
    return {what: sum(int((own == token).sum()) for own in ids) for what, token in marks.items()}


def over_ranks(mesh: Mesh, seen: Counter[str]) -> dict[str, int]:
    """Sums over data ranks: those of one sequence read the same batches, and the first tells."""
    total: Counter[str] = Counter()
    for rank, each in enumerate(mesh.gather(dict(seen))):
        if rank % mesh.sp_size == 0:
            total.update(each)
    return dict(total)


PARTS = {"throughput": throughput, "mixed": mixed}
DEFAULT_MODELS = ("qwen3_vl_4b", "qwen2_5_vl_7b", "qwen3_vl_8b")
TINY_MODEL = "qwen3_vl_tiny"
