"""The vision-language families on one GPU: numerics against float32 on the CPU, then speed at real size.

python benchmarks/h200_vlm.py numerics --out numerics.json
python benchmarks/h200_vlm.py speed --out speed.json [--variant NAME ...]

Weights are random, pictures are JPEG files that the real loader decodes. Each command ends with a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import FAMILY, model_config, write_chats
from torch import Tensor
from torch.distributed.tensor import DTensor

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.kernels import attention
from lmms_engine.models import hf
from lmms_engine.models.spec import for_type
from lmms_engine.objectives import build_objective
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.segments import Segments
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.data import build_loader
from lmms_engine.train.metrics import peak_flops
from lmms_engine.train.parallelize import apply_kernels, build_model
from lmms_engine.train.runner import frozen_names
from lmms_engine.train.seed import generator
from lmms_engine.train.step import train_step


def make_job(size: str, data: Path, processor: Path, *, cut: int | None = None, **changes: Any) -> Job:
    """The job of a benchmark; `changes` go to trainer_args, `packing_length` to the data."""
    packing_length = changes.pop("packing_length")
    return Job.from_dict(
        {
            "model_config": {"load_from_config": model_config(size, cut=cut)},
            "dataset_config": {
                "datasets": [{"path": str(data)}],
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


# ---- numerics ----------------------------------------------------------------------------------------

BOUNDS = {"mean": 0.01, "max": 0.05, "cosine": 0.99}


@dataclass(frozen=True)
class Outcome:
    """Deviation from the float32 reference. mean, max: of |loss difference| per token over the mean loss."""

    mean: float
    max: float
    cosine: float   # the worst parameter's gradient
    worst: str = ""

    @property
    def within(self) -> bool:
        return (
            self.mean <= BOUNDS["mean"] and self.max <= BOUNDS["max"] and self.cosine >= BOUNDS["cosine"]
        )


def token_losses(objective: Objective, batch: PackedBatch, layout: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token losses (float32, CPU) and gradients of their sum, through the objective's own forward."""
    seen: list[tuple[Tensor, Tensor]] = []
    head = objective.model.get_submodule(layout.head)

    def keep(module, args, kwargs):
        seen.append((args[0].detach(), module.weight.detach().clone()))   # gathered for this call only

    hook = head.register_forward_pre_hook(keep, with_kwargs=True)
    weights = batch.loss_weights
    total = objective(batch)["ce"]
    hook.remove()
    hidden, weight = seen[-1]
    supervised = weights > 0
    logits = F.linear(hidden[supervised], weight.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits, batch.labels[supervised], reduction="none").cpu()
    (total / len(losses)).backward()
    gradients = {}
    for name, parameter in objective.model.named_parameters():
        grad = parameter.grad
        gradients[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).float().cpu()
        parameter.grad = None
    return losses, gradients


def compare(ours: tuple[Tensor, dict], reference: tuple[Tensor, dict]) -> Outcome:
    """Deviation of (losses, gradients) from the reference's."""
    difference = (ours[0] - reference[0]).abs() / reference[0].mean()
    cosines = {
        name: F.cosine_similarity(ours[1][name].flatten(), grad.flatten(), dim=0).item()
        for name, grad in reference[1].items()
    }
    worst = min(cosines, key=cosines.get)
    return Outcome(difference.mean().item(), difference.max().item(), cosines[worst], worst)


def faults(batch: PackedBatch) -> dict[str, PackedBatch]:
    """The batch with one fault planted each."""
    total = batch.input_ids.numel()
    blank = {**batch.media, "pixel_values": torch.zeros_like(batch.media["pixel_values"])}
    return {
        "samples leak": replace(batch, segments=Segments.from_lengths([total])),
        "pictures blanked": replace(batch, media=blank),
        "not causal": replace(batch, segments=replace(batch.segments, causal=False)),
        "positions zero": replace(batch, position_ids=torch.zeros_like(batch.position_ids)),
    }


def cpu_reference(job: Job, state: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The same weights in float32 on the CPU, padded rows through the library's own attention."""
    plain = job.model_copy(
        update={"trainer": job.trainer.model_copy(update={"use_rmpad": False, "use_liger_kernel": False})}
    )
    config = hf.read_config(plain.model)
    spec = for_type(config.model_type)
    model = spec.model_class(config)
    model.load_state_dict(state, strict=False)
    apply_kernels(model, spec, plain, torch.device("cpu"))
    return token_losses(build_objective(spec, model, config, plain), batch, spec.layout)


def numerics(size: str, folder: Path, mesh: Mesh) -> list[dict[str, Any]]:
    """A 4-layer cut, 50 steps on one pack of at most 2,048 tokens, then against float32."""
    data = write_chats(folder / "small", rows=24, pixels=(160, 160), words_per_answer=(4, 4))
    job = make_job(
        size, data, folder / "processor", cut=4, packing_length=2048, num_logical_shards=1,
        learning_rate=3e-4, dataloader_num_workers=0, fsdp_config={"activation_checkpointing": False},
    )  # fmt: skip
    loader = build_loader(job, 0, 1)
    (batch,) = loader.next_step()
    objective, spec, _ = build_model(job, mesh)
    backend = FSDP2Backend(objective, job, mesh)
    for step in range(1, 51):
        backend.set_progress(step / 1000, step)
        stats = train_step(objective, backend, [batch], mesh, generator(0, step))
    loss = (stats.sums["ce"] / stats.totals["ce"]).item()
    state = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu()
        for name, t in objective.model.state_dict().items()
    }
    reference = cpu_reference(job, state, batch)
    note = f"{batch.num_tokens} tokens, {len(batch.rows)} rows, loss {loss:.3f} after 50 steps"
    rows = []

    def record(case: str, outcome: Outcome, expected: bool) -> None:
        rows.append({"model": size, "case": case, **outcome.__dict__, "ok": outcome.within == expected})

    for backend_name in ("varlen", "flex", "sdpa"):
        attention.use(objective.model, spec.layout.attention, attention.install(backend_name))
        ours = token_losses(objective, batch.to(mesh.device), spec.layout)
        record(f"bf16 GPU, {backend_name}", compare(ours, reference), expected=True)
    attention.use(objective.model, spec.layout.attention, attention.install("varlen"))
    for fault, broken in faults(batch).items():
        ours = token_losses(objective, broken.to(mesh.device), spec.layout)
        record(f"planted: {fault}", compare(ours, reference), expected=False)
    print(f"{size}: {note}", flush=True)
    return rows


# ---- speed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One setting of a real-size run."""

    size: str
    packing_length: int
    accumulation: int
    recompute: bool | str | list[str]


HALF = ["visual.blocks.*", "language_model.layers.1*", "language_model.layers.2*"]   # 22 of 36 layers
VARIANTS = {
    "qwen3_vl_4b 16k x 4, recompute all": Variant("qwen3_vl_4b", 16384, 4, True),
    "qwen3_vl_4b 16k x 4, recompute tower + 22 layers": Variant("qwen3_vl_4b", 16384, 4, HALF),
    "qwen3_vl_4b 32k x 1, recompute all": Variant("qwen3_vl_4b", 32768, 1, True),
    "qwen2_5_vl_3b 16k x 4, recompute tower": Variant("qwen2_5_vl_3b", 16384, 4, "encoders"),
    "qwen2_5_vl_3b 16k x 4, recompute all": Variant("qwen2_5_vl_3b", 16384, 4, True),
    "qwen2_5_vl_3b 32k x 1, recompute all": Variant("qwen2_5_vl_3b", 32768, 1, True),
}


def speed(name: str, folder: Path, mesh: Mesh, *, steps: int, warmup: int) -> dict[str, Any]:
    """Mean step of a real-size run over the real loader, data wait and optimiser included."""
    variant = VARIANTS[name]
    job = make_job(
        variant.size, folder / "large" / "train.jsonl", folder / "processor",
        packing_length=variant.packing_length, gradient_accumulation_steps=variant.accumulation,
        learning_rate=1e-5, dataloader_num_workers=8,
        fsdp_config={"activation_checkpointing": variant.recompute},
    )  # fmt: skip
    loader = build_loader(job, 0, 1, pin_memory=True)
    began = time.perf_counter()
    objective, spec, config = build_model(job, mesh)
    backend = FSDP2Backend(objective, job, mesh)
    build_s = time.perf_counter() - began
    frozen = frozen_names(objective.model)
    seconds, waits, strict, conventional, tokens, losses = [], [], [], [], [], []
    torch.cuda.reset_peak_memory_stats()
    for step in range(1, steps + warmup + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        micros = loader.next_step()
        if len(micros) < variant.accumulation:   # a full window every time
            loader.next_epoch()
            micros = loader.next_step()
        waits.append(time.perf_counter() - begin)
        backend.set_progress(step / 1000, step)
        stats = train_step(objective, backend, micros, mesh, generator(0, step))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        flops = [spec.flops(config, micro, frozen) for micro in micros]
        strict.append(sum(f.strict for f in flops))
        conventional.append(sum(f.conventional for f in flops))
        tokens.append(sum(micro.num_tokens for micro in micros))
        losses.append((stats.sums["ce"] / stats.totals["ce"]).item())
    loader.close()
    peak, measured = peak_flops(mesh.device), slice(warmup, None)
    total = sum(seconds[measured])
    return {
        "variant": name,
        "step_s": statistics.mean(seconds[measured]),
        "spread_s": max(seconds[measured]) - min(seconds[measured]),
        "data_s": statistics.mean(waits[measured]),
        "tokens": statistics.mean(tokens[measured]),
        "tokens_per_s": sum(tokens[measured]) / total,
        "mfu": sum(strict[measured]) / total / peak,
        "mfu_conventional": sum(conventional[measured]) / total / peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "build_s": build_s,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def overfit(folder: Path, mesh: Mesh) -> dict[str, Any]:
    """Whether the loss falls over three passes of 8 packs of 16k, Qwen3-VL-4B at real size."""
    job = make_job(
        "qwen3_vl_4b", folder / "large" / "train.jsonl", folder / "processor", packing_length=16384,
        learning_rate=2e-5, dataloader_num_workers=8,
    )  # fmt: skip
    loader = build_loader(job, 0, 1, pin_memory=True)
    packs = [loader.next_step()[0] for _ in range(8)]
    loader.close()
    objective, _, _ = build_model(job, mesh)
    backend = FSDP2Backend(objective, job, mesh)
    passes = []
    for turn in range(3):
        losses = []
        for i, pack in enumerate(packs, 1):
            backend.set_progress(0.5, turn * 8 + i)
            stats = train_step(objective, backend, [pack], mesh, generator(0, turn, i))
            losses.append(stats.sums["ce"] / stats.totals["ce"])
        passes.append(torch.stack(losses).mean().item())
    return {"variant": "qwen3_vl_4b 8 packs of 16k, 3 passes", "mean_loss_per_pass": passes}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text; the columns of the first row."""
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    columns = list(rows[0])
    grid = [columns, *([cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("numerics", "speed", "overfit"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variant", action="append", help="speed: only these (default: all)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    mesh = build_mesh()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_processors(folder / "processor")
        if options.what != "numerics":
            write_chats(folder / "large", rows=400)
        if options.what == "numerics":
            cases = [lambda size=size: numerics(size, folder, mesh) for size in FAMILY]
        elif options.what == "overfit":
            cases = [lambda: [overfit(folder, mesh)]]
        else:
            cases = [
                lambda v=v: [speed(v, folder, mesh, steps=options.steps, warmup=options.warmup)]
                for v in options.variant or VARIANTS
            ]
        for case in cases:
            try:
                rows += case()
            except torch.cuda.OutOfMemoryError as error:
                print(f"out of memory: {error}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(rows) if rows else "no result")
    leave_mesh()


if __name__ == "__main__":
    main()
