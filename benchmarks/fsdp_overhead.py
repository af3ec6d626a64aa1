"""What FSDP2 costs on one GPU: forward and backward of a wrapped model against the bare one, in one run.

    python benchmarks/fsdp_overhead.py [--layers 12] [--json fsdp_overhead.json]

Qwen3-VL-4B with fewer decoder layers and vision blocks, random weights, real pictures, four packs of 16k
tokens accumulated, the tower recomputed. No optimiser: its work is the same for both.

bare        bf16 weights, gradients added up in bf16; no float32 anywhere
resharded   FSDP2: float32 masters cast to bf16 for each forward and each backward, gradients in float32
kept        the same with reshard_after_forward=false: one cast a step
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import write_chats
from vlm import fill, make_job, release, synchronize, table

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models import hf
from lmms_engine.models.spec import for_type
from lmms_engine.objectives import build_objective
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.activation_checkpoint import recompute
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.parallel.paths import resolve
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.data import build_loader
from lmms_engine.train.parallelize import apply_kernels, build_model

SIZE, PACK, MICROS = "qwen3_vl_4b", 16384, 4
WAYS = ("bare", "resharded", "kept")


def make(way: str, job: Job, mesh: Mesh) -> tuple[Objective, FSDP2Backend | None]:
    """The objective, and the backend that says when gradients are reduced (none for the bare model)."""
    if way != "bare":
        objective, _, _ = build_model(job, mesh, load_weights=False)
        fill(objective.model)
        return objective, FSDP2Backend(objective, job, mesh)
    config = hf.read_config(job.model)
    spec = for_type(config.model_type)
    model = hf.build_meta(spec, config)
    apply_kernels(model, spec, job, mesh.device)
    for block in resolve(model, "model.visual.blocks.*").values():
        recompute(block, "full")
    objective = build_objective(spec, model, config, job)
    materialise(objective, model, mesh, None, lambda: hf.buffers(spec, config))
    fill(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return objective, None


def step(objective: Objective, backend: FSDP2Backend | None, micros: list[PackedBatch], mesh: Mesh) -> None:
    """Forward and backward of all micro-batches; gradients are dropped at the end."""
    for i, micro in enumerate(micros):
        micro = micro.to(mesh.device)
        if backend is None:
            objective(micro)["ce"].backward()
            continue
        with backend.micro(last=i == len(micros) - 1):
            backend.backward(objective(micro)["ce"])
    objective.zero_grad(set_to_none=True)


def measure(way: str, job: Job, mesh: Mesh, micros: list[PackedBatch], repeats: int) -> dict:
    """Median seconds of a step, and the peak of allocated memory."""
    release()
    objective, backend = make(way, job, mesh)
    seconds = []
    for i in range(repeats + 2):
        if i == 2 and mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(mesh.device)
        begin = time.perf_counter()
        step(objective, backend, micros, mesh)
        synchronize(mesh.device)
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 1e9 if mesh.device.type == "cuda" else float("nan")
    return {"way": way, "step_s": statistics.median(seconds[2:]), "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pack", type=int, default=PACK)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here too")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    mesh = build_mesh()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_processors(folder / "processor")
        data = write_chats(folder / "chats", rows=120 * given.pack // PACK + 8)
        jobs = {
            way: make_job(
                SIZE, data, folder / "processor", cut=given.layers, packing_length=given.pack,
                gradient_accumulation_steps=MICROS, dataloader_num_workers=0,
                fsdp_config={
                    "activation_checkpointing": "encoders", "reshard_after_forward": way == "resharded"
                },
            )
            for way in WAYS
        }  # fmt: skip
        loader = build_loader(jobs["bare"], 0, 1)
        micros = loader.next_step()
        rows = [measure(way, jobs[way], mesh, micros, given.repeats) for way in WAYS]
    for row in rows:
        row["overhead"] = row["step_s"] / rows[0]["step_s"] - 1
    print(f"{SIZE}, {given.layers} layers, {sum(m.num_tokens for m in micros)} tokens a step")
    print(table(rows))
    if given.json is not None:
        gpu = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "none"
        meta = {"gpu": gpu, "torch": torch.__version__, "layers": given.layers, "rows": rows}
        given.json.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    leave_mesh()


if __name__ == "__main__":
    main()
