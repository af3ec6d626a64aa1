"""Pictures dealt out to ranks, and their features joined again with gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmms_engine.parallel.share_towers import deal, join, share_tower
from tests.distributed import run_ranks

SIZES = {"even": [4, 4, 4, 4], "one": [8], "uneven": [4, 40, 4], "none at the ends": [100, 4, 4]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_picture_goes_to_one_rank_in_order(sizes, ranks):
    edges = deal(sizes, ranks)
    assert edges[0] == 0
    assert edges[-1] == len(sizes)
    assert edges == sorted(edges)
    assert len(edges) == ranks + 1
    heaviest = max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))
    assert heaviest <= sum(sizes) / ranks + max(sizes)


def test_equal_pictures_are_dealt_equally():
    assert deal([4, 4, 4, 4], 2) == [0, 2, 4]
    assert deal([4, 4, 4, 4], 4) == [0, 1, 2, 3, 4]


def joined(mesh):
    rows = [3, 0]   # rank 1 has none, and goes along with one row that does not count
    part = torch.full((max(rows[mesh.rank], 1), 2), float(mesh.rank + 1), requires_grad=True)
    whole = join(part, rows, dist.group.WORLD)
    (whole * (torch.arange(3)[:, None] + 1) * (mesh.rank + 1)).sum().backward()
    return whole.detach(), part.grad


def test_features_are_joined_and_gradients_go_home_summed():
    (first, home), (second, away) = run_ranks(joined, 2)
    assert torch.equal(first, torch.ones(3, 2))
    assert torch.equal(second, first)
    assert home.tolist() == [[3.0, 3.0], [6.0, 6.0], [9.0, 9.0]]   # 1 + 2 times the row's number
    assert away.tolist() == [[0.0, 0.0]]


class Tower(nn.Module):
    """One number a patch; counts what it was given."""

    def __init__(self):
        super().__init__()
        self.patches = []

    def forward(self, pixels, *, grid_thw):
        self.patches.append((len(pixels), grid_thw.tolist()))
        return SimpleNamespace(features=pixels.unflatten(0, (-1, 4)).sum(1), levels=[pixels[::4]])


def shared(mesh, grids):
    tower = Tower()

    def cut(kwargs, start, end):
        return {"grid_thw": kwargs["grid_thw"][start:end]}

    share_tower(tower, cut, ("features", "levels"), 2, dist.group.WORLD)
    grids = torch.tensor(grids)
    pixels = torch.arange(int(grids.prod(-1).sum())).float()[:, None]
    output = tower(pixels, grid_thw=grids)
    return tower.patches, output.features, output.levels[0]


def test_each_rank_runs_the_tower_on_its_own_pictures():
    grids = [[1, 2, 4], [1, 2, 2], [2, 2, 2], [1, 2, 4]]
    pixels = torch.arange(28).float()[:, None]
    ranks = run_ranks(shared, 2, grids)
    assert [patches for patches, _, _ in ranks] == [[(12, grids[:2])], [(16, grids[2:])]]
    for _, features, level in ranks:
        assert torch.equal(features, pixels.unflatten(0, (-1, 4)).sum(1))
        assert torch.equal(level, pixels[::4])
