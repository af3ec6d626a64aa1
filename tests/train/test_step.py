"""The step gives one number in every layout: windows, ranks, unlike modalities, unequal targets."""

import pytest
import torch

from lmms_engine.train.step import combine, train_step
from tests import toy
from tests.distributed import run_ranks

# 9, 1, 4 and 2 targets; the second and third have no picture
TARGETS = (9, 1, 4, 2)
PICTURES = (3, 0, 0, 5)


# Rows of which nothing is learnt, with a picture and without: micro-batches 4 and 5
MASKED = (4, 0)


def micros():
    batches = []
    for i, (targets, pictures) in enumerate(zip(TARGETS, PICTURES, strict=True)):
        batch = toy.batch([pictures + 10], pictures=pictures, seed=i, supervised=0.0)
        batch.loss_weights[pictures : pictures + targets] = 1.0
        batch.labels[pictures : pictures + targets] = torch.arange(targets) + i
        batches.append(batch)
    masked = [toy.batch([p + 7], pictures=p, seed=9 + p, supervised=0.0) for p in MASKED]
    return [*batches, *masked]


class Recorder:
    """A backend that keeps the gradients instead of stepping."""

    def __init__(self, objective, mesh):
        from lmms_engine.train.backend.fsdp2 import FSDP2Backend

        self.real = FSDP2Backend(objective, toy.job(), mesh)
        self.objective = objective
        self.gradients = {}

    def micro(self, *, last):
        return self.real.micro(last=last)

    def backward(self, loss):
        self.real.backward(loss)

    def step(self):
        self.gradients = toy.gradients(self.objective.model)
        return self.real.step()


def one_step(mesh, windows):
    """windows: per rank, the numbers of its micro-batches."""
    objective = toy.build(mesh, toy.job(fsdp_config={"activation_checkpointing": True}))
    backend = Recorder(objective, mesh)
    mine = [micros()[i] for i in windows[mesh.rank]]
    stats = train_step(objective, backend, mine, mesh, torch.Generator())
    loss = sum(mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"]
    return loss, stats.totals, backend.gradients, float(stats.grad_norm)


def plain():
    """The definition: sum over all targets / their number, unsharded, in one backward."""
    model = toy.reference()
    objective = toy.ToyObjective(model)
    loss = sum(objective(micro)["ce"] for micro in micros()[:4]) / sum(TARGETS)
    loss.backward()
    return float(loss.detach()), toy.gradients(model)


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def check(result, want):
    loss, totals, gradients, norm = result
    assert totals == {"ce": 16.0}
    assert loss == pytest.approx(want[0], rel=1e-6)
    toy.assert_same_gradients(gradients, want[1])
    assert norm == pytest.approx(float(sum(g.square().sum() for g in want[1].values()) ** 0.5), rel=1e-5)
    assert float(want[1]["model.visual.merger.weight"].abs().max()) > 0   # pictures reach the loss


def test_accumulation_over_four_micro_batches_equals_one_batch(mesh):
    check(one_step(mesh, [[0, 1, 2, 3]]), plain())


@pytest.mark.parametrize("windows", [[[0, 1], [2, 3]], [[1, 2], [3, 0]]])
def test_two_ranks_with_unlike_modalities_and_targets_equal_one_process(windows):
    # the second layout: rank 0 holds text alone, rank 1 pictures alone
    first, second = run_ranks(one_step, 2, windows)
    want = plain()
    check(first, want)
    check(second, want)


def test_a_masked_micro_batch_among_others_adds_nothing(mesh):
    """The gradients of the same step without it, also where its picture went through the tower."""
    check(one_step(mesh, [[0, 4, 1, 2, 5, 3]]), plain())


def test_a_rank_with_nothing_to_learn_adds_nothing():
    """All that one rank has is masked."""
    for result in run_ranks(one_step, 2, [[0, 1, 2, 3], [4, 5, 4, 5]]):
        check(result, plain())


def test_weights_of_nothing_divide_by_one():
    parts = {"ce": torch.tensor(0.0), "aux": torch.tensor(6.0)}
    assert combine(parts, {"ce": 0.0, "aux": 3.0}, {"ce": 1.0, "aux": 2.0}) == 4.0


def test_metrics_take_no_part_in_the_loss():
    parts = {"ce": torch.tensor(6.0), "seen": torch.tensor(float("nan"))}
    assert combine(parts, {"ce": 3.0, "seen": 3.0}, {"ce": 1.0, "seen": 0.0}) == 2.0


def test_a_step_without_targets_moves_nothing(mesh):
    """Nobody has a target."""
    objective = toy.build(mesh, toy.job())
    before = toy.weights(objective.model)
    backend = Recorder(objective, mesh)
    blank = toy.batch([4], pictures=0, seed=0, supervised=0.0)
    stats = train_step(objective, backend, [blank, *micros()[4:]], mesh, torch.Generator())
    assert stats.totals == {"ce": 0.0}
    assert all(torch.equal(weight, before[name]) for name, weight in toy.weights(objective.model).items())
