"""tools/entrypoint.sh: says what it runs and becomes it; what cannot be written is one line with a remedy."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

USER = 4321
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def app(repo: Path) -> Iterator[Path]:
    """A working folder as in the image, which every user may enter; data, runs and cache are the user's."""
    folder = Path(tempfile.mkdtemp(prefix="entrypoint-"))
    folder.chmod(0o755)
    shutil.copy(repo / "tools/entrypoint.sh", folder / "entrypoint.sh")
    for name in ("data", "runs", "cache", "home", "bin", "recipes/mine"):
        (folder / name).mkdir(parents=True)
    launcher = folder / "recipes/mine/launch.sh"
    launcher.write_text('#!/bin/bash\necho "trained $*"\n')
    launcher.chmod(0o755)
    (folder / "entrypoint.sh").chmod(0o755)
    if os.geteuid() == 0:
        for name in ("data", "runs", "cache", "home"):
            os.chown(folder / name, USER, USER)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(app: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Starts the entry point as another user; `mounts`: shell lines that change its file system first."""

    def run(*words: str, mounts: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        given = {
            "PATH": f"{app}/bin:{os.environ['PATH']}",
            "HOME": f"{app}/home",
            "XDG_CACHE_HOME": f"{app}/cache",
            "HF_HOME": f"{app}/cache/huggingface",
            "LMMS_IMAGE_COMMIT": "abc",
            "LMMS_IMAGE_LOCK_SHA256": "0123456789abcdef",
        }
        command = [str(app / "entrypoint.sh"), *words]
        if os.geteuid() == 0:
            command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]
        if mounts:
            command = ["unshare", "--mount", "bash", "-euc", f'{mounts}\nexec "$@"', "bash", *command]
        return subprocess.run(
            command, cwd=app, env={**given, **env}, capture_output=True, text=True, check=False
        )

    return run


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


NEEDS_MOUNTS = pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="nothing can be mounted here")


def test_says_what_it_runs_and_becomes_it(start: Callable) -> None:
    done = start("recipes/mine/launch.sh", "a=1", "b c")
    uid = USER if os.geteuid() == 0 else os.getuid()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained a=1 b c\n"
    said = f"image: commit abc, lock 0123456789ab, uid {uid}; running: recipes/mine/launch.sh a=1 b\\ c"
    assert done.stderr.strip().splitlines()[-1] == said
    assert start("bash", "-c", "exit 7").returncode == 7


@NEEDS_ROOT
@pytest.mark.parametrize("folder", ["data", "runs"])
@pytest.mark.parametrize(
    ("owner", "remedy"),
    [
        (0, f"on the host: sudo chown -R {USER} FOLDER"),
        (1234, "start as its owner (--user 1234; compose: RUN_UID=1234 in .env), or on the host: sudo "),
    ],
)
@pytest.mark.parametrize("words", [["recipes/mine/launch.sh"], ["make", "train"], ["torchrun", "-m", "x"],
                                   ["bash", "-c", 'exec recipes/"$RECIPE"/launch.sh "$@"', "launch", "a=1"]])
def test_a_volume_of_another_user(
    app: Path, start: Callable, folder: str, owner: int, remedy: str, words: list[str]
) -> None:
    os.chown(app / folder, owner, owner)
    stopped = start(*words)
    assert stopped.returncode == 2
    assert stopped.stdout == ""
    said = f"image: {app}/{folder} belongs to uid {owner} and is not writable for uid {USER}: "
    assert stopped.stderr.startswith(said + remedy.replace("FOLDER", folder))
    assert stopped.stderr.count("\n") == 1
    assert start("echo", "reads").stdout == "reads\n"   # what writes no run is not stopped


@NEEDS_ROOT
def test_a_link_out_of_the_container(app: Path, start: Callable) -> None:
    (app / "data").rmdir()
    (app / "data").symlink_to("/big/data")
    stopped = start("recipes/mine/launch.sh")
    assert stopped.returncode == 2
    said = f"image: {app}/data is a link to /big/data, which is not in the container: mount that too, "
    assert stopped.stderr == f"{said}--volume /big/data:/big/data\n"


@NEEDS_ROOT
def test_a_missing_folder_is_judged_by_where_it_would_be_made(app: Path, start: Callable) -> None:
    (app / "runs").rmdir()
    assert "not writable for uid" in start("recipes/mine/launch.sh").stderr
    os.chown(app, USER, USER)
    assert start("recipes/mine/launch.sh").returncode == 0


@NEEDS_ROOT
def test_a_home_and_caches_that_cannot_be_written(app: Path, start: Callable) -> None:
    for name in ("home", "cache"):
        os.chown(app / name, 0, 0)
    done = start("bash", "-c", "echo $HOME $TRITON_CACHE_DIR $XDG_CACHE_HOME")
    assert done.stdout == "/tmp /tmp/cache/triton /tmp/cache\n"
    home, cache, hub, last = done.stderr.strip().splitlines()
    assert home == f"image: HOME={app}/home is read-only for uid {USER}; using /tmp in its place"
    assert "compiled kernels are lost" in cache
    assert f"mount a folder of uid {USER} there" in hub
    assert "running: bash" in last


@NEEDS_ROOT
def test_caches_that_an_earlier_user_made(app: Path, start: Callable) -> None:
    (app / "cache").chmod(0o1777)
    for name in ("triton", "huggingface/hub"):
        (app / "cache" / name).mkdir(parents=True)
    os.chown(app / "cache/huggingface", USER, USER)
    caches = {"TRITON_CACHE_DIR": f"{app}/cache/triton", "MPLCONFIGDIR": f"{app}/cache/matplotlib"}
    done = start("bash", "-c", "echo $TRITON_CACHE_DIR $MPLCONFIGDIR $XDG_CACHE_HOME", **caches)
    assert done.stdout == f"/tmp/cache/triton {app}/cache/matplotlib {app}/cache\n"
    triton, hub, _ = done.stderr.strip().splitlines()
    assert f"{app}/cache/triton is not writable for uid {USER}" in triton
    assert f"sudo chown -R {USER} triton" in triton
    assert f"mount a folder of uid {USER} there" in hub


@NEEDS_MOUNTS
def test_nowhere_to_write_temporary_files(start: Callable, app: Path) -> None:
    lines = [
        "mount -t tmpfs tmpfs /mnt && mkdir /mnt/app",
        f"mount --bind {app} /mnt/app && cd /mnt/app",
        "mount -t tmpfs -o mode=755 tmpfs /tmp",
        'set -- "${@:1:4}" /mnt/app/entrypoint.sh true',   # after setpriv and its options
    ]
    stopped = start("true", mounts="\n".join(lines))
    assert stopped.returncode == 2
    assert "nothing can be written to /tmp: start with --tmpfs /tmp:exec" in stopped.stderr


@NEEDS_MOUNTS
@pytest.mark.parametrize("mode", ["755", "1777"])
def test_a_read_only_mount(app: Path, start: Callable, mode: str) -> None:
    (app / "runs").chmod(int(mode, 8))
    owner = USER if mode == "755" else 0
    os.chown(app / "runs", owner, owner)
    read_only = f"mount --bind {app}/runs {app}/runs; mount -o remount,bind,ro {app}/runs"
    stopped = start("recipes/mine/launch.sh", mounts=read_only)
    assert stopped.returncode == 2
    said = f"image: {app}/runs is read-only here: mount a folder there that can be written, --volume"
    assert stopped.stderr == f"{said} <folder>:{app}/runs\n"


@NEEDS_MOUNTS
def test_little_disk_and_little_shared_memory(start: Callable, app: Path) -> None:
    small = f"mount -t tmpfs -o size=2m,mode=1777 tmpfs {app}/runs; mount -t tmpfs -o size=64m tmpfs /dev/shm"
    done = start("recipes/mine/launch.sh", mounts=small)
    assert done.returncode == 0
    disk, memory, _ = done.stderr.strip().splitlines()
    assert disk.startswith(f"image: only 2 MB are free for {app}/runs: checkpoints may not fit")
    assert memory.startswith("image: only 64 MB of shared memory: loader workers may die of a bus error")
    assert "--ipc host or --shm-size 8g" in memory


@pytest.mark.parametrize(("version", "old"), [("535.104.05", True), ("580.65.06", False)])
def test_an_old_driver(app: Path, start: Callable, version: str, old: bool) -> None:
    tool = app / "bin/nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {version}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    said = start("recipes/mine/launch.sh").stderr
    assert (f"driver {version} is older than 580, which CUDA 13 needs: update it on the host" in said) is old
