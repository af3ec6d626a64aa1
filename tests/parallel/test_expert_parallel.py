"""The token exchange by itself, and the splits that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from lmms_engine.errors import UserError
from lmms_engine.parallel.expert_parallel import TokenExchange, check_experts, check_shards, shard_experts
from lmms_engine.parallel.mesh import Mesh, build_mesh
from tests import toy
from tests.distributed import run_ranks

EXPERTS, WIDTH = 6, 3
COUNTS = ([4, 0, 1, 0, 0, 7], [0, 0, 0, 2, 0, 0])   # of rank 0 and 1: uneven, some experts without any row


def factor(expert: int) -> float:
    return float(expert + 1)


def rows_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(COUNTS[rank]), WIDTH, generator=generator)


def exchanged(mesh: Mesh) -> dict[str, Any]:
    """Each expert multiplies by its factor; 3 experts a rank."""
    mesh = build_mesh(toy.job(ep_degree=2).trainer)
    seen: list[list[int]] = []

    def compute(x: Tensor, counts: Tensor) -> Tensor:
        seen.append(counts.tolist())
        mine = torch.tensor([factor(mesh.rank * 3 + e) for e in range(3)])
        return x * mine.repeat_interleave(counts)[:, None]

    rows = rows_of(mesh.rank).requires_grad_()
    out = TokenExchange(mesh.ep.get_group())(rows, torch.tensor(COUNTS[mesh.rank]), compute)
    (out * (mesh.rank + 2)).sum().backward()
    layer = nn.Module()
    layer.up = nn.Parameter(torch.arange(24.0).view(6, 2, 2), requires_grad=mesh.rank >= 0)
    layer.down = nn.Parameter(torch.arange(24.0).view(6, 2, 2), requires_grad=False)
    shard_experts({"layer": layer}, mesh.ep)
    refusal = ""
    try:
        check_shards({"a.b": layer}, mesh.fsdp)
        layer.up = nn.Parameter(torch.zeros(6, 5, 2))
        check_shards({"a.b": layer}, mesh.fsdp)
    except UserError as error:
        refusal = str(error)
    return {
        "out": out.detach(),
        "grad": rows.grad,
        "seen": seen,
        "local": layer.down.to_local(),
        "placements": layer.down.placements == (Shard(0),),
        "trains": layer.down.requires_grad,
        "refusal": refusal,
    }


def test_rows_meet_their_experts_and_come_back() -> None:
    results = run_ranks(exchanged, 2)
    for rank, result in enumerate(results):
        factors = torch.tensor([factor(e) for e in range(EXPERTS)])
        scale = factors.repeat_interleave(torch.tensor(COUNTS[rank]))[:, None]
        torch.testing.assert_close(result["out"], rows_of(rank) * scale)
        torch.testing.assert_close(result["grad"], (scale * (rank + 2)).expand_as(result["grad"]))
        assert result["seen"] == [[sum(c[rank * 3 + e] for c in COUNTS) for e in range(3)]]
        assert torch.equal(result["local"], torch.arange(24.0).view(6, 2, 2)[rank * 3 : rank * 3 + 3])
        assert result["placements"]
        assert not result["trains"]
        assert "leaves 2 ranks to share each expert, which does not divide the 5 rows of a.b.up" in (
            result["refusal"]
        )


@pytest.mark.parametrize(
    ("degree", "experts", "message"),
    [
        (3, 8, r"ep_degree=3: does not divide the 8 experts of this model \(legal: 1, 2, 4, 8\)"),
        (2, None, r"trainer_args.ep_degree=2: qwen3_vl has no experts \(legal: 1\)"),
    ],
)
def test_degrees_that_cannot_be(degree: int, experts: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_experts(degree, experts, "qwen3_vl")


def test_degrees_that_can() -> None:
    check_experts(1, None, "qwen3_vl")
    check_experts(4, 8, "qwen3_moe")
