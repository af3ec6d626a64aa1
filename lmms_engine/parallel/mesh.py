"""The ranks of a run and the few collectives the host side needs.

There is always a process group, also with one process, so that one code path serves every size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """Who this process is. Passed explicitly; nothing reads a global parallel state.

    fsdp: the axis over which parameters are sharded and gradients summed (data ranks x sequence ranks).
    host: a gloo group over all ranks for small host-side collectives, which never sync the device.
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


def build_mesh() -> Mesh:
    """Joins the process group that torchrun describes, or makes one of a single process."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
    fsdp = init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    host = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return Mesh(
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        dp_rank=rank,
        dp_size=world_size,
        sp_rank=0,
        sp_size=1,
        fsdp=fsdp,
        host=host,
    )


def leave_mesh() -> None:
    """Ends the process group; safe to call when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
