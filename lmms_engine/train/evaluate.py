"""Validation: one number that no training setting changes.

loss = sum over the supervised tokens of all held-out rows / their number, in float64, whatever the
accumulation, batch size, packing or number of ranks. Leaves the model's mode, the random state and the place
in the training data as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.metrics import loss_terms, term_means
from lmms_engine.train.seed import generator
from lmms_engine.train.step import total_weights


@dataclass(frozen=True)
class EvalResult:
    """Means and counts over all held-out rows of all ranks. source_loss: None where there is one source."""

    loss: float
    loss_terms: dict[str, float]
    supervised_tokens: int
    tokens: int
    samples: int
    source_loss: dict[str, float] | None


@dataclass
class Totals:
    """Sums over a source, on all ranks: loss sums and weights by term; supervised tokens, tokens, samples."""

    sums: dict[str, float]
    weights: dict[str, float]
    counts: list[int]

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            {term: value + other.sums[term] for term, value in self.sums.items()},
            {term: value + other.weights[term] for term, value in self.weights.items()},
            [a + b for a, b in zip(self.counts, other.counts, strict=True)],
        )

    def terms(self) -> dict[str, float]:
        return term_means([self.sums], self.weights)


def evaluate(objective: Objective, loaders: dict[str, Loader], mesh: Mesh, seed: int) -> EvalResult:
    """One pass over the held-out rows of every source. Collective: all ranks run the same number of forwards,
    and a UserError is raised on all of them, so that they can still act together.

    Random targets (masks, noise) are drawn from `seed` alone, so that two validations draw alike.
    """
    cuda = [mesh.device] if mesh.device.type == "cuda" else []
    modes = {module: module.training for module in objective.modules()}  # frozen parts may be in eval mode
    objective.eval()
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            by_source = {name: _one_pass(objective, loader, mesh, seed) for name, loader in loaders.items()}
    finally:
        for module, mode in modes.items():
            module.training = mode
    return _result(by_source, objective.coefficients)


def _one_pass(objective: Objective, loader: Loader, mesh: Mesh, seed: int) -> Totals:
    terms = list(objective.coefficients)
    sums = torch.zeros(len(terms), dtype=torch.float64, device=mesh.device)
    weights = dict.fromkeys(terms, 0.0)
    counts = [0.0, 0.0, 0.0]
    window = 0
    while True:
        micros = _next_step(loader, mesh)
        (most,) = mesh.host_max([len(micros)])
        if not most:
            break
        rng = generator(seed, "eval", mesh.dp_rank, window)
        window += 1
        counts[0] += sum(sum(micro.row_supervised()) for micro in micros)
        counts[1] += sum(micro.num_tokens for micro in micros)
        counts[2] += sum(len(micro.rows) for micro in micros)
        micros += [loader.empty() for _ in range(int(most) - len(micros))]
        micros = [objective.draw(micro, rng) for micro in micros]
        for term, weight in total_weights(objective, micros).items():
            weights[term] += weight
        for micro in micros:
            micro = micro.shard(mesh.sp_rank, mesh.sp_size)
            parts = objective(objective.prepare(micro.to(mesh.device), rng))
            sums += torch.stack([parts[term].double() for term in terms])
    loader.next_epoch()  # the next validation starts at the first row again
    return Totals(
        sums=dict(zip(terms, mesh.host_sum(sums.tolist()), strict=True)),
        weights=mesh.sum_over_data(weights),
        counts=[round(n / mesh.sp_size) for n in mesh.host_sum(counts)],
    )


def _next_step(loader: Loader, mesh: Mesh) -> list[PackedBatch]:
    """The loader's next micro-batches; what it refuses on one rank is raised on all. Collective."""
    problem = None
    try:
        micros = loader.next_step()
    except UserError as error:
        problem = str(error)
    (failed,) = mesh.host_max([float(problem is not None)])
    if failed:
        raise UserError(next(said for said in mesh.gather(problem) if said is not None))
    return micros


def _result(by_source: dict[str, Totals], coefficients: dict[str, float]) -> EvalResult:
    def loss(totals: Totals) -> float:
        return sum(coefficients[term] * mean for term, mean in totals.terms().items())

    for name, totals in by_source.items():
        if not totals.counts[0]:
            raise UserError(
                f"dataset_config.eval_datasets: no supervised token in the {totals.counts[2]} usable rows of "
                f"{name}; `data-prep validate --processor` says why"
            )
    first, *rest = by_source.values()
    everything = sum(rest, start=first)
    supervised, tokens, samples = everything.counts
    return EvalResult(
        loss=loss(everything),
        loss_terms=loss_terms(everything.terms()),
        supervised_tokens=supervised,
        tokens=tokens,
        samples=samples,
        source_loss={name: loss(totals) for name, totals in by_source.items()} if rest else None,
    )
