"""Several gloo ranks for one test: `run_ranks(fn, 2, ...)` calls `fn(mesh, ...)` in fresh processes.

Usage::

    from tests.distributed import run_ranks

    def body(mesh, value):          # top level of a module; arguments and result must be picklable
        return mesh.rank + value

    def test_it():
        assert run_ranks(body, 2, 10) == [10, 11]

An exception in a rank fails the test with that rank's traceback; ranks that hang are killed after `timeout`.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Imported once by the fork server, before any thread or autograd engine exists; a rank then starts at once.
PRELOAD = ["torch", "torch.distributed.checkpoint", "tests.toy", "lmms_engine.models.qwen3_vl"]


class RankError(AssertionError):
    """A rank raised, died or hung; the message carries its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """`fn(mesh, *args)` on `world_size` gloo processes; their results in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    address = (inspect.getfile(fn), fn.__qualname__)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            job = (theirs, address, rank, world_size, rendezvous, timeout, pickle.dumps(args))
            process = context.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise RankError(f"ranks {missing} did not finish in time; finished: {sorted(results)}")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    address: tuple[str, str],
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
    args: bytes,
) -> None:
    """Body of a rank's process."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        from lmms_engine.parallel.mesh import build_mesh, leave_mesh

        result = _load(address)(build_mesh(), *pickle.loads(args))
        dist.barrier()   # nobody tears the group down while another rank still uses it
        # plain pickle: torch's own would hand over shared memory that dies with this process
        pipe.send_bytes(pickle.dumps((True, result)))
        leave_mesh()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)      # peers may hang in a collective; the parent kills them


def _load(address: tuple[str, str]) -> Callable[..., Any]:
    """The function at (file, qualified name), whatever the name pytest gave its module."""
    file, qualname = address
    name = f"ranks_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
