"""manifest.json says where a run came from, and keeps no secrets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from lmms_engine.errors import UserError
from lmms_engine.train.manifest import (
    IMAGE_KEYS,
    ROOT,
    build_manifest,
    file_hashes,
    git_state,
    weights_fingerprint,
    write_manifest,
)


def _manifest(**changes) -> dict:
    mesh = SimpleNamespace(
        device=torch.device("cpu"), world_size=2, dp_size=2, sp_size=1, ep_size=1, shard_size=2,
        gather=lambda value: [value, value],
    )  # fmt: skip
    given = {
        "mesh": mesh, "config_yaml": "a: 1\n", "seed": 3, "plugins": {"my.py": "abc"},
        "data_fingerprint": "d", "processor_fingerprint": "p",
        "weights": None,
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
    assert made["threads"] == torch.get_num_threads()
    assert torch.backends.cpu.get_cpu_capability() in made["cpu"]
    layout = {"nodes": 1, "data_parallel": 2, "sequence": 1, "experts": 1, "shard": 2}
    assert made["layout"] == layout
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
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False, "changes_sha256": None}
    changed = []
    for text in ("2", "3", "2"):
        (tmp_path / "file").write_text(text)
        changed.append(git_state(tmp_path))
    assert changed[0]["dirty"]
    assert changed[0] == changed[2] != changed[1]


def test_it_names_the_files_of_the_command_line(tmp_path, monkeypatch):
    config, zero = tmp_path / "a.yaml", tmp_path / "zero2.json"
    config.write_text("a: 1\n")
    zero.write_text("{}")
    words = ["--config", str(config), f"trainer_args.deepspeed={zero}", "x=1", "no-such-file", str(tmp_path)]
    made = file_hashes(words)
    assert made == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (config, zero)}
    monkeypatch.setattr("sys.argv", ["cli.py", f"config_yaml={config}"])
    assert list(_manifest()["config_files"]) == [str(config)]


def test_it_names_the_image(monkeypatch):
    for key in IMAGE_KEYS:
        monkeypatch.delenv(f"LMMS_IMAGE_{key.upper()}", raising=False)
    monkeypatch.setattr("lmms_engine.train.manifest.CONTAINER_MARKS", ())
    assert _manifest()["image"] is None
    monkeypatch.setenv("LMMS_IMAGE_COMMIT", "abc")
    monkeypatch.setenv("LMMS_IMAGE_DIGEST", "sha256:1")
    monkeypatch.setenv("LMMS_IMAGE_LOCK_SHA256", "unknown")   # as a build without make leaves it
    assert _manifest()["image"] == {
        "digest": "sha256:1", "commit": "abc", "lock_sha256": None, "base": None,
    }  # fmt: skip


def test_it_knows_other_weights(tmp_path):
    assert weights_fingerprint(None) is None
    assert weights_fingerprint(str(tmp_path)) is None   # no weights in it
    assert weights_fingerprint(str(tmp_path / "gone")) is None
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    first = weights_fingerprint(str(tmp_path))
    assert first == _manifest(weights=str(tmp_path))["weights_fingerprint"]
    save_file({"a": torch.ones(4)}, file)
    assert weights_fingerprint(str(tmp_path)) != first


def test_a_resumed_run_keeps_its_earlier_manifests(tmp_path):
    for start, seed in ((0, 1), (5, 1), (9, 1)):
        write_manifest(tmp_path, {"seed": seed, "at": start}, resumed_from=start)
    made = json.loads((tmp_path / "manifest.json").read_text())
    assert (made["at"], made["resumed_from"]) == (9, 9)
    assert [(m["at"], m["resumed_from"]) for m in made["history"]] == [(0, None), (5, 5)]
    write_manifest(tmp_path, {"seed": 2, "at": 0}, resumed_from=0)
    assert json.loads((tmp_path / "manifest.json").read_text())["history"] == []


@pytest.mark.parametrize("text", ["", '{"seed": 1', "5", "[]", '{"history": 3}', "\udcff"])
def test_a_damaged_one_is_named_and_left_alone(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_text(text, errors="surrogateescape")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(.+\): .*move it aside"):
        write_manifest(tmp_path, {"seed": 1}, resumed_from=3)
    assert path.read_bytes() == before
    path.unlink()   # as the message says
    write_manifest(tmp_path, {"seed": 1}, resumed_from=3)
    assert json.loads(path.read_text())["resumed_from"] == 3
