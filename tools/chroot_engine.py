#!/usr/bin/env python3
"""Stands in for `docker` where no container can start: images are podman's, commands run in a chroot of them.

    tools/chroot_engine.py run --read-only --tmpfs /tmp --user 4321:4321 --volume DATA:/app/data IMAGE COMMAND
    tools/chroot_engine.py compose run --rm train-cpu recipes/qwen3_vl/launch.sh

For `make image-check`, which puts it on PATH as `docker`. It knows the commands and options that the
repository uses and stops at any other. A command gets its own mounts and process ids, the image's
environment, entry point and volumes, the user that was asked for, a root that cannot be written, and no
network but the loopback unless it asks for the host's. There are no limits, and no GPU. Needs root, podman
and unshare; PyYAML for compose.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWITCHES = {"--rm", "--read-only", "--interactive", "--tty"}
# Options with a value that a chroot cannot follow, or need not.
WITHOUT_EFFECT = {"--pull", "--ipc", "--ulimit", "--gpus", "--shm-size", "--stop-timeout"}


@dataclass
class Container:
    """What `docker run` was asked for. env: a name alone is passed on; mounts: (what, where inside)."""

    image: str = ""
    command: list[str] = field(default_factory=list)
    user: str = ""
    env: list[str] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    tmpfs: list[str] = field(default_factory=list)
    entrypoint: list[str] | None = None
    network: str = "none"


def podman(*arguments: str) -> str:
    """What podman prints; its failure ends the program."""
    done = subprocess.run(["podman", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.strip()


def parse_run(words: list[str]) -> Container:
    """The options of `docker run`."""
    asked = Container()
    words = list(words)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in SWITCHES:
            continue
        if not words:
            raise SystemExit(f"chroot engine: {option}: no value")
        value = words.pop(0)
        if option == "--user":
            asked.user = value
        elif option == "--env":
            asked.env.append(value)
        elif option == "--network":
            asked.network = value
        elif option == "--tmpfs":
            asked.tmpfs.append(value.partition(":")[0])
        elif option == "--volume":
            what, where = value.split(":")[:2]
            asked.mounts.append((what, where))
        elif option not in WITHOUT_EFFECT:
            raise SystemExit(f"chroot engine: {option}: not known")
    if not words:
        raise SystemExit("chroot engine: no image")
    asked.image, asked.command = words[0], words[1:]
    return asked


def fill(text: str, values: dict[str, str]) -> str:
    """Compose's `${NAME:-default}`."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: values.get(match[1]) or match[2], text)


def parse_compose(words: list[str], folder: Path) -> Container:
    """`docker compose run [--rm] SERVICE [COMMAND ...]` and `up SERVICE`, from compose.yaml in `folder`."""
    import yaml

    values = dict(os.environ)
    if (folder / ".env").is_file():
        lines = (line for line in (folder / ".env").read_text().splitlines() if not line.startswith("#"))
        values = {**dict(line.split("=", 1) for line in lines if "=" in line), **values}
    services = yaml.safe_load(fill((folder / "compose.yaml").read_text(), values))["services"]
    verb, *rest = [word for word in words if word not in SWITCHES]
    if verb not in ("run", "up") or not rest or rest[0] not in services:
        raise SystemExit(
            f"chroot engine: compose {shlex.join(words)}: not known (services: {', '.join(services)})"
        )
    service = services[rest[0]]
    asked = Container(
        image=service["image"], user=service["user"], tmpfs=[t.partition(":")[0] for t in service["tmpfs"]]
    )
    asked.command = rest[1:] or shlex.split(service["command"])
    asked.entrypoint = service.get("entrypoint")
    asked.env = [f"{name}={values[name]}" for name in service["environment"] if name in values]
    for volume in service["volumes"]:
        what, where = volume.split(":")[:2]
        named = not what.startswith((".", "/"))
        asked.mounts.append(("" if named else str((folder / what).resolve()), where))
    return asked


def run(asked: Container) -> int:
    """Runs it in a chroot of the image; the exit code is the command's."""
    config = json.loads(podman("image", "inspect", asked.image))[0]["Config"]
    env = dict(entry.split("=", 1) for entry in config["Env"])
    for entry in asked.env:
        name, given, value = entry.partition("=")
        env[name] = value if given else os.environ[name]
    mounted = {where for _, where in asked.mounts}
    volumes = [("", where) for where in config.get("Volumes") or {} if where not in mounted]
    root = podman("image", "mount", asked.image)
    program = [*(asked.entrypoint or config["Entrypoint"]), *(asked.command or config["Cmd"])]
    try:
        with tempfile.TemporaryDirectory(prefix="chroot-engine-") as scratch:
            script = mounts_script(root, Path(scratch), [*asked.mounts, *volumes], asked.tmpfs)
            user = asked.user or config["User"]
            enter = [
                "chroot",
                f"--userspec={user}",
                "--groups=",
                root,
                "/usr/bin/env",
                "-i",
                f"--chdir={config['WorkingDir']}",
            ]
            enter += [f"{name}={value}" for name, value in env.items()]
            script += f"exec {shlex.join([*enter, *program])}\n"
            spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc"]
            if asked.network != "host":
                spaces.append("--net")
                script = f"ip link set lo up\n{script}"
            return subprocess.run([*spaces, "bash", "-euc", script]).returncode
    finally:
        podman("image", "unmount", asked.image)


def mounts_script(root: str, scratch: Path, mounts: list[tuple[str, str]], tmpfs: list[str]) -> str:
    """Shell lines that lay out the container's file system, outer mounts first."""
    lines = ["mount --make-rprivate /", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    lines += [f"mount -t tmpfs -o mode=1777 shm {root}/dev/shm"]
    (scratch / "hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
    lines.append(f"mount --bind {scratch}/hosts {root}/etc/hosts")
    places = [(where, what, False) for what, where in mounts] + [(where, "", True) for where in tmpfs]
    for number, (where, what, in_memory) in enumerate(sorted(places)):
        at = shlex.quote(root + where)
        lines.append(f"mkdir -p {at}")  # inside a mounted folder; in the image itself it is there
        if in_memory:
            lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {at}")
            continue
        if not what:  # a volume that nothing was mounted for
            volume = scratch / str(number)
            volume.mkdir()
            volume.chmod(0o1777)
            what = str(volume)
        lines.append(f"mount --bind {shlex.quote(what)} {at}")
    return "\n".join(lines) + "\n"


def build(words: list[str]) -> int:
    """`docker build` by podman, with the Dockerfile's system packages at the versions of the base at hand."""
    named = re.search(r'^ARG SYSTEM_PACKAGES="([^"]*)"', Path("Dockerfile").read_text(), re.MULTILINE)[1]
    packages = " ".join(package.partition("=")[0] for package in named.split())
    options = ["--isolation", "chroot", "--network", "host", "--format", "docker"]
    options += ["--build-arg", f"SYSTEM_PACKAGES={packages}"]
    return subprocess.run(["podman", "build", *options, *words]).returncode


def main(words: list[str]) -> int:
    """One command of docker."""
    match words:
        case ["info", "--format", _]:
            print(podman("info", "--format", "{{.Store.GraphRoot}}"))
        case ["info"]:
            print("Server: chroot engine")
        case ["build", *rest]:
            return build(rest)
        case ["run", *rest]:
            return run(parse_run(rest))
        case ["compose", *rest]:
            return run(parse_compose(rest, Path.cwd()))
        case ["image", "inspect", *_] | ["tag", *_] | ["save", *_]:
            return subprocess.run(["podman", *words]).returncode
        case _:
            raise SystemExit(f"chroot engine: {shlex.join(words)}: not known")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
