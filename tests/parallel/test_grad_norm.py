import torch
from torch import nn

from lmms_engine.parallel.grad_norm import clip_divisor, global_norm
from tests import toy
from tests.distributed import run_ranks


def norms(mesh):
    objective = toy.build(mesh, toy.job())
    objective(toy.batch([5, 4], pictures=3, seed=mesh.rank))["ce"].backward()
    ours = global_norm(objective.model.parameters(), mesh.device)
    whole = toy.gradients(objective.model)
    return float(ours), float(sum(g.double().square().sum() for g in whole.values()) ** 0.5)


def test_the_norm_of_shards_is_the_norm_of_the_whole_on_every_rank():
    first, second = run_ranks(norms, 2)
    assert first == second
    torch.testing.assert_close(first[0], first[1], rtol=1e-6, atol=0)


def test_plain_parameters_and_missing_gradients():
    with_grad, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with_grad.grad = torch.tensor([3.0, 4.0])
    assert global_norm([with_grad, without], torch.device("cpu")) == 5.0


def test_clipping_never_enlarges():
    assert clip_divisor(torch.tensor(4.0), 2.0) == 2.0
    assert clip_divisor(torch.tensor(1.0), 2.0) == 1.0
    assert clip_divisor(torch.tensor(4.0), None) == 1.0
