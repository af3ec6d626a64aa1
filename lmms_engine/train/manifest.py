"""`manifest.json`: what is needed to say where a run came from, and to make it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lmms_engine
from lmms_engine.parallel.mesh import Mesh

MANIFEST_FILE = "manifest.json"
ROOT = Path(lmms_engine.__file__).resolve().parent.parent
PACKAGES = (
    "lmms-engine", "torch", "torchvision", "torchaudio", "triton", "transformers", "datasets", "accelerate",
    "liger-kernel", "flash-attn", "flash-attn-4", "deepspeed", "flash-linear-attention", "diffusers", "av",
    "pillow", "numpy", "pyarrow", "safetensors", "tokenizers", "wandb", "tensorboard",
)  # fmt: skip
# Variables that change what a run computes or how fast; the rest of the environment may hold secrets.
VARIABLES = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PRESET",
    "WORLD_SIZE", "NNODES", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE",
)  # fmt: skip


def build_manifest(
    *,
    mesh: Mesh,
    config_yaml: str,
    seed: int,
    data_fingerprint: str,
    processor_fingerprint: str,
    plugins: dict[str, str],
) -> dict[str, Any]:
    """Everything about code, machine, data and settings; read-only, no network."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "seed": seed,
        "git": git_state(ROOT),
        "lock_sha256": sha256_file(ROOT / "requirements.lock"),
        "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest(),
        "data_fingerprint": data_fingerprint,
        "processor_fingerprint": processor_fingerprint,
        "plugins": plugins,
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "devices": device_names(mesh),
        "world_size": mesh.world_size,
        "data_parallel_size": mesh.dp_size,
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cuda": torch.version.cuda,
            "host": platform.node(),
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
        },
    }


def write_manifest(run_dir: Path, manifest: dict[str, Any], resumed_from: int) -> None:
    """Writes the manifest of this start; earlier starts of the same run stay in `history`, oldest first."""
    path = run_dir / MANIFEST_FILE
    history = []
    if resumed_from and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        history = [*before.pop("history", []), before]
    body = {**manifest, "resumed_from": resumed_from or None, "history": history}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a repository."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sha256_file(path: Path) -> str | None:
    """Hash of a file's bytes, or None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def package_version(name: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device_names(mesh: Mesh) -> list[str]:
    """Every rank's device in rank order: the GPU's name, or the processor's. Collective."""
    if mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
    else:
        name = f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return mesh.gather(name)
