"""Our experts against the library's own loop: numbers, gradients, empty experts, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmms_engine.errors import UserError
from lmms_engine.kernels import experts
from lmms_engine.models.spec import MODELS
from lmms_engine.parallel.paths import resolve

SPEC = MODELS.get("qwen3_moe")


def block(name: str) -> nn.Module:
    """The first layer's experts of the tiny model, computed as `name` says."""
    model, _ = SPEC.tiny()
    modules = resolve(model, SPEC.layout.experts)
    experts.use(model, modules, name if name == experts.LIBRARY else experts.install(name))
    return next(iter(modules.values()))


def routing(tokens: int, top_k: int, allowed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts among the first `allowed`, weights."""
    rng = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 32, generator=rng, requires_grad=True)
    chosen = torch.rand(tokens, allowed, generator=rng).topk(top_k).indices
    return hidden, chosen, torch.rand(tokens, top_k, generator=rng, requires_grad=True)


def result(name: str, tokens: int, allowed: int) -> tuple[Tensor, dict[str, Tensor]]:
    module = block(name)
    hidden, chosen, weights = routing(tokens, 3, allowed)
    out = module(hidden, chosen, weights)
    (out * torch.linspace(-1, 1, out.shape[1])).sum().backward()
    gradients = {key: p.grad for key, p in module.named_parameters()}
    return out.detach(), gradients | {"hidden": hidden.grad, "weights": weights.grad}


@pytest.mark.parametrize("name", ["loop", "grouped"])
@pytest.mark.parametrize(("tokens", "allowed"), [(40, 8), (40, 4), (1, 3)], ids=["all", "half", "one token"])
def test_equals_the_librarys_own(name: str, tokens: int, allowed: int) -> None:
    """Also where experts get no token, whose gradient is then zero."""
    ours, theirs = result(name, tokens, allowed), result(experts.LIBRARY, tokens, allowed)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    for key, want in theirs[1].items():
        torch.testing.assert_close(ours[1][key], want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    assert all((ours[1][key][allowed:] == 0).all() for key in ("gate_up_proj", "down_proj"))


@pytest.mark.parametrize("name", ["loop", "grouped"])
def test_no_token_at_all_still_gives_gradients(name: str) -> None:
    module = block(name)
    module(torch.zeros(0, 32), torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("device", "dtype", "odd", "want"),
    [
        ("cpu", torch.bfloat16, False, "loop"),
        ("cuda", torch.bfloat16, False, "grouped"),
        ("cuda", torch.float32, False, "loop"),
        ("cuda", torch.bfloat16, True, "loop"),
    ],
)
def test_the_product_is_chosen_once(device: str, dtype: torch.dtype, odd: bool, want: str) -> None:
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.zeros(2, 20 if odd else 16, 8))
    assert experts.resolve([module], torch.device(device), dtype) == want


def test_experts_of_another_build_are_refused() -> None:
    model, _ = SPEC.tiny()
    modules = resolve(model, SPEC.layout.experts)
    next(iter(modules.values())).has_bias = True
    with pytest.raises(UserError, match=r"model.layers.0.mlp.experts: Qwen3MoeExperts has a bias"):
        experts.use(model, modules, experts.install("loop"))
