"""One case on one rank: the engine's own model, backend and step, and a look at every gradient."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lmms_engine.config import Job
from lmms_engine.datasets.processor import Processor
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train import checkpoint
from lmms_engine.train.backend import build_backend
from lmms_engine.train.backend.base import Backend
from lmms_engine.train.metrics import METRICS_FILE, read_lines
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.runner import TrainRunner
from lmms_engine.train.seed import generator
from lmms_engine.train.step import train_step
from lmms_engine.train.verify.cases import Case, changed
from lmms_engine.train.verify.deal import Rows, deal

# A tensor whose gradients are this small beside the norm of all is compared with that norm instead.
NEGLIGIBLE = 1e-7
NOISE = 0.02   # standard deviation of what is added to random weights


class Refused(Exception):
    """The case cannot be here: the engine, or the rows, say why."""


@dataclass(frozen=True)
class Worst:
    """The largest gradient difference of all tensors, relative to the tensor's largest entry."""

    difference: float = 0.0
    parameter: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a case gave, step by step.

    expected: losses and gradient norms to compare with, where it is not the reference's.
    """

    losses: list[float]
    norms: list[float]
    totals: list[dict[str, float]]
    worst: Worst | None = None
    expected: tuple[list[float], list[float]] | None = None


def run_case(
    case: Case, job: Job, rows: Rows, processor: Processor, folder: Path, *, is_reference: bool = False
) -> Outcome:
    """The outcome of a case, the same on every rank; collective. Raises Refused where it cannot be.

    job: the plain one. folder: where the reference leaves its gradients and a resumed run its files.
    """
    try:
        job = changed(job, case.changes)
        mesh = build_mesh(job.trainer)
        steps = [deal(case.deal, packs, processor, mesh.dp_rank, mesh.dp_size) for packs in rows.steps]
        if not case.resumes:
            objective, _, _ = build_model(job, mesh)
            if job.model.load_from_config is not None:
                stir(objective.model, job.trainer.seed)
            backend = build_backend(objective, job, mesh)
    except UserError as reason:
        raise Refused(str(reason)) from reason
    if case.resumes:
        return _resume(job, mesh, folder / case.name)
    objective.eval()   # no dropout, and what a loss draws is a function of the row alone
    for group in backend.optimizer.param_groups:
        group["lr"] = 0.0   # every step sees the same weights, so that differences cannot build up
    comparison = _Comparison(folder, write=is_reference and mesh.is_main, read=not is_reference)
    watched = _Watched(backend, comparison.look)
    losses, norms, totals = [], [], []
    for micros in steps:
        stats = train_step(objective, watched, micros, mesh, generator(job.trainer.seed, "verify"))
        sums = mesh.host_sum([float(total) for total in stats.sums.values()])
        losses.append(
            sum(
                factor * total / (stats.totals[term] or 1.0)
                for (term, factor), total in zip(objective.coefficients.items(), sums, strict=True)
                if factor
            )
        )
        norms.append(float(stats.grad_norm))
        totals.append(stats.totals)
    worst = max(mesh.gather(comparison.worst), key=lambda each: each.difference)
    return Outcome(losses, norms, totals, None if is_reference else worst)


@torch.no_grad()
def stir(model: nn.Module, seed: int) -> None:
    """Adds noise to every weight of a random model, the same in every layout.

    Parts that begin at zero would let no gradient through to the parts behind them.
    """
    for name, parameter in model.named_parameters():
        noise = NOISE * torch.randn(parameter.shape, generator=generator(seed, "verify", name))
        if isinstance(parameter, DTensor):
            place = (parameter.device_mesh, parameter.placements)
            noise = distribute_tensor(noise, *place, src_data_rank=None).to_local()
            parameter = parameter.to_local()
        parameter.add_(noise.to(parameter.device))


class _Watched:
    """A backend with a look at the whole gradients just before they are used."""

    def __init__(self, backend: Backend, look: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        self._backend = backend
        self._look = look

    def micro(self, *, last: bool) -> AbstractContextManager[None]:
        return self._backend.micro(last=last)

    def backward(self, loss: Tensor) -> None:
        self._backend.backward(loss)

    def step(self) -> Tensor:
        self._look(self._backend.gradients())
        return self._backend.step()


class _Comparison:
    """Writes the reference's gradients, or compares with them, step after step, a tensor at a time."""

    def __init__(self, folder: Path, *, write: bool, read: bool) -> None:
        self.folder = folder
        self.write = write
        self.read = read
        self.step = 0
        self.worst = Worst()

    def look(self, gradients: Iterator[tuple[str, Tensor]]) -> None:
        """Takes all of them: gathering is collective."""
        path = self.folder / f"gradients-{self.step}.safetensors"
        self.step += 1
        if self.read:
            self._compare(path, gradients)
            return
        whole = {name: gradient.float().cpu().contiguous() for name, gradient in gradients}
        if self.write:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.values()))
            save_file(whole, path, metadata={"norm": repr(norm)})

    def _compare(self, path: Path, gradients: Iterator[tuple[str, Tensor]]) -> None:
        with safe_open(path, "pt") as reference:
            missing = set(reference.keys())
            norm = float(reference.metadata()["norm"])
            for name, ours in gradients:
                if name not in missing:
                    self._add(math.inf, f"{name}: not in the reference")
                    continue
                missing.remove(name)
                self._add(relative_difference(ours.float().cpu(), reference.get_tensor(name), norm), name)
            for name in sorted(missing):
                self._add(math.inf, f"{name}: no gradient")

    def _add(self, difference: float, name: str) -> None:
        if difference > self.worst.difference:
            self.worst = Worst(difference, name)


def relative_difference(ours: Tensor, reference: Tensor, norm: float) -> float:
    """max|ours - reference| / max|reference|; of a negligible tensor, what `NEGLIGIBLE` says; nan is inf.

    norm: of the whole reference gradient. A negligible tensor may differ by NEGLIGIBLE * norm at most, which
    counts as 1e-5, the tolerance of float32.
    """
    if ours.shape != reference.shape:
        return math.inf
    if not ours.numel():
        return 0.0
    worst, largest = float((ours - reference).abs().max()), float(reference.abs().max())
    scale = largest if largest >= NEGLIGIBLE * norm else NEGLIGIBLE * norm / 1e-5
    difference = worst / scale if scale else (math.inf if worst else 0.0)
    return math.inf if math.isnan(difference) else difference


def _resume(job: Job, mesh: Mesh, folder: Path) -> Outcome:
    """A whole run; then its steps after the first once more, from the first one's checkpoint."""
    found: list[tuple[list[float], list[float]]] = []
    for _ in range(2):
        TrainRunner(job, mesh, folder).build().run()
        if mesh.is_main:
            rows = [row for row in read_lines(folder / METRICS_FILE) if row["split"] == "train"]
            rows = [row for row in rows if row["step"] > 1]
            found.append(([row["loss"] for row in rows], [row["grad_norm"] for row in rows]))
            for later in checkpoint.complete(folder)[1:]:
                shutil.rmtree(later)
            (folder / "checkpoints" / checkpoint.LATEST).unlink()
        mesh.barrier()
    whole, resumed = mesh.broadcast(found)
    return Outcome(*resumed, totals=[], expected=whole)
