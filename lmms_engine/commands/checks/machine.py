"""Processors, shared memory and the limits that this process runs under. Imports nothing heavy."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from lmms_engine.commands.checks import Check, gb

SHM_FAIL, SHM_WARN = 1e9, 8e9   # loader workers hand batches over in it; a container gets 64 MB by default
FILES_FAIL, FILES_WARN = 512, 4096
TASKS_WARN = 1000
CGROUP = Path("/sys/fs/cgroup")


def machine_checks(threads: int, num_gpus: int) -> Iterator[Check]:
    """threads: those that one process computes with."""
    yield cpu(threads)
    yield shared_memory()
    yield open_files()
    yield locked_memory(num_gpus)
    yield tasks()
    yield file_size()


def cpu(threads: int) -> Check:
    """Cores that may be used, against the threads that a process takes."""
    seen, quota = len(os.sched_getaffinity(0)), _cgroup_number("cpu.max")
    usable = seen if quota is None else min(float(seen), quota)
    found = f"{usable:g} cores for this process, {threads} threads"
    if usable < 2:
        return Check("cpu", "warn", found, "give it 2 cores or more, as in docker run --cpus=8")
    if threads > usable:
        return Check("cpu", "warn", found, f"export OMP_NUM_THREADS={usable:.0f}")
    return Check("cpu", "ok", found)


def _cgroup_number(name: str) -> float | None:
    """A limit of this container: cores of cpu.max, or the number in the file; None: no limit."""
    try:
        words = (CGROUP / name).read_text().split()
    except OSError:
        return None
    if not words or words[0] == "max":
        return None
    return int(words[0]) / (int(words[1]) if len(words) > 1 else 1)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Whether loader workers can hand over batches; without room they die by a bus error."""
    remedy = "start the container with --ipc=host or --shm-size=16g, the pod with a Memory volume at /dev/shm"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Check("shared memory", "fail", f"{folder} is not there or cannot be written", remedy)
    stats = os.statvfs(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    status = "fail" if free < SHM_FAIL else "warn" if free < SHM_WARN else "ok"
    if total >= SHM_WARN and free < SHM_WARN:
        remedy = f"delete what dead processes left in {folder}"
    return Check("shared memory", status, f"{gb(free)} free of {gb(total)}", "" if status == "ok" else remedy)


def open_files() -> Check:
    """Shards, sockets and tensors that travel between processes take a file number each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _at_least(soft, FILES_WARN):
        return Check("open files", "ok", _limit(soft))
    remedy = f"ulimit -n {_limit(hard)}"
    if not _at_least(hard, FILES_WARN):
        remedy = "docker run --ulimit nofile=65536, or nofile in /etc/security/limits.conf"
    status = "warn" if _at_least(soft, FILES_FAIL) else "fail"
    return Check("open files", status, f"at most {_limit(soft)}", remedy)


def locked_memory(num_gpus: int) -> Check:
    """Pinned memory and InfiniBand lock pages."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if soft == resource.RLIM_INFINITY else gb(soft)
    if num_gpus == 0 or _at_least(soft, int(1e9)):
        return Check("locked memory", "ok", found)
    remedy = "docker run --ulimit memlock=-1, or ulimit -l unlimited: InfiniBand needs it"
    return Check("locked memory", "warn", found, remedy)


def tasks() -> Check:
    """Processes and threads that this user and this container may have."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [_cgroup_number("pids.max")]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:   # root is exempt from the user's limit
        limits.append(soft)
    least = min((limit for limit in limits if limit is not None), default=None)
    if least is None or least >= TASKS_WARN:
        return Check("processes", "ok", "unlimited" if least is None else f"at most {least:.0f}")
    return Check(
        "processes", "warn", f"at most {least:.0f}", "ulimit -u 4096, or docker run --pids-limit=-1"
    )


def file_size() -> Check:
    """A limit here would cut checkpoints."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if soft == resource.RLIM_INFINITY:
        return Check("file size", "ok", "unlimited")
    return Check("file size", "fail", f"at most {gb(soft)}", "ulimit -f unlimited: checkpoints are larger")


def _at_least(limit: int, number: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= number


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
