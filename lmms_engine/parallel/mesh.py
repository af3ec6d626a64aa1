"""The ranks of a run and the few collectives the host side needs.

The world is data ranks x sequence ranks, the sequence axis innermost: ranks 0..sp-1 share the batches of data
rank 0. Parameters are sharded over the world, or over consecutive blocks of it (HSDP). Expert groups are
consecutive ranks inside one such block; they may span sequence ranks.

There is always a process group, also with one process, so that one code path serves every size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Its documentation calls it experimental (torch 2.11); there is no other way for a mesh's groups.
from torch.distributed.distributed_c10d import _set_pg_timeout

from lmms_engine.errors import UserError

if TYPE_CHECKING:
    from lmms_engine.config import TrainerSection


@dataclass(frozen=True)
class Mesh:
    """Who this process is. Passed explicitly; nothing reads a global parallel state.

    fsdp: over which parameters are sharded and gradients summed: data ranks x sequence ranks in one axis
        "fsdp", or two axes ("replicate", "fsdp") under HSDP.
    host: a gloo group over all ranks for small host-side collectives, which never sync the device.
    sp: the ranks that share this rank's batches, each with its part of the sequence; None for one rank.
    ep: the ranks that hold one set of experts between them; None without expert parallelism.
    efsdp: over which each rank's experts are sharded, ("efsdp",) or ("replicate", "efsdp"); None without.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_size: int
    fsdp: DeviceMesh
    host: dist.ProcessGroup
    sp: dist.ProcessGroup | None = None
    ep: DeviceMesh | None = None
    efsdp: DeviceMesh | None = None

    @property
    def ep_size(self) -> int:
        """Ranks that hold one set of experts between them."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def shard_size(self) -> int:
        """Ranks that hold one copy of the parameters between them."""
        return self.fsdp.size(-1) if self.fsdp.ndim > 1 else self.fsdp.size()

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes the run folder."""
        return self.rank == 0

    def sum_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the data ranks, float64 on the host. Sequence ranks hold equal values and count once."""
        summed = self.host_sum(list(values.values()))
        return {name: total / self.sp_size for name, total in zip(values, summed, strict=True)}

    def host_sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, float64."""
        return self._host_reduce(values, dist.ReduceOp.SUM)

    def host_max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, float64."""
        return self._host_reduce(values, dist.ReduceOp.MAX)

    def _host_reduce(self, values: list[float], op: dist.ReduceOp) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.host)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable `value` on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def barrier(self) -> None:
        """Waits for all ranks, on the host."""
        dist.barrier(group=self.host)


@dataclass(frozen=True)
class Degrees:
    """How the world is split: ranks per sequence, per set of experts, per copy of the parameters."""

    sp: int = 1
    ep: int = 1
    shard: int = 1

    @classmethod
    def of(cls, trainer: TrainerSection | None, world_size: int) -> Degrees:
        """What `trainer` asks for on so many ranks; UserError where it cannot be."""
        if trainer is None:
            return cls(shard=world_size)
        sp, ep, shard = trainer.sp_ulysses_degree, trainer.ep_degree, trainer.fsdp_config.hsdp_shard_size
        for key, degree in (("sp_ulysses_degree", sp), ("fsdp_config.hsdp_shard_size", shard or 1)):
            if world_size % degree:
                raise UserError(
                    f"trainer_args.{key}={degree}: does not divide the {world_size} ranks of this run "
                    f"(legal: {_divisors(world_size)})"
                )
        shard = shard or world_size
        if shard % ep:
            raise UserError(
                f"trainer_args.ep_degree={ep}: does not divide the {shard} ranks that hold one copy of the "
                f"parameters (legal: {_divisors(shard)})"
            )
        return cls(sp, ep, shard)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def build_mesh(trainer: TrainerSection | None = None) -> Mesh:
    """Joins the process group that torchrun describes, or makes one of a single process.

    trainer: its sp_ulysses_degree, ep_degree and hsdp_shard_size split the ranks, its ddp_timeout is how long
    they wait for one another; None shards over all and waits 30 minutes.
    May be called again in one process, for another split of the same ranks.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    degrees = Degrees.of(trainer, world_size)
    timeout = timedelta(seconds=trainer.ddp_timeout if trainer else 1800)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        lacking = {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
        if lacking and world_size > 1:
            raise UserError(
                f"WORLD_SIZE={world_size}, but {' and '.join(sorted(lacking))} not set in the environment: "
                "start the ranks with torchrun or launch.sh, or unset WORLD_SIZE to train in one process"
            )
        store = dist.HashStore() if lacking else None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    ep, efsdp = _expert_meshes(device.type, world_size, degrees)
    mesh = Mesh(
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        dp_rank=rank // degrees.sp,
        dp_size=world_size // degrees.sp,
        sp_rank=rank % degrees.sp,
        sp_size=degrees.sp,
        fsdp=_shard_mesh(device.type, world_size, degrees),
        host=dist.new_group(backend="gloo", timeout=timeout),
        sp=_sequence_group(device.type, world_size, degrees),
        ep=ep,
        efsdp=efsdp,
    )
    _limit_waiting(mesh, timeout)
    return mesh


def _limit_waiting(mesh: Mesh, timeout: timedelta) -> None:
    """Gives every group the one timeout; those of a DeviceMesh have torch's own, which differ by backend."""
    groups = [group for axes in (mesh.fsdp, mesh.ep, mesh.efsdp) if axes for group in axes.get_all_groups()]
    for group in [*groups, *([mesh.sp] if mesh.sp else [])]:
        _set_pg_timeout(timeout, group)


def _shard_mesh(device: str, world_size: int, degrees: Degrees) -> DeviceMesh:
    if degrees.shard == world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    shape = (world_size // degrees.shard, degrees.shard)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "fsdp"))


def _sequence_group(device: str, world_size: int, degrees: Degrees) -> dist.ProcessGroup | None:
    if degrees.sp == 1:
        return None
    shape = (world_size // degrees.sp, degrees.sp)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "sp")).get_group("sp")


def _expert_meshes(
    device: str, world_size: int, degrees: Degrees
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """(ep, efsdp), both cut from one mesh, as sharding over both of them requires."""
    if degrees.ep == 1:
        return None, None
    each = degrees.shard // degrees.ep
    if degrees.shard == world_size:
        whole = init_device_mesh(device, (each, degrees.ep), mesh_dim_names=("efsdp", "ep"))
        return whole["ep"], whole["efsdp"]
    shape = (world_size // degrees.shard, each, degrees.ep)
    whole = init_device_mesh(device, shape, mesh_dim_names=("replicate", "efsdp", "ep"))
    return whole["ep"], whole["replicate", "efsdp"]


def leave_mesh() -> None:
    """Ends the process group; safe to call when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
