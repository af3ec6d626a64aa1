"""What benchmarks of real-size models share: job, random weights made on the device, timed steps, tables."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import FAMILY, model_config
from torch import nn
from torch.distributed.tensor import DTensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.data import build_loader
from lmms_engine.train.metrics import peak_flops, peak_memory_gb
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.runner import frozen_names
from lmms_engine.train.seed import generator
from lmms_engine.train.step import train_step


def make_job(size: str, data: Path, processor: Path, *, cut: int | None = None, **changes: Any) -> Job:
    """The job of a benchmark; `changes` go to trainer_args, those about packs and shards to the data."""
    packing_length = changes.pop("packing_length")
    return Job.from_dict(
        {
            "model_config": {"load_from_config": model_config(size, cut=cut)},
            "dataset_config": {
                # several times over, so that an epoch is long and few packs are its part-filled last ones
                "datasets": [{"path": str(data)}] * changes.pop("repeats", 1),
                "processor_config": {"processor_name": str(processor / FAMILY[size])},
                "packing_length": packing_length,
                "packing_strategy": changes.pop("packing_strategy", "first_fit"),
                "num_logical_shards": changes.pop("num_logical_shards", 8),
            },
            "trainer_args": {
                "max_steps": 1000, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "report_to": "none",
                "freeze_modules": [],
            } | changes,
        }
    )  # fmt: skip


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random weights, drawn on the device: a full-size model is there in a second. Norms are 1, biases 0.

    For speed only: the engine itself starts from the library's initialisation.
    """
    rng = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() > 1:
            local.normal_(0, 0.02, generator=rng)
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)


def recompute(*, full: int, others: str | None) -> dict[str, str]:
    """The tower and the first `full` decoder layers; the others "selective", or not at all (None)."""
    chosen = {"visual": "full"} | ({"language_model": others} if others else {})
    return chosen | {f"language_model.layers.{i}": "full" for i in range(full)}


@dataclass(frozen=True)
class Measured:
    """Timed steps, over all ranks. mfu: of one device, None where its peak is unknown."""

    step_s: float      # data wait, forward, backward, optimiser; of the slowest rank
    spread_s: float    # slowest less fastest step
    data_s: float      # of which waiting for data, the rank that waited most
    tokens: float      # of a step; those of a shared sequence count once
    tokens_per_s: float
    tflops: float      # strict, a device
    mfu: float | None
    mfu_conventional: float | None
    peak_gb: float     # of the fullest rank; on a CPU resident memory
    loss: float        # of the last step


class RealSize:
    """A model of random weights with its optimiser, trained by the engine's own step."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.mesh = mesh
        self.objective, self.spec, self.config = build_model(job, mesh, load_weights=False)
        fill(self.objective.model)
        self.backend = FSDP2Backend(self.objective, job, mesh)
        self.frozen = frozen_names(self.objective.model)
        self.steps = 0

    def step(self, micros: list[PackedBatch]) -> float:
        """One training step; the mean loss over all ranks, read from the device."""
        self.steps += 1
        self.backend.set_progress(self.steps / 1000, self.steps)
        rng = generator(0, self.mesh.dp_rank, self.steps)
        stats = train_step(self.objective, self.backend, micros, self.mesh, rng)
        (total,) = self.mesh.host_sum([stats.sums["ce"].item()])
        return total / stats.totals["ce"]

    def measure(self, job: Job, *, steps: int, warmup: int) -> Measured:
        """Mean step over the job's loader, data wait and optimiser included. Collective."""
        mesh = self.mesh
        on_gpu = mesh.device.type == "cuda"
        loader = build_loader(job, mesh.dp_rank, mesh.dp_size, pin_memory=on_gpu)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, waits, flops, tokens = [], [], [], []
        for _ in range(warmup + steps):
            synchronize(mesh.device)
            begin = time.perf_counter()
            micros = full_window(loader, job.trainer.gradient_accumulation_steps)
            waits.append(time.perf_counter() - begin)
            loss = self.step(micros)
            seconds.append(time.perf_counter() - begin)
            each = [self.spec.flops(self.config, micro, self.frozen) for micro in micros]
            flops.append((sum(f.strict for f in each), sum(f.conventional for f in each)))
            tokens.append(sum(micro.num_tokens for micro in micros))
        loader.close()
        measured = slice(warmup, None)
        done = mesh.sum_over_data({
            "tokens": sum(tokens[measured]),
            "strict": sum(strict for strict, _ in flops[measured]),
            "conventional": sum(conventional for _, conventional in flops[measured]),
        })  # fmt: skip
        total, spread, wait, peak_gb = mesh.host_max([
            sum(seconds[measured]),
            max(seconds[measured]) - min(seconds[measured]),
            statistics.mean(waits[measured]),
            peak_memory_gb(mesh.device),
        ])  # fmt: skip
        each_device, peak = total * mesh.world_size, peak_flops(mesh.device)
        return Measured(
            step_s=total / steps,
            spread_s=spread,
            data_s=wait,
            tokens=done["tokens"] / steps,
            tokens_per_s=done["tokens"] / total,
            tflops=done["strict"] / each_device / 1e12,
            mfu=peak and done["strict"] / each_device / peak,
            mfu_conventional=peak and done["conventional"] / each_device / peak,
            peak_gb=peak_gb,
            loss=loss,
        )


def full_window(loader: Loader, accumulation: int) -> list[PackedBatch]:
    """As many micro-batches every time: the part-filled window at the end of an epoch is left out."""
    micros = loader.next_step()
    if len(micros) < accumulation:
        loader.next_epoch()
        micros = loader.next_step()
    if len(micros) < accumulation:
        raise UserError(f"an epoch of this rank has less than {accumulation} packs; give it more rows")
    return micros


def synchronize(device: torch.device) -> None:
    """Waits for the device, where it runs beside the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release() -> None:
    """Frees what is no longer referred to, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text; the columns of the first row."""
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    columns = list(rows[0])
    grid = [columns, *([cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in grid)
