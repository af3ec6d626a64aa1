"""Processes for the cases: a group of ranks runs all cases of its size; after a failure a new one goes on.

A rank that fails ends its group: the others may wait for it in a collective, so they are stopped at once.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from lmms_engine.config import Job
from lmms_engine.train.verify.cases import Case
from lmms_engine.train.verify.run import Outcome

PATIENCE = timedelta(minutes=30)   # for one case, its processes' start included
ROWS_FILE = "rows.pt"
PRELOAD = ["lmms_engine.train.verify.run"]


@dataclass(frozen=True)
class Reply:
    """What became of a case: an outcome, or why there is none."""

    status: Literal["done", "refused", "failed"]
    outcome: Outcome | None = None
    reason: str = ""
    at: float = field(default_factory=time.time)   # a rank's failure makes others fail: the first one counts


def run_cases(
    cases: Iterable[Case], job: Job, folder: Path, *, on_gpu: bool, is_reference: bool = False
) -> Iterator[tuple[Case, Reply]]:
    """Each case with its reply, in the order in which groups of ranks run them: by size and backend.

    folder: holds the rows (`ROWS_FILE`) and the reference's gradients.
    """
    kind = _kind
    for (ranks, _), group in groupby(sorted(cases, key=kind), key=kind):
        left = list(group)
        while left:
            with _group(left, ranks, job, folder, on_gpu, is_reference) as (pipes, processes):
                while left:
                    reply = _collect(pipes, processes, time.monotonic() + PATIENCE.total_seconds())
                    yield left.pop(0), reply
                    if reply.status == "failed":
                        break


def _kind(case: Case) -> tuple[int, bool]:
    """Cases of one kind share processes; DeepSpeed keeps state of its own in a process."""
    return case.ranks, "trainer_type" in case.changes


@contextmanager
def _group(
    cases: list[Case], ranks: int, job: Job, folder: Path, on_gpu: bool, is_reference: bool
) -> Iterator[tuple[list[Connection], list[BaseProcess]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            task = _Task(
                cases, job.to_dict(), str(folder), rank, ranks, f"{meeting}/store", on_gpu, is_reference
            )
            process = context.Process(target=_rank_main, args=(theirs, task), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            yield pipes, processes
        finally:
            for process in processes:
                process.join(timeout=5 if process.exitcode is None else None)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], processes: list[BaseProcess], deadline: float) -> Reply:
    """All ranks' replies to one case as one; the first failure counts."""
    replies: dict[int, Reply] = {}
    while len(replies) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in replies]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(replies))
            _stop(processes)
            return Reply("failed", reason=f"ranks {missing} gave no answer in {PATIENCE}")
        for pipe in ready:
            try:
                reply = pickle.loads(pipe.recv_bytes())
            except EOFError:
                reply = Reply("failed", reason="died without a word (out of memory?)")
            replies[pipes.index(pipe)] = reply
        failed = [(reply.at, rank) for rank, reply in replies.items() if reply.status == "failed"]
        if failed:
            _stop(processes)
            _, rank = min(failed)
            return Reply("failed", reason=f"rank {rank}: {replies[rank].reason}")
    statuses = {reply.status for reply in replies.values()}
    if len(statuses) > 1:
        _stop(processes)
        return Reply("failed", reason=f"only some ranks refuse: {[r.reason for r in replies.values()]}")
    return replies[0]


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()


@dataclass(frozen=True)
class _Task:
    """What a rank's process is told; plain data, so that any start method can hand it over."""

    cases: list[Case]
    job: dict[str, Any]
    folder: str
    rank: int
    world_size: int
    rendezvous: str
    on_gpu: bool
    is_reference: bool


def _rank_main(pipe: Connection, task: _Task) -> None:
    """Body of a rank's process."""
    import torch
    import torch.distributed as dist

    from lmms_engine.parallel.mesh import leave_mesh
    from lmms_engine.plugins import load_plugins
    from lmms_engine.train.data import build_processor
    from lmms_engine.train.verify.run import Refused, run_case

    sys.stdout = io.StringIO()   # progress of the resumed run, and what libraries have to say
    ranks = {"RANK": task.rank, "WORLD_SIZE": task.world_size, "LOCAL_RANK": task.rank}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    if not task.on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.world_size))
    torch.backends.cudnn.allow_tf32 = False   # patch embeddings are convolutions

    def answer(status: Literal["done", "refused", "failed"], **more: Any) -> None:
        pipe.send_bytes(pickle.dumps(Reply(status, **more)))

    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if task.on_gpu else "gloo",
            init_method=f"file://{task.rendezvous}",
            rank=task.rank,
            world_size=task.world_size,
            timeout=PATIENCE,
        )
        job, folder = Job.from_dict(task.job), Path(task.folder)
        load_plugins(job)
        rows = torch.load(folder / ROWS_FILE, weights_only=False)   # written by this command a moment ago
        processor = build_processor(job)
        for case in task.cases:
            try:
                outcome = run_case(case, job, rows, processor, folder, is_reference=task.is_reference)
                answer("done", outcome=outcome)
            except Refused as reason:
                answer("refused", reason=str(reason))
        dist.barrier()   # nobody leaves while another rank still needs it
        leave_mesh()
    except BaseException as error:
        answer("failed", reason=_reason(error))
        os._exit(1)   # the others may wait in a collective; the parent stops them


def _reason(error: BaseException) -> str:
    """One line: what it was and where in our code or the library's it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]} ({Path(last.filename).name}:{last.lineno})"


