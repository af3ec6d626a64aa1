"""FLOPs of SiT against torch's own counter, matrix product for matrix product."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lmms_engine.models.flops import Flops
from tests.flow import batch_of, build


@pytest.mark.parametrize(
    "frozen", [(), ("x_embedder",), ("t_embedder", "y_embedder"), ("x_embedder", "blocks.0."), ("blocks.",)]
)
def test_equals_torchs_counter(frozen: tuple[str, ...]) -> None:
    objective, spec, samples = build()
    for name, parameter in objective.model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("-",)))
    batch = objective.draw(batch_of(samples), torch.Generator().manual_seed(0))
    names = frozenset(n for n, p in objective.model.named_parameters() if not p.requires_grad)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(batch)["flow"].backward()
    assert spec.flops(objective.model.config, batch, names).strict == counter.get_total_flops()


def test_stand_ins_count_nothing() -> None:
    objective, spec, samples = build()
    config = objective.model.config
    alone = spec.flops(config, batch_of(samples[:2]), frozenset())
    assert spec.flops(config, batch_of(samples[:3], stand_ins=1), frozenset()) == alone
    assert spec.flops(config, batch_of(samples[:1], stand_ins=1), frozenset()) == Flops()
    assert alone.conventional >= alone.strict > 0
