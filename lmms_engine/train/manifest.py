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
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

import lmms_engine
from lmms_engine.datasets.sources.files import LocalFile
from lmms_engine.errors import UserError
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
# The image says of itself: LMMS_IMAGE_COMMIT, LMMS_IMAGE_LOCK_SHA256, LMMS_IMAGE_BASE. Its starter: _DIGEST.
IMAGE_KEYS = ("digest", "commit", "lock_sha256", "base")
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def build_manifest(
    *,
    mesh: Mesh,
    config_yaml: str,
    seed: int,
    data_fingerprint: str,
    processor_fingerprint: str,
    plugins: dict[str, str],
    weights: str | None,
) -> dict[str, Any]:
    """Everything about code, machine, data and settings; read-only, no network. Collective.

    weights: the hub id or folder that the model comes from. The resolved configuration itself lies beside the
    manifest, in config.yaml, whose hash is here.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "seed": seed,
        "git": git_state(ROOT),
        "lock_sha256": sha256_file(ROOT / "requirements.lock"),
        "image": image_state(),
        "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest(),
        "config_files": file_hashes(sys.argv[1:]),
        "data_fingerprint": data_fingerprint,
        "processor_fingerprint": processor_fingerprint,
        "weights_fingerprint": weights_fingerprint(weights),
        "plugins": plugins,
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "devices": device_names(mesh),
        "cpu": cpu_type(),
        "threads": torch.get_num_threads(),
        "world_size": mesh.world_size,
        "data_parallel_size": mesh.dp_size,
        "layout": {
            "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            "data_parallel": mesh.dp_size,
            "sequence": mesh.sp_size,
            "experts": mesh.ep_size,
            "shard": mesh.shard_size,
        },
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
        before = read_manifest(path)
        history = [*before.pop("history", []), before]
    body = {**manifest, "resumed_from": resumed_from or None, "history": history}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in a file; UserError if it is damaged."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and isinstance(manifest.get("history", []), list):
            return manifest
        reason = "not a JSON object with a list as `history`"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(
        f"{path} is damaged ({reason}): put a copy of it back, or move it aside; the run goes on without it, "
        "and only loses what it came from"
    )


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, whether tracked files differ from it, and a hash of how; None outside a repository."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None:
        return None
    difference = _git(root, "diff", "--binary", "HEAD") if changed else None
    digest = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit, "dirty": bool(changed), "changes_sha256": digest}


def _git(root: Path, *arguments: str) -> str | None:
    # In a container the files often belong to another user, and git would refuse to look at them.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
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


def image_state() -> dict[str, str | None] | None:
    """What the image that this process runs in was made of, as it says in its environment; None outside.

    An image cannot hold its own digest: whoever starts it may pass it in.
    """
    given = {key: os.environ.get(f"LMMS_IMAGE_{key.upper()}", "") for key in IMAGE_KEYS}
    said = {key: value if value not in ("", "unknown") else None for key, value in given.items()}
    return said if any(said.values()) or any(Path(mark).exists() for mark in CONTAINER_MARKS) else None


def file_hashes(arguments: list[str]) -> dict[str, str]:
    """Path -> sha256 of every file that the words of a command line name, also as `key=path`."""
    names = [*arguments, *(word.partition("=")[2] for word in arguments)]
    found = {str(Path(name).absolute()): sha256_file(Path(name)) for name in names if 0 < len(name) < 1000}
    return {name: digest for name, digest in sorted(found.items()) if digest}


def weights_fingerprint(source: str | None) -> str | None:
    """Equal for equal weights on disk: sizes, headers and ends of the safetensors files; None without."""
    if source is None:
        return None
    folder = Path(source).expanduser()
    try:
        folder = folder if folder.is_dir() else Path(snapshot_download(source, local_files_only=True))
    except (OSError, HFValidationError):   # a resumed run does without the weights that it began from
        return None
    marks = [LocalFile(str(file)).mark() for file in sorted(folder.glob("*.safetensors"))]
    return hashlib.blake2b(" ".join(marks).encode(), digest_size=16).hexdigest() if marks else None


def cpu_type() -> str:
    """What decides how a processor rounds: maker, model, stepping, and the kernels that torch picks."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    info: dict[str, str] = {}
    if (listing := Path("/proc/cpuinfo")).exists():
        for line in listing.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            info[key.strip()] = value.strip()
    named = "/".join(info[key] for key in wanted if key in info) or platform.processor()
    return f"{platform.machine()} {named} {torch.backends.cpu.get_cpu_capability()}"


def device_names(mesh: Mesh) -> list[str]:
    """Every rank's device in rank order: the GPU's name, or the processor's. Collective."""
    if mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
    else:
        name = f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return mesh.gather(name)
