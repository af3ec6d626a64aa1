"""requirements.lock holds every dependency of pyproject.toml, pinned and hashed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def locked(repo: Path) -> dict[str, str]:
    """Package -> its block in the lock."""
    blocks: dict[str, str] = {}
    name = ""
    for line in (repo / "requirements.lock").read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = normal(match[1])
        elif line and not line.startswith((" ", "#")):
            pytest.fail(f"requirements.lock: cannot read '{line}'")
        blocks[name] = blocks.get(name, "") + line + "\n"
    return blocks


def declared(repo: Path) -> list[str]:
    """Every requirement of the project and of its extras."""
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    return [*project["dependencies"], *(r for r in extras if not r.startswith("lmms-engine["))]


def test_every_dependency_is_locked(repo: Path, locked: dict[str, str]) -> None:
    for requirement in declared(repo):
        name, version = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:==([^;\s]+))?", requirement).groups()
        assert normal(name) in locked, f"{requirement}: not in requirements.lock"
        if version:
            assert re.search(rf"=={re.escape(version)}( |$)", locked[normal(name)].splitlines()[0]), (
                requirement
            )


def test_every_package_is_hashed(locked: dict[str, str]) -> None:
    assert len(locked) > 100
    for name, block in locked.items():
        assert "--hash=sha256:" in block, name


def test_flash_attn_is_in_no_extra(repo: Path, locked: dict[str, str]) -> None:
    assert "flash-attn" not in locked
    assert not [requirement for requirement in declared(repo) if normal(requirement).startswith("flash-attn")]


def test_all_holds_every_extra(repo: Path) -> None:
    extras = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.match(r"lmms-engine\[(.*)\]", extras["all"][0])[1].split(","))
    assert named == set(extras) - {"all"} == {"deepspeed", "fla", "wandb", "cloud", "scale", "dev"}


def test_flash_attn_4_brings_only_what_the_lock_lacks(repo: Path, locked: dict[str, str]) -> None:
    text = (repo / "requirements-flash-attn-4.lock").read_text()
    names = {normal(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, flags=re.MULTILINE)}
    assert "flash-attn-4" in names
    assert not names & locked.keys()
    assert text.count("--hash=sha256:") >= len(names)
