"""manifest.json says where a run came from, and keeps no secrets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from types import SimpleNamespace

import torch

from lmms_engine.train.manifest import ROOT, build_manifest, git_state, write_manifest


def _manifest(**changes) -> dict:
    mesh = SimpleNamespace(
        device=torch.device("cpu"), world_size=2, dp_size=2, gather=lambda value: [value, value]
    )
    given = {
        "mesh": mesh, "config_yaml": "a: 1\n", "seed": 3, "plugins": {"my.py": "abc"},
        "data_fingerprint": "d", "processor_fingerprint": "p",
    }  # fmt: skip
    return build_manifest(**{**given, **changes})


def test_it_names_code_machine_data_and_settings(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    made = _manifest()
    assert made["seed"] == 3
    assert made["plugins"] == {"my.py": "abc"}
    assert (made["data_fingerprint"], made["processor_fingerprint"]) == ("d", "p")
    assert made["config_sha256"] == hashlib.sha256(b"a: 1\n").hexdigest()
    assert made["lock_sha256"] == hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    assert made["packages"]["torch"] == torch.__version__.split("+")[0]
    assert len(made["devices"]) == made["world_size"] == 2
    assert made["command"]
    assert made["environment"]["variables"]["OMP_NUM_THREADS"] == "3"
    assert "secret-value" not in json.dumps(made)


def test_git_state_sees_commit_and_changes(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        who = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        done = subprocess.run(["git", "-C", tmp_path, *arguments], capture_output=True, text=True, check=True,
                              env={**os.environ, **who})  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"]


def test_a_resumed_run_keeps_its_earlier_manifests(tmp_path):
    for start, seed in ((0, 1), (5, 1), (9, 1)):
        write_manifest(tmp_path, {"seed": seed, "at": start}, resumed_from=start)
    made = json.loads((tmp_path / "manifest.json").read_text())
    assert (made["at"], made["resumed_from"]) == (9, 9)
    assert [(m["at"], m["resumed_from"]) for m in made["history"]] == [(0, None), (5, 5)]
    write_manifest(tmp_path, {"seed": 2, "at": 0}, resumed_from=0)
    assert json.loads((tmp_path / "manifest.json").read_text())["history"] == []
