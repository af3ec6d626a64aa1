"""tools/runtime.sh: where a target runs, and one line that says why or what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ANSWERS = "echo ' Runtimes: runc io.containerd.runc.v2'"
ANSWERS_WITH_GPU = "echo ' Runtimes: runc nvidia'"
NO_DAEMON = "echo 'Cannot connect to the Docker daemon. Is the docker daemon running?' >&2; exit 1"
DENIED = "echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1"
NO_GPU = "exit 9"
NEW_DRIVER = "echo 580.65.06"
OLD_DRIVER = "echo 535.104.05; echo 535.104.05"


@pytest.mark.parametrize(
    ("engine", "driver", "where", "why"),
    [
        (ANSWERS, NO_GPU, "docker", "an engine answers; RUNTIME=host"),
        (ANSWERS_WITH_GPU, NEW_DRIVER, "docker", "an engine answers and has GPU support"),
        (ANSWERS, NEW_DRIVER, "host", "the engine has no GPU support: install the NVIDIA Container Toolkit"),
        (NO_DAEMON, NO_GPU, "host", "no docker daemon answers: start it"),
        (DENIED, NO_GPU, "host", "your user may not speak to the docker daemon: sudo usermod -aG docker"),
        (ANSWERS_WITH_GPU, OLD_DRIVER, "host", "driver 535.104.05 is older than 580, which CUDA 13 needs"),
    ],
)
def test_auto(
    repo: Path, command: Callable, call: Callable, engine: str, driver: str, where: str, why: str
) -> None:
    command("docker", engine)
    command("nvidia-smi", driver)
    decided = call("tools/runtime.sh", "auto", cwd=repo)
    assert decided.stdout == f"{where}\n"
    assert decided.stderr.startswith(f"runtime: {where} (")
    assert why in decided.stderr
    assert decided.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "driver", "said"),
    [
        (NO_DAEMON, NO_GPU, "RUNTIME=docker: no docker daemon answers"),
        (DENIED, NO_GPU, "RUNTIME=docker: your user may not speak"),
        (ANSWERS, NEW_DRIVER, "RUNTIME=docker: there is a GPU, but the engine has no GPU support"),
        (ANSWERS_WITH_GPU, OLD_DRIVER, "RUNTIME=docker: driver 535.104.05 is older than 580"),
    ],
)
def test_docker_that_cannot_be_had_is_refused_by_make(
    repo: Path, command: Callable, call: Callable, engine: str, driver: str, said: str
) -> None:
    command("docker", engine)
    command("nvidia-smi", driver)
    refused = call("make", "test", "RUNTIME=docker", cwd=repo)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert refused.stderr.strip().count("\n") == 0
    assert refused.stdout == ""


def test_docker_and_host_as_asked(repo: Path, command: Callable, call: Callable) -> None:
    command("docker", ANSWERS)
    command("nvidia-smi", NO_GPU)
    assert call("tools/runtime.sh", "docker", cwd=repo).stdout == "docker\n"
    command("docker", "echo asked >&2; exit 1")
    command("nvidia-smi", OLD_DRIVER)
    host = call("tools/runtime.sh", "host", cwd=repo)
    assert host.stdout == "host\n"
    assert "asked;" in host.stderr
    assert "older than 580" in host.stderr


def test_another_engine_only_if_named(repo: Path, command: Callable, call: Callable) -> None:
    command("docker", NO_DAEMON)
    command("podman", ANSWERS)
    command("nvidia-smi", NO_GPU)
    assert call("tools/runtime.sh", "auto", cwd=repo).stdout == "host\n"
    assert call("tools/runtime.sh", "auto", cwd=repo, ENGINE="podman").stdout == "docker\n"
    missing = call("tools/runtime.sh", "docker", cwd=repo, ENGINE="no-such-engine")
    assert missing.stdout == "RUNTIME=docker: no-such-engine is not installed; or use RUNTIME=host\n"


def test_inside_the_image_make_runs_in_place(repo: Path, command: Callable, call: Callable) -> None:
    command("docker", ANSWERS)
    planned = call("make", "-n", "test", cwd=repo, LMMS_IMAGE_BASE="base")
    assert planned.returncode == 0, planned.stderr
    assert "python -m pytest" in planned.stdout
    assert "image.sh" not in planned.stdout
    assert "setup.sh" not in planned.stdout
    assert "runtime:" not in planned.stderr


@pytest.mark.parametrize("target", ["prep", "train", "inspect", "verify", "expected", "export", "report"])
def test_every_target_has_a_docker_path(repo: Path, command: Callable, call: Callable, target: str) -> None:
    command("docker", ANSWERS)
    command("nvidia-smi", NO_GPU)
    planned = call("make", "-n", target, "RECIPE=qwen3_vl", cwd=repo)
    assert planned.stdout == f"tools/image.sh run make {target}\n"


def test_a_driver_that_hangs_or_fails_is_no_gpu(repo: Path, command: Callable, call: Callable) -> None:
    command("docker", "echo Runtimes: runc")   # without GPU support
    command("timeout", 'shift; exec /usr/bin/timeout 0.5 "$@"')
    command("nvidia-smi", "sleep 600")
    hangs = call("tools/runtime.sh", "auto", cwd=repo)
    assert hangs.stdout == "docker\n"
    assert hangs.stderr.startswith("runtime: nvidia-smi does not answer, so no GPU is used: ")
    command("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    fails = call("tools/runtime.sh", "auto", cwd=repo)
    assert fails.stdout == "docker\n"
    assert fails.stderr.count("\n") == 1
