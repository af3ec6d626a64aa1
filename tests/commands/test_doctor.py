"""`doctor` on this machine, and on bad ones: another user, limits, small and full and read-only disks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.commands.checks import Check, environment, gpu, machine, storage
from lmms_engine.commands.doctor import show

REPO = Path(__file__).resolve().parents[2]
STRANGER = 54321   # a user id that owns nothing
CHILD = """
import dataclasses, json, os, sys
from pathlib import Path
import huggingface_hub
from lmms_engine.commands.checks import machine, storage
huggingface_hub.get_token()   # imports what it needs
if len(sys.argv) > 1:   # only now: another user may not be able to read the interpreter
    os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
checks = [*machine.machine_checks(1, 8), *storage.storage_checks(Path.cwd())]
print(json.dumps([dataclasses.asdict(check) for check in checks]))
"""


def child(*before: str, uid: int | None = None, **options: Any) -> dict[str, dict[str, str]]:
    """The checks that need no torch, by name, as a process in another situation sees them."""
    env = {**os.environ, "PYTHONPATH": str(REPO), **options.pop("env", {})}
    command = [*before, sys.executable, "-c", CHILD, *([] if uid is None else [str(uid)])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user or to mount")


def test_this_machine_with_one_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: a file where a folder should be is the one failure, and the token is never shown."""
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1, done.output
    assert "verysecret" not in done.output
    checks = [Check(**entry) for entry in json.loads(done.stdout)]
    by_name = {check.name: check for check in checks}
    failed = {check.name for check in checks if check.status == "fail"}
    assert "runs/" in failed
    small = ("shared memory", "open files", "file size", "disk of", "home", "Hugging Face cache", "data/")
    assert not [name for name in failed - {"runs/"} if not name.startswith(small)]   # what a machine may lack
    assert all(bool(check.remedy) == (check.status != "ok") for check in checks)
    assert by_name["Hugging Face token"].found == "set"
    assert by_name["attention: sdpa"].found.startswith("within ")
    assert by_name["gloo"].found == "ok"
    for name in ("python", "packages", "image", "commit", "driver", "gpu", "liger", "attention: varlen"):
        assert name in by_name
    console = Console(width=300, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(checks, console)
    text = console.export_text()
    assert f"fail  runs/: {tmp_path}/runs: Not a directory. What to do: make {tmp_path}/runs a folder" in text
    assert text.rstrip().endswith(f" {len(failed)} fail")


@as_root
def test_another_user_without_a_home(open_folder: Path) -> None:
    """Folders of somebody else, and a home that cannot be written."""
    (open_folder / "runs").mkdir()
    (open_folder / "data").mkdir()
    os.chown(open_folder / "data", STRANGER, STRANGER)
    env = {"HOME": str(open_folder), "HF_HOME": str(open_folder / "hub"), "TRITON_CACHE_DIR": ""}
    found = child(cwd=open_folder, env=env, uid=STRANGER)
    assert found["data/"]["status"] == "ok"
    assert found["runs/"]["status"] == "fail"
    assert f"belongs to uid 0 and this process is uid {STRANGER}: sudo chown" in found["runs/"]["remedy"]
    assert found["home"]["status"] == "warn"
    assert "export HOME" in found["home"]["remedy"]
    assert found["Hugging Face cache"]["status"] == "fail"
    assert "export HF_HOME" in found["Hugging Face cache"]["remedy"]


@pytest.mark.parametrize(
    ("limit", "value", "name", "status", "remedy"),
    [
        (resource.RLIMIT_NOFILE, (256, 256), "open files", "fail", "--ulimit nofile=65536"),
        (resource.RLIMIT_NOFILE, (1024, 8192), "open files", "warn", "ulimit -n 8192"),
        (resource.RLIMIT_MEMLOCK, (65536, 65536), "locked memory", "warn", "memlock=-1"),
        (resource.RLIMIT_FSIZE, (10**9, 10**9), "file size", "fail", "ulimit -f unlimited"),
    ],
)
def test_limits(
    tmp_path: Path, limit: int, value: tuple[int, int], name: str, status: str, remedy: str
) -> None:
    if limit == resource.RLIMIT_NOFILE and resource.getrlimit(limit)[1] < value[1]:
        pytest.skip("the hard limit here is lower already")
    found = child(cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(limit, value))
    assert (found[name]["status"], remedy in found[name]["remedy"]) == (status, True), found[name]


MOUNTS = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mkdir -p "$1/runs" "$1/data" "$1/hub"
mount -t tmpfs -o ro tmpfs "$1/data"
mount -t tmpfs -o size=1m tmpfs "$1/runs"
dd if=/dev/zero of="$1/runs/full" bs=64k 2>/dev/null || true
cd "$1" && shift && exec "$@"
"""


@as_root
def test_small_full_and_read_only_disks(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    shell = ["unshare", "-m", "bash", "-c", MOUNTS, "mounts", str(tmp_path)]
    found = child(*shell, env={"HF_HOME": str(tmp_path / "hub")})
    assert found["shared memory"]["status"] == "fail"
    assert "--ipc=host or --shm-size=16g" in found["shared memory"]["remedy"]
    assert "No space left on device" in found["runs/"]["found"]
    assert "make room" in found["runs/"]["remedy"]
    assert found["disk of runs/"]["status"] == "fail"
    assert "make room" in found["disk of runs/"]["remedy"]
    assert "Read-only file system" in found["data/"]["found"]
    assert "mounted read-only: mount it for writing" in found["data/"]["remedy"]


def test_threads_beyond_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    check = machine.cpu(cores + 1)
    assert (check.status, "OMP_NUM_THREADS" in check.remedy) == ("warn", cores >= 2)


@pytest.mark.parametrize(
    ("body", "cuda", "status", "said"),
    [
        ("echo 550.54.14", "13.0", "fail", "install driver 580 or newer"),
        ("echo 550.54.14", "12.8", "ok", ""),
        ("echo 580.65.06; echo 580.65.06", "13.0", "ok", ""),
        ("echo 580.65.06", None, "fail", "make setup"),
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "13.0", "fail", "reboot"),
    ],
)
def test_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, cuda: str | None, status: str, said: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = gpu.driver(cuda)
    assert (check.status, said in check.remedy) == (status, True), check


def test_a_container_without_the_gpu_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(gpu, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--gpus all" in gpu.driver("13.0").remedy


def test_versions_against_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "requirements.lock"

    def judged(change: Callable[[str], str]) -> Check:
        lock.write_text(change((REPO / "requirements.lock").read_text()))
        return environment.packages(lock, tmp_path / "none.lock")

    assert judged(lambda text: text).status == "ok"
    other = judged(lambda text: text.replace("\ntorch==", "\ntorch==1"))
    assert (other.status, other.remedy) == ("fail", "make setup: it installs requirements.lock")
    have = torch.__version__.split("+")[0]
    assert other.found == f"torch {have}, not 1{have}"
    extra = judged(lambda text: text + "no-such-package==1.0 \\\n    --hash=sha256:00\n")
    assert (extra.status, "no-such-package" in extra.found) == ("warn", True)
    elsewhere = judged(lambda text: text + "no-such-package==1.0 ; sys_platform == 'win32' \\\n")
    assert elsewhere.status == "ok"
    monkeypatch.setattr(environment, "direct_requirements", lambda: {"no-such-package"})
    assert judged(lambda text: text + "no-such-package==1.0\n").status == "fail"


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (b"\x00\xff", "a lock cannot be read: 'utf-8' codec"),
        (b"<<<<<<< HEAD\ntorch==2.11.0\n", "a lock cannot be read: "),
        (b"torch>=2\n", "torch>=2 pins no version"),
        (b"torch @ https://example.org/torch.whl\n", "pins no version"),
        (b"", "names no package"),
    ],
)
def test_a_corrupt_lock(tmp_path: Path, lock: bytes, said: str) -> None:
    (tmp_path / "requirements.lock").write_bytes(lock)
    check = environment.packages(tmp_path / "requirements.lock", tmp_path / "none.lock")
    assert check.status == "fail"
    assert said in check.found
    assert "git checkout requirements.lock" in check.remedy


def test_a_token_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    token = storage.hub_token()
    assert (token.status, token.found) == ("warn", "cannot be read: it is no text")


@as_root
def test_a_cache_behind_a_closed_folder(open_folder: Path) -> None:
    (open_folder / "closed").mkdir(mode=0o700)
    env = {"HF_HOME": str(open_folder / "closed" / "hub")}
    cache = child(cwd=open_folder, env=env, uid=STRANGER)["Hugging Face cache"]
    assert cache["status"] == "fail"
    assert "export HF_HOME" in cache["remedy"]


@as_root
def test_no_home_at_all(open_folder: Path) -> None:
    home = child("env", "-u", "HOME", cwd=open_folder, uid=STRANGER)["home"]
    assert (home["status"], home["found"]) == ("warn", "there is none for this uid")


def test_an_image_of_another_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMMS_IMAGE_LOCK_SHA256", "0" * 64)
    check = environment.image(REPO / "requirements.lock")
    assert (check.status, check.remedy) == ("warn", "make build")
    monkeypatch.setenv("LMMS_IMAGE_LOCK_SHA256", environment.sha256_file(REPO / "requirements.lock"))
    assert environment.image(REPO / "requirements.lock").status == "ok"


def no_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that sees all segments."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * gpu.HEAD_DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_mask, "differs by"),
        (broken, "RuntimeError: no kernel image is available"),
        (lambda q, k, v: gpu._spelled_out(q, k, v) * float("nan"), "differs by nan"),
        (lambda q, k, v: gpu._spelled_out(q, k.detach(), v) + 0 * k.sum(), "differs by"),   # no gradient
    ],
)
def test_wrong_attention_is_seen(function: Callable[..., torch.Tensor], said: str) -> None:
    expected = gpu._results(gpu._spelled_out, gpu.CPU, torch.float32)
    check = gpu._compare("attention: x", function, expected, gpu.CPU, torch.float32)
    assert (check.status, check.found.startswith(said)) == ("fail", True), check
    assert "attn_implementation" in check.remedy
