"""Pictures that a generative model draws at the end of a run: `drawings/<number> <caption>.png`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from PIL import Image

from lmms_engine.datasets.processor import Processor
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.seed import generator

FOLDER = "drawings"


def write_drawings(
    objective: Objective, processor: Processor, mesh: Mesh, seed: int, run_dir: Path
) -> list[Path]:
    """Has the objective draw, from noise that depends on the seed alone. Collective; rank 0 writes.

    Old drawings of the run folder go. Leaves the objective in evaluation mode.
    """
    objective.eval()
    with torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []):
        drawings = objective.drawings(processor, mesh.device, generator(seed, "drawings"))
    folder = run_dir / FOLDER
    if not (mesh.is_main and drawings):
        return []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = []
    for number, drawing in enumerate(drawings):
        caption = re.sub(r"[^\w .,-]+", "_", drawing.caption)[:80]
        paths.append(folder / f"{number:02d} {caption}.png")
        Image.fromarray(drawing.pixels.numpy()).save(paths[-1])
    return paths


def read_drawings(run_dir: Path) -> list[tuple[str, Path]]:
    """(caption, file) of the pictures in a run folder, in order."""
    return [(path.stem.partition(" ")[2], path) for path in sorted((run_dir / FOLDER).glob("*.png"))]
