"""tools/chroot_engine.py: what it understands of docker's words; `make image-check` shows the rest."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def engine(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("chroot_engine", repo / "tools/chroot_engine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_run(engine: ModuleType) -> None:
    words = "--rm --read-only --tmpfs /tmp:exec --user 4321:4321 --ipc host --env A=1 --env B --volume /x:/a"
    asked = engine.parse_run([*words.split(), "lmms-engine:local", "make", "train", "--flag"])
    assert (asked.image, asked.command) == ("lmms-engine:local", ["make", "train", "--flag"])
    assert (asked.user, asked.tmpfs, asked.env) == ("4321:4321", ["/tmp"], ["A=1", "B"])
    assert asked.mounts == [("/x", "/a")]
    for wrong in (["--privileged", "x"], ["--user"], ["--rm"]):
        with pytest.raises(SystemExit, match="chroot engine"):
            engine.parse_run(wrong)


def test_every_option_that_the_image_is_started_with_is_known(engine: ModuleType, repo: Path) -> None:
    script = (repo / "tools/image.sh").read_text()
    run = script[script.index("\nrun() {") : script.index("\ncase ")]
    used = set(re.findall(r"[ (](--[a-z-]+)", run)) - {"--device", "--userns"}   # podman's own
    known = engine.SWITCHES | engine.WITHOUT_EFFECT | {"--user", "--env", "--tmpfs", "--volume", "--format"}
    known |= {"--network"}
    assert {"--read-only", "--user", "--gpus", "--pull"} <= used <= known


def test_compose(engine: ModuleType, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compose.yaml").write_text((repo / "compose.yaml").read_text())
    (tmp_path / ".env").write_text("# a comment\nRUN_UID=7\nHF_TOKEN=secret\n")
    monkeypatch.setenv("HF_CACHE", "/hub")
    for name in ("HF_HUB_OFFLINE", "PRESET", "NGPU", "FRESH", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    asked = engine.parse_compose(["run", "--rm", "train-cpu", "recipes/mine/launch.sh", "a=1"], tmp_path)
    assert (asked.image, asked.user) == ("lmms-engine:local", "7:1000")
    assert asked.command == ["recipes/mine/launch.sh", "a=1"]
    assert asked.env == ["HF_TOKEN=secret"]
    assert asked.tmpfs == ["/tmp", "/app/.venv"]
    assert asked.mounts == [(str(tmp_path), "/app"), ("", "/cache"), ("/hub", "/cache/huggingface")]
    assert engine.parse_compose(["run", "prep"], tmp_path).entrypoint[-1] == "data-prep"
    assert engine.parse_compose(["up", "tensorboard"], tmp_path).command[0] == "tensorboard"
    with pytest.raises(SystemExit, match="services: train, train-cpu"):
        engine.parse_compose(["run", "nope"], tmp_path)


def test_mounts_are_laid_out_from_the_outside_in(engine: ModuleType, tmp_path: Path) -> None:
    mounts = [("/b", "/app/data"), ("/a", "/app")]
    script = engine.mounts_script("/root-of-it", tmp_path, mounts, ["/app/.venv"])
    order = [script.index(f"/root-of-it{place}\n") for place in ("/app", "/app/.venv", "/app/data")]
    assert order == sorted(order)
