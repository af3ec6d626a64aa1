"""Folders that a run writes to, the disks under them, and the Hugging Face cache and token."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmms_engine.commands.checks import Check, gb

DISK_FAIL, DISK_WARN = 2e9, 50e9   # one checkpoint of a model with 4e9 parameters is 48 GB


def storage_checks(root: Path) -> Iterator[Check]:
    """root: where runs/ and data/ lie."""
    cache = hub_cache()
    for name in ("runs", "data"):
        yield write_access(root / name, f"{name}/")
    yield home()
    yield hub_cache_access(cache)
    yield hub_token()
    yield from disks({"runs/": root / "runs", "data/": root / "data", "Hugging Face cache": cache})


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def write_problem(folder: Path) -> tuple[str, str] | None:
    """(what is wrong, what to do) if no file can be made in the folder, or in the one that will hold it."""
    place = existing(folder)
    probe = place / f".doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"\n")
        probe.unlink()
    except OSError as error:
        return f"{place}: {error.strerror}", _remedy(place, error.errno)
    return None


def _remedy(place: Path, number: int | None) -> str:
    uid = os.geteuid()
    if number == errno.EROFS:
        return f"{place} is mounted read-only: mount it for writing, e.g. as a volume without :ro"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"make room on the disk of {place}, or point to another disk with a link"
    if number in (errno.EACCES, errno.EPERM):
        try:
            owner: int | str = place.stat().st_uid
        except OSError:
            owner = "unknown"
        return (
            f"{place} belongs to uid {owner} and this process is uid {uid}: sudo chown -R {uid} {place}, "
            f"or start the container with --user {owner}"
        )
    return f"make {place} a folder that can be written"


def write_access(folder: Path, name: str) -> Check:
    """Whether files can be made in a folder."""
    problem = write_problem(folder)
    if problem is None:
        return Check(name, "ok", str(folder) if folder.exists() else f"{folder} will be made")
    return Check(name, "fail", *problem)


def home() -> Check:
    """Kernels that are compiled at first use are kept under the home folder, unless told otherwise."""
    try:
        folder = Path.home()
    except RuntimeError:   # no HOME, and a uid without a line in /etc/passwd
        remedy = "export HOME to a folder that can be written"
        return Check("home", "warn", "there is none for this uid", remedy)
    problem = write_problem(folder)
    if problem is None:
        return Check("home", "ok", str(folder))
    if os.environ.get("TRITON_CACHE_DIR") and os.environ.get("HF_HOME"):
        return Check("home", "ok", f"{problem[0]}; caches lie elsewhere")
    return Check(
        "home", "warn", problem[0],
        "export HOME to a folder that can be written, or HF_HOME and TRITON_CACHE_DIR",
    )  # fmt: skip


def hub_cache() -> Path:
    """Where models from the hub are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def hub_cache_access(folder: Path) -> Check:
    """A cache that is there and cannot be written still serves what it holds."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    offline = "; the hub is switched off (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else ""
    problem = write_problem(folder)
    if problem is None:
        models = len(list(folder.glob("models--*")))
        return Check("Hugging Face cache", "ok", f"{folder}, {models} models{offline}")
    status = "warn" if os.path.isdir(folder) and os.access(folder, os.R_OK) else "fail"
    return Check(
        "Hugging Face cache", status, problem[0] + offline,
        "export HF_HOME to a folder that can be written (docker: a volume), or nothing can be downloaded",
    )  # fmt: skip


def hub_token() -> Check:
    """Whether there is a token. It is never shown."""
    from huggingface_hub import get_token

    try:
        token = get_token()
    except (OSError, ValueError) as error:   # not allowed to read it, or it is no text
        said = getattr(error, "strerror", None) or "it is no text"
        return Check("Hugging Face token", "warn", f"cannot be read: {said}", "export HF_TOKEN")
    return Check("Hugging Face token", "ok", "set" if token else "none; only gated models need one")


def disks(folders: dict[str, Path]) -> Iterator[Check]:
    """One check for each disk under some folders (name -> folder)."""
    places = {name: existing(folder) for name, folder in folders.items()}
    by_disk: dict[int, list[str]] = {}
    for name, place in places.items():
        try:
            by_disk.setdefault(place.stat().st_dev, []).append(name)
        except OSError as error:
            yield Check(f"disk of {name}", "fail", f"{place}: {error.strerror}", "mount it anew")
    for names in by_disk.values():
        yield disk(places[names[0]], ", ".join(names))


def disk(place: Path, names: str) -> Check:
    """Free space, and files that can still be made."""
    free, stats = shutil.disk_usage(place).free, os.statvfs(place)
    name, found = f"disk of {names}", f"{gb(free)} free"
    if stats.f_files and not stats.f_favail:
        return Check(name, "fail", f"{found}, but no more files", f"delete files on the disk of {place}")
    if free >= DISK_WARN:
        return Check(name, "ok", found)
    remedy = f"make room on the disk of {place}: a checkpoint takes 12 bytes per parameter"
    if free >= DISK_FAIL:
        return Check(name, "warn", found, f"{remedy}; trainer_args.save_total_limit=1 keeps one")
    return Check(name, "fail", found, remedy)
