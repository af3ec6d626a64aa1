"""A sum by gloo and one by NCCL over all GPUs: one JSON line each, `{"gloo": "ok …"}`.

python -P lmms_engine/commands/checks/collective.py
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist


def gloo() -> str:
    """A group of one; like a larger one it has to find this host's address."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return "ok" if tensor.sum() == 3 else f"wrong sum {tensor.tolist()}"


def nccl() -> str:
    """A sum over one tensor on each GPU."""
    count = torch.cuda.device_count()
    tensors = [torch.full((1024,), float(i + 1), device=f"cuda:{i}") for i in range(count)]
    torch.cuda.nccl.all_reduce(tensors)
    right = all((tensor == count * (count + 1) / 2).all().item() for tensor in tensors)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"ok, {version}, a sum over {count} GPUs" if right else f"{version}: wrong sum over {count} GPUs"


def tell(name: str, work: Callable[[], str]) -> None:
    """Prints what came of it."""
    try:
        result = work()
    except Exception as error:   # whatever a collective raises
        result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    print(json.dumps({name: result}), flush=True)


if __name__ == "__main__":
    tell("gloo", gloo)
    if torch.cuda.is_available():
        tell("nccl", nccl)
