"""tools/image.sh: when the image is built, how it is started, and what goes wrong in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

NAMES = ["Dockerfile", "requirements.lock", "requirements-flash-attn.lock"]
NAMES += ["tools/image.sh", "tools/runtime.sh", "tools/flash_attn.sh"]

# An engine that keeps a list of its images and a log of what it was asked.
ENGINE = """
printf '%s\\n' "$*" >>"$LOG"
case "$1 $2" in
    "info --format") printf '%s\\n' "${GRAPH_ROOT:-/nowhere}" ;;
    "info "*) echo "Runtimes: nvidia" ;;
    "image inspect") [[ ${!#} == lmms-engine:* && -e $LOG.${!##lmms-engine:} ]] && echo sha256:0123 ;;
    "build "*) [[ -z ${FAILS:-} ]] || { echo "$FAILS" >&2; exit 1; }
        while [[ $1 != -t ]]; do shift; done; touch "$LOG.${2#lmms-engine:}" ;;
    "push "*) [[ -z ${FAILS:-} ]] ;;
    "tag "*) ;;
    "run "*) ;;
    *) exit 64 ;;
esac
"""


@pytest.fixture
def checkout(repo: Path, tmp_path: Path) -> Path:
    """What the script reads, where the files can be changed."""
    folder = tmp_path / "checkout"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repo / name, folder / name)
    return folder


@pytest.fixture
def image(checkout: Path, tmp_path: Path, command: Callable, call: Callable) -> Callable:
    """`image(*words, **env)` runs the script with the stand-in engine; `image.log()`: what that was asked."""
    command("docker", ENGINE)
    command("nvidia-smi", "exit 9")
    log = tmp_path / "log"

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        log.write_text("")
        env = {"HOME": str(tmp_path / "home"), "LOG": str(log), **env}
        return call("tools/image.sh", *words, cwd=checkout, **env)

    run.log = log.read_text
    return run


def test_tag_changes_with_the_lock_and_the_dockerfile_only(checkout: Path, image: Callable) -> None:
    before = image("tag").stdout.strip()
    assert re.fullmatch(r"lmms-engine:[0-9a-f]{10}-[0-9a-f]{10}", before)
    (checkout / "lmms_engine").mkdir()
    (checkout / "lmms_engine/new.py").write_text("")
    assert image("tag").stdout.strip() == before
    flash = image("tag", FLASH_ATTN="1").stdout.strip()
    assert flash.startswith(f"{before}-fa")
    assert image("tag", FLASH_ATTN="1", TORCH_CUDA_ARCH_LIST="9.0").stdout.strip() != flash
    assert image("tag", TORCH_CUDA_ARCH_LIST="9.0").stdout.strip() == before
    tags = {before, flash, image("tag", BASE_IMAGE="other@sha256:1").stdout.strip()}
    for name in ("requirements.lock", "Dockerfile"):
        (checkout / name).write_text((checkout / name).read_text() + "# changed\n")
        tags.add(image("tag").stdout.strip())
    assert len(tags) == 5


def test_built_once_and_again_after_a_change(checkout: Path, image: Callable) -> None:
    first = image("build", FLASH_ATTN="1", MAX_JOBS="3", BUILD_OPTIONS="--network host")
    assert first.returncode == 0, first.stderr
    (asked,) = [line for line in image.log().splitlines() if line.startswith("build ")]
    for words in ("--target runtime", "FLASH_ATTN=1", "MAX_JOBS=3", "--network host", "GIT_COMMIT= "):
        assert words in asked
    image("build", FLASH_ATTN="1")
    assert "\nbuild " not in image.log()
    (checkout / "Dockerfile").write_text((checkout / "Dockerfile").read_text() + "# changed\n")
    image("build", FLASH_ATTN="1")
    assert "\nbuild " in image.log()


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("dial tcp: lookup registry.example: no such host", "no network: the first build fetches"),
        ("error: client error: dns error: failed to lookup address", "no network: the first build fetches"),
        ("write /layer.tar: no space left on device", "the disk is full: make room, as in: docker sys"),
        ("lookup registry.example on 10.0.0.1:53: server misbehaving", "no network: the first build fetches"),
        ("toomanyrequests: You have reached your pull rate limit", "or to log in: docker login"),
        ("#8 2.1 E: Version '4:13.2.0-*' for 'g++' was not found", "renew SYSTEM_PACKAGES in the Dockerfile"),
        ("exit code: 1", "the build failed: see above"),
        ("BuildKit is enabled but the buildx component is missing", "install the package docker-buildx"),
        ("no unqualified-search registries are defined", "set unqualified-search-registries in"),
    ],
)
def test_a_failed_build_says_what_to_do(image: Callable, fails: str, said: str) -> None:
    failed = image("build", FAILS=fails)
    assert failed.returncode == 2
    assert said in failed.stderr.strip().splitlines()[-1]


def test_a_disk_nearly_full_stops_the_build(image: Callable, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk is made by root")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        stopped = image("build", GRAPH_ROOT=str(small))
    finally:
        subprocess.run(["umount", small], check=True)
    assert stopped.returncode == 2
    assert stopped.stderr == (
        f"image: 0 GB are free where docker keeps its images ({small}), the build needs 40: "
        "make room, as in: docker system prune\n"
    )
    assert "build " not in image.log()


def test_no_daemon_stops_the_build(image: Callable, command: Callable) -> None:
    command("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    stopped = image("build")
    assert stopped.returncode == 2
    assert stopped.stderr == (
        "image: no docker daemon answers: start it, as in: sudo systemctl start docker\n"
    )


def test_run_as_this_user_with_what_a_job_needs(checkout: Path, image: Callable, tmp_path: Path) -> None:
    (checkout / "data").symlink_to(tmp_path)
    env = {"RECIPE": "qwen3_vl", "ARGS": "a=1 b=[2]", "HF_TOKEN": "secret"}
    done = image("run", "make", "train", **env, RUN_OPTIONS="--volume /x:/x", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 0, done.stderr
    asked = image.log().splitlines()[-1]
    wanted = [
        "run --rm --pull never --read-only --tmpfs /tmp:exec",
        f"--user {os.getuid()}:{os.getgid()}",
        f"--volume {checkout}:/app ",
        "--tmpfs /app/.venv",
        f"--volume {checkout}/.cache/image:/cache --volume {tmp_path}/hub:/cache/huggingface",
        f"--volume {tmp_path}:{tmp_path}",
        "--env LMMS_IMAGE_DIGEST=sha256:0123",
        "--env RECIPE --env ARGS --env HF_TOKEN",
        "--volume /x:/x",
    ]
    for words in wanted:
        assert words in asked
    assert asked.endswith(f"{image('tag').stdout.strip()} make train")
    assert "secret" not in asked
    assert "--gpus" not in asked
    assert "--stop-timeout 300" in asked
    assert "--ulimit memlock=-1" in asked


def test_folders_are_made_by_this_user(checkout: Path, image: Callable, tmp_path: Path) -> None:
    assert image("run", "true", HF_HOME=str(tmp_path / "hub")).returncode == 0
    assert all((checkout / name).is_dir() for name in ("data", "runs", ".cache/image", ".venv"))
    (checkout / "data").rmdir()
    (checkout / "data").symlink_to("nowhere")
    stopped = image("run", "true", HF_HOME=str(tmp_path / "hub"))
    assert stopped.returncode == 2
    assert stopped.stderr.startswith(f"image: {checkout}/data cannot be made: ")


def test_the_local_name_follows_what_was_asked_for(image: Callable) -> None:
    flash = image("tag", FLASH_ATTN="1").stdout.strip()
    image("build", FLASH_ATTN="1")
    image("build")
    image("build", FLASH_ATTN="1")   # is there already
    assert "\nbuild " not in image.log()
    assert f"tag {flash} lmms-engine:local\n" in image.log()


def test_run_with_gpus_and_nodes(image: Callable, command: Callable) -> None:
    command("nvidia-smi", "echo 580.1")
    image("run", "true", NNODES="2")
    asked = image.log().splitlines()[-1]
    assert "--gpus all" in asked
    assert "--network host" in asked


def test_podman_without_root_raises_no_limits(image: Callable, command: Callable, tmp_path: Path) -> None:
    command("podman", ENGINE)
    hub = str(tmp_path / "hub")
    command("id", "echo 0")
    image("run", "true", ENGINE="podman", HF_HOME=hub)
    assert "--ulimit" in image.log().splitlines()[-1]
    command("id", "echo 1000")
    image("run", "true", ENGINE="podman", HF_HOME=hub)
    asked = image.log().splitlines()[-1]
    assert "--userns keep-id" in asked
    assert "--ulimit" not in asked


def test_a_driver_that_hangs_is_not_waited_for(image: Callable, command: Callable, tmp_path: Path) -> None:
    command("nvidia-smi", "sleep 600")
    command("timeout", 'shift; exec /usr/bin/timeout 0.5 "$@"')
    done = image("run", "true", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 0
    assert "--gpus" not in image.log().splitlines()[-1]


def test_a_home_that_cannot_be_written(image: Callable, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file: nothing can be made below, not even by root")
    stopped = image("run", "true")
    assert stopped.returncode == 2
    assert "your home is read-only? Name a folder that can be written: HF_HOME=/path make" in stopped.stderr
    assert image("run", "true", HF_HOME=str(tmp_path / "hub")).returncode == 0


def test_push(image: Callable) -> None:
    name = image("tag").stdout.strip()
    pushed = image("build", PUSH="registry.example:5000/team/engine")
    assert pushed.returncode == 0, pushed.stderr
    version = name.partition(":")[2]
    assert image.log().endswith(f"push registry.example:5000/team/engine:{version}\n")
    image("push", "registry.example/engine:mine")
    assert image.log().endswith("push registry.example/engine:mine\n")
    failed = image("push", "registry.example/engine", FAILS="1")
    assert failed.returncode == 2
    assert "log in first (docker login)" in failed.stderr
