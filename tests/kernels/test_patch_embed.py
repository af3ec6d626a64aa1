"""The patch product equals the convolution, shares its parameters and refuses what is no single patch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmms_engine.kernels.patch_embed import PatchProjection, apply_patch_projection


@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    tower = nn.ModuleDict({"proj": nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=bias)})
    conv, names = tower["proj"], set(tower.state_dict())
    assert apply_patch_projection(tower) == 1
    assert set(tower.state_dict()) == names
    assert tower["proj"].weight is conv.weight
    patches = torch.randn(5, 3, 2, 4, 4, dtype=torch.float32)
    outs, grads = [], []
    for module in (conv, tower["proj"]):
        inputs = patches.clone().requires_grad_()
        conv.weight.grad = None
        out = module(inputs)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append((inputs.grad, conv.weight.grad.clone()))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def test_a_whole_picture_is_refused() -> None:
    projection = PatchProjection(nn.Conv3d(3, 8, (1, 4, 4), stride=(1, 4, 4)))
    with pytest.raises(ValueError, match="kernel is"):
        projection(torch.zeros(1, 3, 1, 8, 8))


@pytest.mark.parametrize("change", [{"stride": 2}, {"padding": 1}, {"groups": 3}])
def test_other_convolutions_stay(change: dict) -> None:
    settings = {"stride": (1, 3, 3), "padding": 0, "groups": 1, **change}
    model = nn.Sequential(nn.Conv3d(3, 6, (1, 3, 3), **settings))
    assert apply_patch_projection(model) == 0
