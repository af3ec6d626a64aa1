"""Which rank is what, over every split of two, four and eight ranks; impossible splits are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Degrees, build_mesh
from tests import toy
from tests.distributed import run_ranks


def trainer(sp=1, ep=1, shard=0):
    return SimpleNamespace(
        sp_ulysses_degree=sp, ep_degree=ep, fsdp_config=SimpleNamespace(hsdp_shard_size=shard),
        ddp_timeout=77,
    )


def describe(_, splits):
    """Per split: this rank's place on every axis, as the groups themselves have it."""
    found = []
    for split in splits:
        mesh = build_mesh(trainer(**split))
        one = {"dp": (mesh.dp_rank, mesh.dp_size), "sp": (mesh.sp_rank, mesh.sp_size)}
        one["fsdp"] = (mesh.fsdp.mesh_dim_names, mesh.fsdp.mesh.tolist())
        one["shard"], one["ep size"] = mesh.shard_size, mesh.ep_size
        one["sp group"] = None if mesh.sp is None else dist.get_process_group_ranks(mesh.sp)
        one["ep"] = None if mesh.ep is None else mesh.ep.mesh.tolist()
        one["efsdp"] = None if mesh.efsdp is None else (mesh.efsdp.mesh_dim_names, mesh.efsdp.mesh.tolist())
        groups = [mesh.host, mesh.fsdp.get_group(-1), mesh.sp, mesh.ep and mesh.ep.get_group()]
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
        one["timeouts"] = {backend.options._timeout.total_seconds() for backend in backends}
        one["sum"] = mesh.sum_over_data({"rows": float(10 ** mesh.dp_rank)})["rows"]
        found.append(one)
    return found


def test_the_axes_of_four_ranks():
    splits = [{}, {"sp": 2}, {"sp": 4, "shard": 2}, {"ep": 2}, {"ep": 2, "shard": 2}, {"ep": 4, "sp": 2}]
    ranks = run_ranks(describe, 4, splits)
    for rank, (plain, sp, wide, ep, both, across) in enumerate(ranks):
        half = 2 * (rank // 2)
        assert all(split["timeouts"] == {77} for split in ranks[rank])
        assert plain["dp"] == (rank, 4)
        assert plain["sp"] == (0, 1)
        assert plain["fsdp"] == (("fsdp",), [0, 1, 2, 3])
        assert (plain["shard"], plain["sp group"], plain["ep"], plain["efsdp"]) == (4, None, None, None)
        assert plain["sum"] == 1111
        assert (sp["dp"], sp["sp"]) == ((rank // 2, 2), (rank % 2, 2))
        assert sp["sp group"] == [half, half + 1]
        assert sp["sum"] == 11   # ranks of one sequence count once
        assert sp["fsdp"] == plain["fsdp"]
        assert (wide["dp"], wide["sp"], wide["sp group"]) == ((0, 1), (rank, 4), [0, 1, 2, 3])
        assert wide["fsdp"] == (("replicate", "fsdp"), [[0, 1], [2, 3]])
        assert wide["shard"] == 2
        assert (ep["ep"], ep["ep size"]) == ([half, half + 1], 2)
        assert ep["efsdp"] == (("efsdp",), [rank % 2, rank % 2 + 2])
        assert both["ep"] == [half, half + 1]
        assert both["efsdp"] == (("replicate", "efsdp"), [[rank % 2], [rank % 2 + 2]])
        assert across["ep"] == [0, 1, 2, 3]   # an expert group may span sequence ranks
        assert across["efsdp"] == (("efsdp",), [rank])


@pytest.mark.parametrize(
    ("split", "world", "message"),
    [
        ({"sp": 4}, 2, r"sp_ulysses_degree=4: does not divide the 2 ranks .*legal: 1, 2\)"),
        ({"sp": 3}, 8, r"sp_ulysses_degree=3: does not divide the 8 ranks"),
        ({"shard": 3}, 4, r"hsdp_shard_size=3: does not divide the 4 ranks .*legal: 1, 2, 4\)"),
        ({"shard": 8}, 4, r"hsdp_shard_size=8: does not divide the 4 ranks"),
        ({"ep": 4, "shard": 2}, 4, r"ep_degree=4: does not divide the 2 ranks that hold one copy"),
        ({"ep": 3}, 4, r"ep_degree=3: does not divide the 4 ranks that hold"),
    ],
)
def test_impossible_splits_name_both_numbers(split, world, message):
    with pytest.raises(UserError, match=message):
        Degrees.of(trainer(**split), world)


def test_a_mesh_is_refused_before_the_group_is_made(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="sp_ulysses_degree=4"):
        build_mesh(trainer(sp=4))
    assert not dist.is_initialized()


def test_one_process_is_a_mesh_too():
    with toy.single_mesh() as mesh:
        assert (mesh.dp_size, mesh.sp_size, mesh.ep_size, mesh.shard_size) == (1, 1, 1, 1)
        assert mesh.device == torch.device("cpu")
        assert dataclasses.replace(mesh, sp_size=2).sum_over_data({"rows": 3.0}) == {"rows": 1.5}


def test_ranks_without_an_address_are_told_how_to_start(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2, but MASTER_PORT not set .*torchrun"):
        build_mesh()
    monkeypatch.delenv("WORLD_SIZE")
    try:
        assert build_mesh().world_size == 1   # an address alone, left by something else, asks for nothing
    finally:
        dist.destroy_process_group()
