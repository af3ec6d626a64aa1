"""compose.yaml, .env.example and the Dockerfile: valid, and naming only what is there."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SERVICES = {"train", "train-cpu", "prep", "test", "shell", "tensorboard"}
HERE = Path(sys.executable).parent
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@pytest.fixture(scope="module")
def text(repo: Path) -> str:
    return (repo / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def services(text: str) -> dict[str, Any]:
    """The services with every variable at its default."""
    return yaml.safe_load(VARIABLE.sub(lambda match: match[2], text))["services"]


def schema_check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [HERE / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_published_schema_holds(repo: Path, tmp_path: Path, text: str) -> None:
    checked = schema_check(repo / "compose.yaml")
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text.replace("read_only: true", "readonly: true"))
    assert schema_check(wrong).returncode != 0


@pytest.mark.parametrize("tool", [["docker", "compose"], ["podman-compose"]], ids=lambda tool: tool[0])
def test_a_compose_program_reads_it(repo: Path, tool: list[str]) -> None:
    for words in (["version"], ["config", "--help"]):   # old ones know no `config`
        if not shutil.which(tool[0]) or subprocess.run([*tool, *words], capture_output=True).returncode:
            pytest.skip(f"no {' '.join(tool)} that knows `config`")
    command = [*tool, "-f", repo / "compose.yaml", "config"]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert set(yaml.safe_load(read.stdout)["services"]) == SERVICES


def words_of(service: dict[str, Any]) -> list[str]:
    """What the service starts after the entry point of the image."""
    entry = service.get("entrypoint", ["/usr/bin/tini", "--", "/app/tools/entrypoint.sh"])
    assert entry[:3] == ["/usr/bin/tini", "--", "/app/tools/entrypoint.sh"]
    return [*entry[3:], *shlex.split(service["command"])]


def test_every_command_exists(repo: Path, services: dict[str, Any]) -> None:
    assert set(services) == SERVICES
    assert (repo / "tools/entrypoint.sh").stat().st_mode & 0o111
    targets = set(re.findall(r"^([a-z][a-z-]*):", (repo / "Makefile").read_text(), re.MULTILINE))
    for name, service in services.items():
        program, *rest = words_of(service)
        if program == "make":
            assert set(rest) <= targets, name
        elif program == "python":
            assert rest[0] == "-m"
            assert importlib.util.find_spec(rest[1]), name
        else:
            assert program == "bash" or (HERE / program).is_file(), name


def test_services_run_as_the_user_with_a_root_that_cannot_be_written(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["user"] == "1000:1000", name
        assert service["read_only"] is True, name
        assert service["stop_grace_period"] == "5m", name   # the engine's ten seconds save no checkpoint
        assert ".:/app" in service["volumes"], name
        assert "/app/.venv" in service["tmpfs"], name   # a host's environment must not be taken
        assert "HF_TOKEN" in service["environment"], name
        assert service["ulimits"] == {"memlock": -1, "stack": 67108864}, name
    gpu = services["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert services["train"]["ipc"] == "host"
    assert [name for name, service in services.items() if "deploy" in service] == ["train"]
    assert all(port.startswith("127.0.0.1:") for port in services["tensorboard"]["ports"])


def test_the_example_lists_every_setting_with_its_default(
    repo: Path, text: str, services: dict[str, Any]
) -> None:
    lines = (repo / ".env.example").read_text().splitlines()
    assert all(not line or line.startswith("#") for line in lines), "a copy changes nothing"
    listed = dict(re.findall(r"^#([A-Z_]+)=(\S*)$", "\n".join(lines), re.MULTILINE))
    used = dict(VARIABLE.findall(text))
    passed = set(services["train"]["environment"])
    assert set(used) <= set(listed)
    assert {name: listed[name] for name in used} == used
    assert set(listed) <= set(used) | passed


def test_the_base_is_pinned_and_the_image_is_not_root(repo: Path) -> None:
    text = (repo / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.+)$", text, re.MULTILINE)
    assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base)
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert len(stages) == len(re.findall("^FROM ", text, re.MULTILINE))
    assert {"runtime", "test"} <= {name for _, name in stages}
    assert {source for source, _ in stages} <= {"${BASE_IMAGE}", *(name for _, name in stages)}
    assert "--build-constraints requirements.lock --require-hashes -r requirements.lock" in text
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["1000:1000"]
    assert "HEALTHCHECK" not in text
    # An engine lays volumes of its own over a mounted checkout.
    assert re.findall(r"^VOLUME (.+)$", text, re.MULTILINE) == ['["/cache"]']
    # The engine comes after the environment, so that an edit rebuilds only what is cheap.
    assert text.index("requirements.lock") < text.index("COPY lmms_engine") < text.index("GIT_COMMIT")


def test_every_copied_file_is_sent_to_the_builder(repo: Path) -> None:
    sent = re.findall(r"^!(\S+)$", (repo / ".dockerignore").read_text(), re.MULTILINE)
    assert all((repo / name).exists() for name in sent)
    for line in re.findall(r"^COPY (.+)$", (repo / "Dockerfile").read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert source == "." or (repo / source).exists(), source
            assert source.split("/")[0] in {*sent, "."}, source
    assert not {"data", "runs", ".venv", ".git", ".cache", ".env"} & set(sent)


def test_hadolint(repo: Path, tmp_path: Path) -> None:
    tool = HERE / "hadolint"
    checked = subprocess.run([tool, repo / "Dockerfile"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd / && sudo ls\n")
    assert subprocess.run([tool, wrong], capture_output=True, check=False).returncode != 0
