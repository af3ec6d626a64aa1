"""A widened MLP is the same function with the same checkpoint."""

from __future__ import annotations

import pytest
import torch

from lmms_engine.kernels.widen import GatedMLP, apply_widening, missing_columns, silu_times
from tests.tiny import assert_same_gradients, build, loss_and_gradients, pack


@pytest.mark.parametrize(("width", "extra"), [(3420, 36), (36, 28), (4304, 0), (3456, 0), (1, 63)])
def test_missing_columns(width: int, extra: int) -> None:
    class Mlp:
        gate_proj = torch.nn.Linear(1, width, device="meta")

    assert missing_columns(Mlp) == extra


def test_tower_is_widened_and_computes_the_same() -> None:
    objective, samples = build("qwen2_5_vl")
    loss, gradients = loss_and_gradients(objective, [pack(samples)])
    state = {name: tensor.clone() for name, tensor in objective.model.state_dict().items()}
    assert apply_widening(objective.model) == 3
    assert sum(isinstance(m, GatedMLP) and m.extra == 28 for m in objective.model.modules()) == 3
    wide, same = loss_and_gradients(objective, [pack(samples)])
    assert wide == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(same, gradients)
    after = objective.model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


def test_inner_width_is_the_wide_one() -> None:
    """The point of it: the products run on a multiple of 64."""
    objective, samples = build("qwen2_5_vl")
    apply_widening(objective.model)
    widths = []
    for module in objective.model.modules():
        if isinstance(module, GatedMLP):
            module.product = lambda gate, up: widths.append(gate.shape[-1]) or silu_times(gate, up)
    loss_and_gradients(objective, [pack(samples[:1])])
    assert widths == [64] * 3


def test_good_widths_are_left_alone() -> None:
    assert apply_widening(build("qwen3_vl")[0].model) == 0
