"""tools/flash_attn.sh: what its build is given, and what it refuses; the lock of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

# Notes what it was asked and in what surroundings; makes nothing.
PYTHON = """
printf '%s\\n' "$*" >>"$LOG"
echo "archs=$FLASH_ATTN_CUDA_ARCHS force=$FLASH_ATTENTION_FORCE_BUILD jobs=${MAX_JOBS-unset}" >>"$LOG"
for word; do if [[ $word == *.lock ]]; then grep -o '^[a-z-]*==[^ ]*' "$word" >>"$LOG"; fi; done
"""


@pytest.fixture
def build(repo: Path, tmp_path: Path, command: Callable, call: Callable) -> Callable:
    """`build(*words, **env)` with a compiler that only tells its version, and what python was asked."""
    command("python", PYTHON)
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    log = tmp_path / "log"

    def run(*words: str, **env: str):
        log.write_text("")
        given = {"CUDA_HOME": str(tmp_path / "cuda"), "LOG": str(log), **env}
        return call("tools/flash_attn.sh", *words, cwd=repo, **given), log.read_text()

    return run


def test_the_wheel_is_compiled_from_the_locked_source(build: Callable, tmp_path: Path) -> None:
    done, asked = build("wheel", str(tmp_path / "wheels"), TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0", MAX_JOBS="3")
    assert done.returncode == 0, done.stderr
    assert "flash-attn: wheel for 80;90;100 with nvcc 13.0" in done.stderr
    tools, surroundings, _, wheel, surroundings, package = asked.splitlines()
    assert tools.startswith("-m pip install -q --require-hashes --no-deps")
    assert wheel.startswith("-m pip wheel -q --require-hashes --no-deps --no-build-isolation")
    assert surroundings == "archs=80;90;100 force=TRUE jobs=3"
    assert package.startswith("flash-attn==")
    assert "archs=80;90 force=TRUE jobs=unset" in build("wheel", str(tmp_path / "wheels"), MAX_JOBS="")[1]


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["wheel", "OUT"], {"TORCH_CUDA_ARCH_LIST": "8.6"}, "has kernels for 8.0, 9.0, 10.0 and 12.0"),
        (["wheel", "OUT"], {"CUDA_HOME": "/nowhere"}, "no nvcc in /nowhere/bin: build on a CUDA devel base"),
        (["wheel"], {}, "usage: "),
        (["both", "OUT"], {}, "usage: "),
    ],
)
def test_refused(build: Callable, tmp_path: Path, words: list[str], env: dict[str, str], said: str) -> None:
    done, asked = build(*(word.replace("OUT", str(tmp_path / "out")) for word in words), **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert asked == ""


def test_the_lock_holds_the_package_and_its_build_tool(repo: Path) -> None:
    text = (repo / "requirements-flash-attn.lock").read_text()
    assert set(re.findall(r"^([a-z-]+)==", text, re.MULTILINE)) == {"flash-attn", "wheel"}
    for block in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block
