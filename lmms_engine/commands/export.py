"""`lmms-engine export`: a checkpoint as a Hugging Face folder that other programs open.

lmms-engine export runs/qwen3_vl-smoke                               # newest checkpoint -> <run>/export
lmms-engine export runs/x/checkpoints/step-00000500 --out out --dtype fp32
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PretrainedConfig

from lmms_engine.config import load_job
from lmms_engine.errors import UserError
from lmms_engine.models import hf
from lmms_engine.models.spec import ModelSpec, for_type
from lmms_engine.train import checkpoint
from lmms_engine.train.data import build_processor
from lmms_engine.train.rundir import CONFIG_FILE


class Dtype(StrEnum):
    """Type of the weights on disk."""

    bf16 = "bf16"
    fp32 = "fp32"


DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="run folder, or one checkpoint")
    ],
    out: Annotated[Path | None, typer.Option(help="folder to write; default: <run>/export")] = None,
    dtype: Annotated[Dtype, typer.Option(help="type of the weights")] = Dtype.bf16,
) -> None:
    """Write a checkpoint as a folder that transformers' from_pretrained and AutoProcessor open."""
    run_dir, folder = find_checkpoint(source)
    job = load_job([run_dir / CONFIG_FILE], [])
    config = hf.read_config(job.model)
    spec = for_type(config.model_type)
    pretrained = job.model.load_from_pretrained_path
    out = (out or run_dir / "export").absolute()
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file())):
        raise UserError(f"--out {out}: is there already and is no model folder; choose another")
    hf.export(
        spec,
        config,
        _with_progress(checkpoint.model_only_state(folder), count_tensors(spec, config)),
        out,
        dtype=DTYPES[dtype],
        processor=build_processor(job),
        source=hf.local_folder(pretrained, weights=False) if pretrained else None,
    )
    typer.echo(f"{folder.name} -> {out} ({dtype.value})")


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of either; the newest complete checkpoint of a run."""
    source = source.absolute()
    if (source / CONFIG_FILE).is_file():
        newest = checkpoint.latest(source)
        if newest is None:
            raise UserError(f"{source}: this run has no complete checkpoint yet")
        return source, newest
    run_dir = source.parent.parent
    if source.is_dir() and (run_dir / CONFIG_FILE).is_file():
        checkpoint.read_state(source)  # raises if it is not complete
        return run_dir, source
    raise UserError(
        f"{source}: neither a run folder (with {CONFIG_FILE}) nor a checkpoint inside one; train first"
    )


def count_tensors(spec: ModelSpec, config: PretrainedConfig) -> int:
    """How many tensors a checkpoint of this model holds."""
    model = hf.build_meta(spec, config)
    return len(model.state_dict().keys() - hf.tied_names(model).keys())


def _with_progress(weights: Iterable[tuple[str, Tensor]], total: int) -> Iterator[tuple[str, Tensor]]:
    console = Console(stderr=True)
    yield from track(weights, "export", total, console=console, disable=not console.is_terminal)
