"""Interpreter, packages against the lock, the image, and the state of the repository."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmms_engine.commands.checks import Check
from lmms_engine.train.manifest import git_state, image_state, package_version, sha256_file

LOCK = "requirements.lock"
OPTIONAL_LOCKS = ("requirements-flash-attn.lock", "requirements-flash-attn-4.lock")


def environment_checks(root: Path) -> Iterator[Check]:
    """root: the repository."""
    yield python()
    yield packages(root / LOCK, *(root / name for name in OPTIONAL_LOCKS))
    yield image(root / LOCK)
    yield repository(root)


def python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """The interpreter; the lock is made for three versions."""
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    if (3, 11) <= version <= (3, 13):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "use Python 3.11, 3.12 or 3.13: make setup PYTHON=python3.12")


def packages(lock: Path, *optional: Path) -> Check:
    """Installed versions against the lock. optional: locks whose packages may be absent."""
    remedy = "make build" if any((image_state() or {}).values()) else "make setup"
    if not lock.is_file():
        return Check("packages", "warn", f"no {lock.name} beside the code", "run from a clone")
    try:
        wanted = locked(lock)
        others = [locked(path) for path in optional if path.is_file()]
        pinned = [pair for versions in (wanted, *others) for pair in versions.items()]
    except (OSError, ValueError) as error:   # InvalidRequirement is a ValueError
        said = " ".join(str(error).split())[:200]
        remedy = f"git checkout {' '.join(path.name for path in (lock, *optional))}"
        return Check("packages", "fail", f"a lock cannot be read: {said}", remedy)
    if not wanted:
        return Check("packages", "fail", f"{lock.name} names no package", f"git checkout {lock.name}")
    wrong = [f"{name} {have}, not {want}" for name, want in pinned if (have := _other(name, want))]
    missing = [name for name in wanted if package_version(name) is None]
    needed = [name for name in missing if name in direct_requirements()]
    if wrong or needed:
        found = _few([*wrong, *(f"{name} is missing" for name in needed)])
        return Check("packages", "fail", found, f"{remedy}: it installs {lock.name}")
    if missing:
        return Check("packages", "warn", f"missing of the extras: {_few(missing)}", f"{remedy} installs them")
    return Check("packages", "ok", f"all {len(wanted)} as in {lock.name}")


def locked(lock: Path) -> dict[str, str]:
    """Package -> version, of a lock's lines that hold for this machine; ValueError for any other line."""
    wanted = {}
    for line in re.findall(r"^[^\s#\\][^\\\n]*", lock.read_text(encoding="utf-8"), flags=re.MULTILINE):
        requirement = Requirement(line.split(" #")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate():
            version, *more = requirement.specifier or [None]
            if version is None or more or version.operator != "==":
                raise ValueError(f"{lock.name}: {line.strip()} pins no version")
            wanted[canonicalize_name(requirement.name)] = version.version
    return wanted


def _other(name: str, version: str) -> str | None:
    """The installed version if it is another one; a build's own suffix (+cu130) does not count."""
    have = package_version(name)
    return have if have is not None and have.split("+")[0] != version.split("+")[0] else None


def direct_requirements() -> set[str]:
    """What the project needs besides its extras; without it nothing runs."""
    try:
        lines = metadata.requires("lmms-engine") or []
    except metadata.PackageNotFoundError:
        return set()
    parsed = [Requirement(line) for line in lines if "extra ==" not in line]
    return {canonicalize_name(requirement.name) for requirement in parsed}


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def image(lock: Path) -> Check:
    """The image that this process runs in, by what it says of itself."""
    state = image_state()
    if state is None:
        return Check("image", "ok", "none: running on the host")
    if not any(state.values()):
        return Check("image", "ok", "a container that is not of this repository's image")
    shown = ", ".join(f"{key} {value.removeprefix('sha256:')[:12]}" for key, value in state.items() if value)
    built_from = state["lock_sha256"]
    if built_from and built_from != (sha256_file(lock) or built_from):
        return Check("image", "warn", f"{shown}; it was built from another {lock.name}", "make build")
    return Check("image", "ok", shown)


def repository(root: Path) -> Check:
    """Whether a run's manifest will be able to name its commit."""
    state = git_state(root)
    if state is not None:
        changed = ", with changes that are not committed" if state["dirty"] else ""
        return Check("commit", "ok", state["commit"][:12] + changed)
    if (root / ".git").exists():
        return Check("commit", "warn", "git cannot read the repository", "install git, or run as its owner")
    commit = (image_state() or {}).get("commit")
    if commit:
        return Check("commit", "ok", f"{commit[:12]}, of the image")
    return Check(
        "commit", "warn", "unknown: no repository here", "run from a clone: a run's manifest names its commit"
    )
