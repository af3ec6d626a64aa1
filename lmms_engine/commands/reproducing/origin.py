"""What a run came from, by its manifest, against what is here now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmms_engine.config import Job, load_job
from lmms_engine.errors import UserError
from lmms_engine.plugins import load_plugins
from lmms_engine.train import checkpoint
from lmms_engine.train.data import build_loader
from lmms_engine.train.manifest import (
    MANIFEST_FILE,
    PACKAGES,
    ROOT,
    git_state,
    image_state,
    package_version,
    sha256_file,
    weights_fingerprint,
)
from lmms_engine.train.metrics import METRICS_FILE, STEP_KEYS, read_lines
from lmms_engine.train.rundir import CONFIG_FILE, is_finished

# What of an image must be equal. Its commit is that of its code, which a mounted checkout hides.
IMAGE_KEYS = ("digest", "base", "lock_sha256")
# Manifest keys that a continued run may not have changed on its way.
SAME_ON_ITS_WAY = (
    "git", "lock_sha256", "config_sha256", "data_fingerprint", "processor_fingerprint", "plugins",
)  # fmt: skip
# Manifest keys that are read here.
KINDS = {
    "git": dict | None, "lock_sha256": str | None, "image": dict | None, "config_sha256": str,
    "data_fingerprint": str, "processor_fingerprint": str, "weights_fingerprint": str | None, "plugins": dict,
    "packages": dict, "devices": list, "cpu": str, "threads": int, "world_size": int,
    "data_parallel_size": int, "layout": dict, "history": list,
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Something that was another when the run was made."""

    what: str
    then: str
    now: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.then} then, {self.now} now" + (f". {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Origin:
    """A run folder that is to be reproduced."""

    folder: Path
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    job: Job
    overrides: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last step in its metrics."""
        return max(row["step"] for row in self.rows)

    @property
    def finished(self) -> bool:
        """Whether the run trained to its end."""
        newest = checkpoint.latest(self.folder)
        if newest is not None:
            return is_finished(self.job, checkpoint.read_run_state(newest))
        return self.job.trainer.num_train_epochs is None and self.last_step >= self.job.trainer.max_steps


def read_origin(folder: Path, overrides: list[str]) -> Origin:
    """Reads a run folder; UserError if it lacks what a reproduction needs."""
    for name in (MANIFEST_FILE, CONFIG_FILE, METRICS_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is no run folder, or the run never started")
    manifest = _read_manifest(folder / MANIFEST_FILE)
    return Origin(
        folder, manifest, _read_steps(folder / METRICS_FILE), load_job([folder / CONFIG_FILE], overrides),
        tuple(overrides),
    )  # fmt: skip


def _read_manifest(path: Path) -> dict[str, Any]:
    damaged = f"{path} is damaged (%s): take it from a copy of the run; nothing else says what it came from"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(damaged % error) from error
    if not isinstance(manifest, dict):
        raise UserError(damaged % "not a JSON object")
    missing = [key for key in KINDS if key not in manifest]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: it was written by an earlier version, "
            "which cannot be reproduced step by step; train anew and compare with that run"
        )
    wrong = [key for key, kind in KINDS.items() if not isinstance(manifest[key], kind)]
    wrong += [key for key in ("devices",) if not manifest[key]]
    if wrong:
        raise UserError(damaged % f"{wrong[0]} is {json.dumps(manifest[wrong[0]])[:40]}")
    return manifest


def _read_steps(path: Path) -> list[dict[str, Any]]:
    rows = read_lines(path, STEP_KEYS)
    if not rows:
        raise UserError(f"{path} holds no step: there is nothing to compare with")
    return rows


def differences(origin: Origin) -> list[Difference]:
    """Everything that differs between then and now, and would make another curve."""
    return [
        *_code(origin.manifest),
        *_environment(origin.manifest),
        *_settings(origin),
        *_devices(origin.manifest),
        *_inputs(origin),
    ]


def _differ(what: str, then: Any, now: Any, remedy: str = "") -> Iterator[Difference]:
    if then != now:
        yield Difference(what, _short(then), _short(now), remedy)


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    return text[:12] if len(text) in (32, 40, 64) and text.isalnum() else text


def _code(manifest: dict[str, Any]) -> Iterator[Difference]:
    then, now = manifest["git"], git_state(ROOT)
    commit = (then or manifest["image"] or {}).get("commit")
    here = (now or image_state() or {}).get("commit")
    yield from _differ("commit", commit, here, f"git checkout {commit}" if commit else "")
    changes = [(state or {}).get("changes_sha256") for state in (then, now)]
    undo = "undo or stash them" if changes[1] else "only who made the run has them"
    yield from _differ("changes that were not committed", *changes, undo)


def _environment(manifest: dict[str, Any]) -> Iterator[Difference]:
    lock, file = sha256_file(ROOT / "requirements.lock"), "requirements.lock"
    yield from _differ(file, manifest["lock_sha256"], lock, "check its commit out, then: make setup")
    for name in PACKAGES:
        then, now = manifest["packages"].get(name), package_version(name)
        if name != "lmms-engine":
            yield from _differ(f"package {name}", then, now, "make setup installs what the lock says")
    then, now = manifest["image"], image_state()
    for key in IMAGE_KEYS:
        old, new = (then or {}).get(key), (now or {}).get(key)
        ours = [bool(state and any(state.values())) for state in (then, now)]
        if (old and new) or ours[0] != ours[1]:
            yield from _differ(f"image {key}", old, new, "make build at its commit, or run it where it ran")


def _settings(origin: Origin) -> Iterator[Difference]:
    manifest = origin.manifest
    config = hashlib.sha256((origin.folder / CONFIG_FILE).read_bytes()).hexdigest()
    yield from _differ(CONFIG_FILE, manifest["config_sha256"], config, "it was edited after the run began")
    for before in manifest["history"]:
        for key in SAME_ON_ITS_WAY:
            if before.get(key) != manifest[key]:
                yield Difference(
                    f"{key} of an earlier start", _short(before.get(key)), _short(manifest[key]),
                    "the run went on with another, and one run cannot repeat that",
                )  # fmt: skip
    if origin.overrides:
        yield Difference("settings", "as in its config.yaml", " ".join(origin.overrides))


def _devices(manifest: dict[str, Any]) -> Iterator[Difference]:
    if on_gpu(manifest):
        here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        there = sorted(set(manifest["devices"]))
        yield from _differ("GPU", ", ".join(there), ", ".join(sorted(set(here))) or "none")


def on_gpu(manifest: dict[str, Any]) -> bool:
    """Whether the run's ranks had GPUs."""
    return not manifest["devices"][0].startswith("cpu ")


def _inputs(origin: Origin) -> Iterator[Difference]:
    job, manifest = origin.job, origin.manifest
    try:
        plugins = load_plugins(job)
        loader = build_loader(job, 0, manifest["data_parallel_size"])
        data, processor = loader.fingerprint(), loader.processor.fingerprint
    except UserError as error:
        yield Difference("data", "readable", f"not ({error})")
        return
    for name in sorted({*manifest["plugins"], *plugins}):
        yield from _differ(f"plugin {name}", manifest["plugins"].get(name), plugins.get(name))
    remedy = "rows were added, removed or edited"
    yield from _differ("data fingerprint", manifest["data_fingerprint"], data, remedy)
    yield from _differ("processor", manifest["processor_fingerprint"], processor)
    weights = weights_fingerprint(job.model.load_from_pretrained_path)
    yield from _differ("weights", manifest["weights_fingerprint"], weights)


def why_not_exact(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why two runs cannot be expected to agree bit by bit, by their manifests; empty if they can."""
    reasons = ["GPU kernels add in an order of their own"] if on_gpu(then) or on_gpu(now) else []
    names = {
        "cpu": "processor", "threads": "number of threads", "lock_sha256": "requirements.lock",
        "packages": "packages", "world_size": "number of processes", "layout": "layout",
    }  # fmt: skip
    return [*reasons, *(f"another {said}" for key, said in names.items() if then[key] != now[key])]
