"""The vision-language families on one GPU: numerics against float32 on the CPU, then speed at real size.

python benchmarks/h200_vlm.py numerics --out numerics.json
python benchmarks/h200_vlm.py speed --out speed.json [--model qwen3_vl_4b]
python benchmarks/h200_vlm.py profile --out profile.json --model qwen3_vl_4b

Weights are random, pictures are JPEG files that the real loader decodes. Each command ends with a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import write_chats
from torch import Tensor
from torch.distributed.tensor import DTensor
from vlm import RealSize, make_job, recompute, release, synchronize, table

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
from lmms_engine.train.parallelize import apply_kernels, build_model
from lmms_engine.train.seed import generator
from lmms_engine.train.step import train_step

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
    """Per-token losses (float32) and gradients of their mean, through the objective's own forward."""
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
    losses = F.cross_entropy(logits, batch.labels[supervised], reduction="none")
    (total / len(losses)).backward()
    gradients = {}
    for name, parameter in objective.model.named_parameters():
        grad = parameter.grad
        gradients[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).float()
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
    blank = {**batch.media, "pixel_bytes": torch.zeros_like(batch.media["pixel_bytes"])}
    return {
        "samples leak": replace(batch, segments=Segments.from_lengths([total])),
        "pictures blanked": replace(batch, media=blank),
        "not causal": replace(batch, segments=replace(batch.segments, causal=False)),
        "positions zero": replace(batch, position_ids=torch.zeros_like(batch.position_ids)),
    }


def reference(
    job: Job, state: dict[str, Tensor], batch: PackedBatch, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights in float32 on a device, padded rows through the library's own attention."""
    changes = {"use_rmpad": False, "use_liger_kernel": False, "bf16": False}
    plain = job.model_copy(update={"trainer": job.trainer.model_copy(update=changes)})
    config = hf.read_config(plain.model)
    spec = for_type(config.model_type)
    model = hf.build_meta(spec, config)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, strict=False, assign=True)
    for name, buffer in hf.buffers(spec, config).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    model.tie_weights()
    model.requires_grad_(True).to(device)
    apply_kernels(model, spec, plain, device)
    return token_losses(build_objective(spec, model, config, plain), batch.to(device), spec.layout)


# A memorised pack has no loss left that a relative bound could be about: the first rate is taken whose loss
# after 50 steps is still LEARNT or more of the first step's.
LEARNING_RATES = (1e-6, 5e-7)
LEARNT = 0.1


def overfit(job: Job, batch: PackedBatch, mesh: Mesh) -> tuple[Objective, Any, list[float]]:
    """The model after 50 steps on one pack, its spec, and the loss of each step."""
    objective, spec, _ = build_model(job, mesh)
    backend = FSDP2Backend(objective, job, mesh)
    losses = []
    for step in range(1, 51):
        backend.set_progress(step / 1000, step)
        stats = train_step(objective, backend, [batch], mesh, generator(0, step))
        losses.append(stats.sums["ce"] / stats.totals["ce"])
    return objective, spec, [loss.item() for loss in losses]


def numerics(size: str, folder: Path, mesh: Mesh) -> list[dict[str, Any]]:
    """A 4-layer cut, 50 steps on one pack of at most 2,048 tokens, then against float32 with its weights."""
    data = write_chats(folder / "small", rows=24, pixels=(160, 160), words_per_answer=(8, 16))
    for rate in LEARNING_RATES:
        job = make_job(
            size, data, folder / "processor", cut=4, packing_length=2048, num_logical_shards=1,
            learning_rate=rate, dataloader_num_workers=0, fsdp_config={"activation_checkpointing": False},
        )  # fmt: skip
        (batch,) = build_loader(job, 0, 1).next_step()
        objective, spec, trained = overfit(job, batch, mesh)
        print(f"{size}: rate {rate:g}: loss {trained[0]:.3f} -> {trained[-1]:.3f}", flush=True)
        if trained[-1] >= LEARNT * trained[0]:
            break
    masters = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu()
        for name, t in objective.model.state_dict().items()
    }
    rounded = {name: t.bfloat16().float() for name, t in masters.items()}   # what bf16 computes with
    losses, gradients = reference(job, rounded, batch, torch.device("cpu"))
    expected = losses.to(mesh.device), {name: grad.to(mesh.device) for name, grad in gradients.items()}
    note = f"{batch.num_tokens} tokens, {len(batch.rows)} rows, loss {trained[-1]:.3f} at rate {rate:g}"
    rows = []

    def record(case: str, outcome: Outcome, *, holds: bool | None) -> None:
        ok = "-" if holds is None else outcome.within == holds
        rows.append({"model": size, "case": case, **outcome.__dict__, "ok": ok})

    for backend_name in ("varlen", "flex", "sdpa"):
        attention.use(objective.model, spec.layout.attention, attention.install(backend_name))
        ours = token_losses(objective, batch.to(mesh.device), spec.layout)
        record(f"bf16 GPU, {backend_name}", compare(ours, expected), holds=True)
    attention.use(objective.model, spec.layout.attention, attention.install("varlen"))
    for fault, broken in faults(batch).items():
        ours = token_losses(objective, broken.to(mesh.device), spec.layout)
        record(f"planted: {fault}", compare(ours, expected), holds=False)
    # what rounding the float32 masters does by itself, at full precision: no bound holds for it
    exact = [reference(job, state, batch, mesh.device) for state in (rounded, masters)]
    record("weights rounded, float32", compare(*exact), holds=None)
    print(f"{size}: {note}", flush=True)
    return rows


# ---- speed -------------------------------------------------------------------------------------------


MODELS = ("qwen3_vl_4b", "qwen2_5_vl_3b")
SETTINGS = {"16k x 4": (16384, 4), "32k x 1": (32768, 1)}   # tokens of a pack, packs accumulated


# As little as memory allows: about 130 GB are in use.
RECOMPUTED = {
    ("qwen3_vl_4b", "16k x 4"): {"full": 0, "others": "selective"},
    ("qwen3_vl_4b", "32k x 1"): {"full": 20, "others": "selective"},
    ("qwen2_5_vl_3b", "16k x 4"): {"full": 0, "others": None},
    ("qwen2_5_vl_3b", "32k x 1"): {"full": 10, "others": "selective"},
}


def real_job(size: str, folder: Path, recomputed: dict[str, Any], pack: int, accumulation: int) -> Job:
    """The job: the real loader over JPEG files, eight worker processes."""
    return make_job(
        size, folder / "large" / "train.jsonl", folder / "processor",
        packing_length=pack, gradient_accumulation_steps=accumulation, learning_rate=1e-5,
        dataloader_num_workers=8, repeats=6,
        fsdp_config={
            "activation_checkpointing": recompute(**recomputed),
            "reshard_after_forward": False,   # one GPU holds every weight anyway
        },
    )  # fmt: skip


def build(size: str, setting: str, folder: Path, mesh: Mesh) -> tuple[RealSize, Job]:
    """A real-size model with its optimiser for one setting, and the setting's job."""
    began = time.perf_counter()
    job = real_job(size, folder, RECOMPUTED[size, setting], *SETTINGS[setting])
    run = RealSize(job, mesh)
    print(f"{size}, {setting}: built in {time.perf_counter() - began:.0f} s", flush=True)
    return run, job


def overfit_packs(run: RealSize, job: Job) -> list[float]:
    """Mean loss of each of three passes over 8 packs of 16k."""
    loader = build_loader(job, 0, 1, pin_memory=True)
    packs = [loader.next_step()[0] for _ in range(8)]
    loader.close()
    return [statistics.mean(run.step([pack]) for pack in packs) for _ in range(3)]


def speed(size: str, folder: Path, mesh: Mesh, *, steps: int, warmup: int) -> list[dict[str, Any]]:
    """Every setting of one real-size model, then whether its loss falls on repeated packs."""
    rows = []
    for setting in SETTINGS:
        run = None    # the one before goes first: two do not fit
        release()
        run, job = build(size, setting, folder, mesh)
        measured = asdict(run.measure(job, steps=steps, warmup=warmup))
        recomputed = "{full} full, others {others}".format(**RECOMPUTED[size, setting])
        rows.append({"model": size, "setting": setting, "recomputed": recomputed, **measured})
        print(table(rows), flush=True)
    passes = overfit_packs(run, real_job(size, folder, RECOMPUTED[size, setting], 16384, 1))
    print(f"{size}: 8 packs of 16k, mean loss of three passes: {[round(x, 4) for x in passes]}", flush=True)
    return [*rows, {"model": size, "setting": "8 packs repeated", "loss_per_pass": passes}]


def profile(size: str, folder: Path, mesh: Mesh, *, setting: str = "16k x 4") -> list[dict[str, Any]]:
    """Where the device's time goes in one step, kernel by kernel: share of the step, calls, milliseconds."""
    run, job = build(size, setting, folder, mesh)
    loader = build_loader(job, 0, 1, pin_memory=True)
    windows = [loader.next_step() for _ in range(3)]
    loader.close()
    for micros in windows[:2]:
        run.step(micros)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize(mesh.device)
    begin = time.perf_counter()
    with torch.profiler.profile(activities=activities) as trace:
        run.step(windows[2])
        synchronize(mesh.device)
    step_s = time.perf_counter() - begin
    kernels = [event for event in trace.key_averages() if event.self_device_time_total > 0]
    kernels = [event for event in kernels if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    print(f"{size}: step {step_s:.3f} s, device busy {busy:.3f} s", flush=True)
    return [
        {
            "model": size,
            "share": event.self_device_time_total / 1e6 / busy,
            "calls": event.count,
            "ms": event.self_device_time_total / 1e3,
            "kernel": event.key.replace("at::native::", "")[:200],
        }
        for event in kernels[:40]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("numerics", "speed", "profile"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this (default: both)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.backends.cudnn.allow_tf32 = False   # of references in float32
    mesh = build_mesh()
    gpu = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "none"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_processors(folder / "processor")
        if options.what != "numerics":
            write_chats(folder / "large", rows=400)
        for size in options.model or MODELS:
            if options.what == "numerics":
                rows += numerics(size, folder, mesh)
            elif options.what == "profile":
                rows += profile(size, folder, mesh)
            else:
                rows += speed(size, folder, mesh, steps=options.steps, warmup=options.warmup)
            report = {"gpu": gpu, "torch": torch.__version__, "rows": rows}
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            release()
    print(table([row for row in rows if "loss_per_pass" not in row]))
    leave_mesh()


if __name__ == "__main__":
    main()
