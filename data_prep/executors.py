"""Who does long work: processes of this command, or tasks that datatrove runs here or on a Slurm cluster.

Past one machine an existing engine does it: `datatrove` (extra `scale`; imported here and nowhere else). Task
r of W makes the parts r, r + W, r + 2W, … of each stage in a folder that all machines see; a last job makes
the output of them. Tasks that were killed are sent again by the same command, and make what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from data_prep.parts import Stage, Work, run
from data_prep.rows import in_order
from lmms_engine.errors import UserError

if TYPE_CHECKING:
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor

T = TypeVar("T")
Executor = Literal["processes", "local", "slurm"]

ExecutorOption = Annotated[
    Executor,
    typer.Option(
        help="processes: --workers of this command. By datatrove (extra `scale`): local, --tasks tasks, "
        "--workers at a time; slurm, --tasks tasks of --workers processes each."
    ),
]
TasksOption = Annotated[int, typer.Option(min=1, help="How many tasks; with --executor local or slurm.")]
PartitionOption = Annotated[str | None, typer.Option(help="Slurm partition.")]
TimeOption = Annotated[str, typer.Option(help="Slurm time limit of a task.")]
MemoryOption = Annotated[int, typer.Option(min=1, help="Slurm memory of a process, GB.")]
SbatchOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE, another option of sbatch, as account=me; repeat it.")
]


@dataclass(frozen=True)
class Cluster:
    """Where tasks run; see the options. sbatch: further options as NAME=VALUE."""

    executor: Executor = "processes"
    tasks: int = 1
    partition: str | None = None
    time: str = "24:00:00"
    mem_gb: int = 4
    sbatch: list[str] | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.executor == "processes" and self.tasks != 1:
            raise UserError(f"--tasks {self.tasks} needs --executor local or slurm; here --workers counts")
        if self.executor == "slurm" and self.partition is None:
            raise UserError("--executor slurm needs --partition NAME (`sinfo` lists them)")
        if self.executor != "slurm" and (self.partition is not None or self.sbatch):
            raise UserError("--partition and --sbatch are for --executor slurm")
        if odd := [pair for pair in self.sbatch if "=" not in pair]:
            raise UserError(f"--sbatch {odd[0]}: write NAME=VALUE, as in --sbatch account=me")


def submit(work: Work[T], out: Path, cluster: Cluster, workers: int) -> T | None:
    """Does the work and gives its result; on a Slurm cluster sends it off and gives None.

    out: what is written; the logs of tasks lie beside it in `.<name>.jobs`.
    """
    if cluster.executor == "processes":
        return run(work, workers)
    try:
        from datatrove.utils.logging import logger
    except ImportError:
        raise UserError(
            f"--executor {cluster.executor} needs datatrove: pip install 'lmms-engine[scale]'"
        ) from None
    logger.disable("datatrove")   # in this process; tasks log to their files and to stderr
    logs = out.resolve().parent / f".{out.name}.jobs"
    if cluster.executor == "local":
        for number, stage in enumerate(work.stages):
            _local(Task(stage), cluster.tasks, workers, logs / str(number)).run()
        return work.finish()
    if shutil.which("sbatch") is None:
        raise UserError("--executor slurm: there is no `sbatch` here; call it on a machine of the cluster")
    last = slurm_jobs(work, logs, cluster, workers)
    try:
        last.run()
    except subprocess.CalledProcessError as error:
        raise UserError(f"sbatch refused the job (exit code {error.returncode}); see its message") from None
    print(f"submitted: job {last.job_id} writes {out} when the tasks before it are done; logs: {logs}")
    print("call this again after a failure: it goes on; `squeue --me` shows the tasks")
    return None


class Task:
    """A share of a stage's parts; what datatrove calls in each task."""

    def __init__(self, stage: Stage, workers: int = 1) -> None:
        self.stage = stage
        self.workers = workers

    def __repr__(self) -> str:
        return self.stage.title

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        own = range(rank, self.stage.count(), world_size)
        for _ in in_order(self.stage.make, own, self.workers):
            pass


class Finish:
    """The end of the work; a job of one task."""

    def __init__(self, work: Work[Any]) -> None:
        self.work = work

    def __repr__(self) -> str:
        return "finish"

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        self.work.finish()


def _local(task: Task, tasks: int, workers: int, logs: Path) -> LocalPipelineExecutor:
    from datatrove.executor import LocalPipelineExecutor

    # What is done is known by the parts themselves: `skip_completed` would not see that the data changed.
    return LocalPipelineExecutor(
        [task], tasks=tasks, workers=min(workers, tasks), logging_dir=str(logs), skip_completed=False
    )


def slurm_jobs(work: Work[Any], logs: Path, cluster: Cluster, workers: int) -> SlurmPipelineExecutor:
    """A job array for each stage and a last job for the end, each after the one before; gives the last."""
    from datatrove.executor import SlurmPipelineExecutor

    steps: list[tuple[str, Any, int]] = [
        (f"{number}-{stage.title}", Task(stage, workers), cluster.tasks)
        for number, stage in enumerate(work.stages)
    ]
    job: SlurmPipelineExecutor | None = None
    for name, step, tasks in [*steps, (f"{len(steps)}-finish", Finish(work), 1)]:
        job = SlurmPipelineExecutor(
            [step],
            tasks=tasks,
            time=cluster.time,
            partition=cluster.partition,
            cpus_per_task=workers if isinstance(step, Task) else 1,
            mem_per_cpu_gb=cluster.mem_gb,
            job_name=f"data-prep-{name}",
            qos=None,
            env_command=f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH",
            sbatch_args=dict(pair.split("=", 1) for pair in cluster.sbatch),
            depends=job,
            logging_dir=str(logs / name),
            skip_completed=False,
        )
    return job
