"""LossHead against plain cross-entropy, in values, gradients, memory and names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lmms_engine.errors import UserError
from lmms_engine.kernels import loss_head
from lmms_engine.kernels.loss_head import LossHead, replace_head

T, DIM, V = 23, 8, 31


def inputs(*, varied: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weights = (torch.rand(T, generator=rng) > 0.4).float()
    if varied:
        weights = weights * (torch.rand(T, generator=rng) * 3)
    labels = torch.randint(V, (T,), generator=rng)
    return torch.randn(T, DIM, generator=rng), torch.where(weights > 0, labels, -100), weights


def linear(*, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(DIM, V, bias=bias)


def plain(head: nn.Linear, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(head(hidden), labels, reduction="none", ignore_index=-100) * weights).sum()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_LOGITS", 4 * V)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("varied", [False, True])
def test_chunked_equals_plain(varied: bool, bias: bool) -> None:
    hidden, labels, weights = inputs(varied=varied)
    reference, ours = linear(bias=bias), linear(bias=bias)
    h1, h2 = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (plain(reference, h1, labels, weights) / 7).backward()
    loss = LossHead(ours, fused=False)(h2, labels, weights)
    (loss / 7).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain(reference, hidden, labels, weights), rtol=1e-6, atol=0)
    torch.testing.assert_close(h2.grad, h1.grad, atol=1e-7, rtol=1e-5)
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_positions_from_the_host_give_the_same() -> None:
    hidden, labels, weights = inputs(varied=False)
    head = LossHead(linear(), fused=False)
    told = head(hidden, labels, weights, supervised=(weights > 0).nonzero().flatten(), uniform=True)
    assert told == head(hidden, labels, weights)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("varied", [False, True])
def test_groups_get_their_own_sums_and_change_nothing_else(varied: bool) -> None:
    hidden, labels, weights = inputs(varied=varied)
    groups = torch.arange(T) % 4 - 1   # -1: in no group
    reference, head = LossHead(linear(), fused=False), LossHead(linear(), fused=False)
    h1, h2 = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected = reference(h1, labels, weights)
    loss, sums = head(h2, labels, weights, groups=groups, num_groups=4)
    assert loss == expected
    assert not sums.requires_grad
    for group in range(3):
        own = plain(linear(), hidden, labels, weights * (groups == group))
        assert sums[group].item() == pytest.approx(own.item(), rel=1e-6)
    assert sums[3] == 0   # nobody is in it
    expected.backward()
    loss.backward()
    assert torch.equal(h1.grad, h2.grad)
    assert torch.equal(head.weight.grad, reference.weight.grad)


def test_groups_of_nothing_supervised() -> None:
    hidden, _, weights = inputs(varied=False)
    groups = torch.zeros(T, dtype=torch.int64)
    head = LossHead(linear(), fused=False)
    loss, sums = head(hidden, torch.full((T,), -100), weights * 0, groups=groups, num_groups=2)
    assert loss == 0
    assert sums.tolist() == [0, 0]


@pytest.mark.usefixtures("small_chunks")
def test_only_supervised_positions_are_computed() -> None:
    hidden, labels, weights = inputs(varied=False)
    hidden[weights == 0] = float("nan")
    assert LossHead(linear(), fused=False)(hidden, labels, weights).isfinite()


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_supervised_is_exactly_zero(fused: bool) -> None:
    hidden, _, weights = inputs(varied=False)
    hidden.requires_grad_()
    head = LossHead(linear(), fused=fused)
    loss = head(hidden, torch.full((T,), -100), weights * 0)
    loss.backward()
    assert loss == 0
    assert hidden.grad.abs().max() == 0
    assert head.weight.grad.abs().max() == 0


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("first", [True, False])
def test_a_masked_micro_batch_beside_one_with_targets(first: bool) -> None:
    """The plain and the chunked loss agree that it adds 0 to the sum and to every gradient."""
    hidden, labels, weights = inputs(varied=False)
    reference, head = linear(), LossHead(linear(), fused=False)
    h = hidden.clone().requires_grad_()
    parts = [(h, labels, weights), (hidden.clone().requires_grad_(), labels * 0 - 100, weights * 0)]
    losses = [head(*part) for part in (parts if first else parts[::-1])]
    (sum(losses) / 7).backward()
    expected = plain(reference, hidden, labels, weights)
    (expected / 7).backward()
    torch.testing.assert_close(sum(losses), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(head.weight.grad, reference.weight.grad, atol=1e-7, rtol=1e-5)
    assert parts[1][0].grad.abs().max() == 0
    assert h.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.usefixtures("small_chunks")
def test_logits_are_never_whole() -> None:
    hidden, labels, weights = inputs(varied=False)
    head = LossHead(linear(), fused=False)
    with Largest() as largest:
        head(hidden.requires_grad_(), labels, weights).backward()
    assert largest.numel <= V * DIM   # the weight's gradient; four rows of logits are half of that
    with Largest() as largest:
        plain(linear(), hidden, labels, weights)
    assert largest.numel == T * V


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    hidden, labels, weights = inputs(varied=True)
    head = LossHead(linear(), fused=False)
    head.weight.requires_grad_(frozen == "hidden")
    hidden.requires_grad_(frozen == "head")
    loss = head(hidden, labels, weights)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    assert (head.weight.grad is None) == (frozen != "hidden")
    assert (hidden.grad is None) == (frozen != "head")


@pytest.mark.usefixtures("small_chunks")
def test_evaluation_makes_no_gradient() -> None:
    hidden, labels, weights = inputs(varied=False)
    head = LossHead(linear(), fused=False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        head(hidden, labels, weights)
    assert counter.get_total_flops() == 2 * int((weights > 0).sum()) * DIM * V
    with FlopCounterMode(display=False) as counter:
        head(hidden.requires_grad_(), labels, weights).backward()
    assert counter.get_total_flops() == 6 * int((weights > 0).sum()) * DIM * V


def test_bf16_sums_in_float32() -> None:
    hidden, labels, weights = inputs(varied=False)
    head = LossHead(linear().to(torch.bfloat16), fused=False)
    h = hidden.bfloat16().requires_grad_()
    loss = head(h, labels, weights)
    loss.backward()
    assert loss.dtype == torch.float32
    assert h.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(plain(linear(), hidden, labels, weights).item(), rel=0.02)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, DIM)
        self.lm_head = nn.Linear(DIM, V, bias=False)
        self.lm_head.weight = self.embed.weight


def test_replacing_keeps_names_and_ties() -> None:
    model = Tied()
    before = list(model.state_dict())
    head = replace_head(model, "lm_head", fused=False)
    assert model.lm_head is head
    assert head.weight is model.embed.weight
    assert list(model.state_dict()) == before


def test_only_linears_are_replaced() -> None:
    with pytest.raises(UserError, match="head 'embed' is a Embedding"):
        replace_head(Tied(), "embed", fused=False)
