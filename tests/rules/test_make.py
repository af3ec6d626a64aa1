"""The Makefile and the set-up script: help, refusals in one line, and when the environment is made anew."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shipped import RECIPES

TARGETS = ["setup", "prep", "train", "test", "lint", "export", "inspect", "verify"]
TARGETS += ["report", "reproduce", "doctor", "new-recipe", "expected", "help", "build", "shell"]
TARGETS += ["image-check"]


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")
    }
    return subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False)


def test_help_lists_exactly_the_targets(repo: Path) -> None:
    shown = run("make", cwd=repo)
    assert shown.returncode == 0
    assert sorted(
        re.findall(r"^  ([a-z][a-z-]+)  +\S", shown.stdout.split("recipes:")[0], re.MULTILINE)
    ) == sorted(TARGETS)
    assert shown.stdout == run("make", "help", cwd=repo).stdout
    declared = re.search(r"^\.PHONY: (.*)$", (repo / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(declared) == sorted(TARGETS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "RECIPE=: give the name of one recipe: "),
        (["train", "RECIPE=nope"], "RECIPE=nope: give the name of one recipe: "),
        (["train", "RECIPE=../recipes/qwen3_vl"], "give the name of one recipe: "),
        (["test", "RUNTIME=podman"], "RUNTIME=podman: not known (legal: auto, docker, host)"),
        (["setup", "RUNTIME=docker", "ENGINE=nope"], "RUNTIME=docker: nope is not installed; or use RUNTIME"),
    ],
)
def test_refusals_are_one_line(repo: Path, arguments: list[str], said: str) -> None:
    refused = run("make", *arguments, cwd=repo)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert len((refused.stdout + refused.stderr).strip().splitlines()) == 1


@pytest.mark.parametrize("target", ["inspect", "verify"])
def test_a_look_before_the_first_training_makes_the_sample_data(repo: Path, target: str) -> None:
    shown = run("make", "-n", target, "RECIPE=sit", "RUNTIME=host", cwd=repo).stdout
    assert re.search(rf"recipes/sit/prepare\.py --if-missing( >&2)? && lmms-engine {target} ", shown), shown


@pytest.fixture
def copy(repo: Path, tmp_path: Path) -> Path:
    """A copy of what set-up needs, where an environment can come and go."""
    for name in ("tools/setup.sh", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repo / name, tmp_path / name)
    return tmp_path


def fake_python(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("body", ["exit 1", "echo 'No module named venv' >&2; exit 1"])
def test_unusable_python_stops_with_the_remedy(copy: Path, body: str) -> None:
    wrong = fake_python(copy, "python3.10", body)
    stopped = run("tools/setup.sh", cwd=copy, PYTHON=str(wrong))
    assert stopped.returncode != 0
    assert len(stopped.stderr.strip().splitlines()) == 1
    assert "install Python 3.11, 3.12 or 3.13 with its venv module" in stopped.stderr
    assert not (copy / ".venv").exists()


def test_no_python_at_all_stops_with_the_remedy(copy: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "flock", "sha256sum", "cut", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    stopped = run("tools/setup.sh", cwd=copy, PATH=str(tools))
    assert stopped.returncode != 0
    assert "install Python 3.11, 3.12 or 3.13" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def make_environment(copy: Path) -> Path:
    """An environment that set-up takes for its own: a real interpreter and the stamp of this lock."""
    import sys

    log = copy / "calls"
    (copy / ".venv/bin").mkdir(parents=True)
    python = fake_python(copy / ".venv/bin", "python", f'echo "$@" >>{log}\nexec {sys.executable} "$@"')
    shutil.copy(python, copy / ".venv/bin/uv")
    (copy / ".venv/bin/uv").write_text(f'#!/bin/sh\necho uv "$@" >>{log}\n')
    wanted = run(
        "bash", "-c", "sha256sum <requirements.lock; sha256sum <pyproject.toml", cwd=copy
    ).stdout.split()
    version = ".".join(map(str, sys.version_info[:3]))
    (copy / ".venv/stamp").write_text(f"{wanted[0]} {version} {copy}\n{wanted[2]}\n")
    return log


def test_a_current_environment_is_left_alone(copy: Path) -> None:
    log = make_environment(copy)
    done = run("tools/setup.sh", cwd=copy)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "install" not in log.read_text()


def test_a_changed_project_is_installed_again(copy: Path) -> None:
    log = make_environment(copy)
    (copy / "pyproject.toml").write_text((copy / "pyproject.toml").read_text() + "\n# changed\n")
    assert "installing the project again" in run("tools/setup.sh", cwd=copy).stderr
    assert "uv pip install --quiet --no-deps --no-build-isolation -e ." in log.read_text()
    log.unlink()
    assert run("tools/setup.sh", cwd=copy).stderr == ""
    assert "install" not in log.read_text()


def test_a_home_that_cannot_be_written(copy: Path) -> None:
    log = make_environment(copy)
    (copy / ".venv/bin/uv").write_text(f'#!/bin/sh\necho "$XDG_CACHE_HOME" >>{log}\n')
    (copy / "home").write_text("a file: nothing can be made below it, not even by root")
    (copy / "pyproject.toml").write_text((copy / "pyproject.toml").read_text() + "\n# changed\n")
    done = run("tools/setup.sh", cwd=copy, HOME=str(copy / "home"), XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr
    assert f"{copy}/home/.cache cannot be written: packages are cached in .cache here" in done.stderr
    assert f"{copy}/.cache" in log.read_text().splitlines()


@pytest.mark.parametrize("change", ["lock", "version", "moved", "interrupted"])
def test_a_stale_environment_is_made_anew(copy: Path, change: str) -> None:
    make_environment(copy)
    stamp = copy / ".venv/stamp"
    if change == "lock":
        (copy / "requirements.lock").write_text((copy / "requirements.lock").read_text() + "# changed\n")
    elif change == "version":
        stamp.write_text(re.sub(r" 3\.\d+\.\d+ ", " 3.9.0 ", stamp.read_text()))
    elif change == "moved":
        stamp.write_text(stamp.read_text().replace(str(copy), "/elsewhere"))
    else:
        stamp.unlink()
    # An interpreter that passes the check and then cannot make an environment: enough to see the attempt.
    fake_python(
        copy, "python3", 'case "$*" in *ensurepip*) exit 0;; *version_info*) echo 3.11.0;; *) exit 7;; esac'
    )
    assert "making .venv" in run("tools/setup.sh", cwd=copy, PATH=f"{copy}:{os.environ['PATH']}").stderr


def test_new_recipe(repo: Path, tmp_path: Path) -> None:
    shutil.copytree(repo / "tools", tmp_path / "tools")
    shutil.copytree(repo / "recipes/qwen3_vl", tmp_path / "recipes/qwen3_vl")
    made = run("tools/new_recipe.sh", "mine", "qwen3_vl", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    measured = {"expected.json", "certificate.md", "certificate.json"}
    kept = {path.name for path in (tmp_path / "recipes/qwen3_vl").iterdir() if path.is_file()} - measured
    assert {path.name for path in (tmp_path / "recipes/mine").iterdir()} == kept
    for name in kept - {"README.md"}:
        ours, theirs = (tmp_path / "recipes" / recipe / name for recipe in ("mine", "qwen3_vl"))
        assert ours.read_bytes() == theirs.read_bytes()
    for name, source in (
        ("mine", "qwen3_vl"),
        ("other", "nope"),
        ("", "qwen3_vl"),
        ("a/b", "qwen3_vl"),
        ("_x", "qwen3_vl"),
    ):
        refused = run("tools/new_recipe.sh", name, source, cwd=tmp_path)
        assert refused.returncode == 2
        assert len(refused.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "recipes").iterdir()) == ["mine", "qwen3_vl"]


@pytest.mark.parametrize("source", [path.name for path in RECIPES])
def test_the_readme_of_a_new_recipe_has_its_name_and_none_of_the_old_numbers(
    repo: Path, tmp_path: Path, source: str
) -> None:
    shutil.copytree(repo / "tools", tmp_path / "tools")
    shutil.copytree(repo / "recipes" / source, tmp_path / "recipes" / source)
    old = (tmp_path / "recipes" / source / "README.md").read_text()
    assert run("tools/new_recipe.sh", "my.own-1", source, cwd=tmp_path).returncode == 0
    new = (tmp_path / "recipes/my.own-1/README.md").read_text()
    assert new.startswith(f"# my.own-1\n\nMade from `recipes/{source}`:\n")
    assert len(re.findall("RECIPE=my.own-1", new)) >= 6
    assert new.count(source) == 1   # where it was made from
    parts = {"## Machine", "## Data", "## Run", "## Expected numbers", "## Time and cost"}
    assert [line for line in new.splitlines() if line in parts] == [
        line for line in old.splitlines() if line in parts
    ]
    expected = new.partition("## Expected numbers\n")[2]
    assert expected.startswith("\nNothing is recorded of this recipe yet.")
    assert "make expected RECIPE=my.own-1" in expected
    assert "make verify RECIPE=my.own-1" in expected
    assert expected.endswith("\n\n## Time and cost\n\nNot measured yet.\n")
    assert (tmp_path / "recipes" / source / "README.md").read_text() == old
    assert (tmp_path / "recipes" / source / "expected.json").is_file()
