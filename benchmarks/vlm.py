"""What the benchmarks of real-size models share: their job, random weights made on the device, tables."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from common import FAMILY, model_config
from torch import nn
from torch.distributed.tensor import DTensor

from lmms_engine.config import Job


def make_job(size: str, data: Path, processor: Path, *, cut: int | None = None, **changes: Any) -> Job:
    """The job of a benchmark; `changes` go to trainer_args, `packing_length` to the data."""
    packing_length = changes.pop("packing_length")
    return Job.from_dict(
        {
            "model_config": {"load_from_config": model_config(size, cut=cut)},
            "dataset_config": {
                # several times over, so that an epoch is long and few packs are its part-filled last ones
                "datasets": [{"path": str(data)}] * changes.pop("repeats", 1),
                "processor_config": {"processor_name": str(processor / FAMILY[size])},
                "packing_length": packing_length,
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
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    columns = list(rows[0])
    grid = [columns, *([cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in grid)
