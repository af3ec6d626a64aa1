"""Every command line of the documentation: what it names exists, and what can be parsed here is parsed.

Verbs and options of our own programs: test_docs.py. A program that no rule knows is an error, so that a new
kind of command cannot slip through.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmms_engine.config import load_job
from lmms_engine.launch import cli
from tests import shipped
from tests.rules.test_docs import PROGRAMS, click_command

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((REPO / "docs").glob("*.md")),
    *shipped.PAGES,
    *sorted((REPO / "benchmarks").glob("*.md")),
]
OURS = ("lmms-engine", "data-prep", ".venv/bin/lmms-engine", ".venv/bin/data-prep")   # test_docs.py
OTHERS = ("git", "cd", "cp", "mkdir", "export", "printf", "uv", "apptainer", "wandb", "tensorboard", "ls")
COMPOSE_WITHOUT_SERVICE = ("build", "config", "down", "ps")
VALUES = {"PRESET": ("smoke", "full", "auto"), "RUNTIME": ("docker", "host", "auto")}


@dataclass(frozen=True)
class Line:
    """One command: `NAME=value` words before it, the program, its arguments."""

    env: dict[str, str]
    program: str
    words: tuple[str, ...]
    page: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join([*self.env, self.program, *self.words])}"


def lines(text: str, page: str = "") -> Iterator[Line]:
    """The commands of the fenced shell blocks, and of code spans that begin like one."""
    blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    rows = [row for block in blocks for row in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    starts = tuple(f"{name} " for name in RULES if name != "make")
    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose)]
    rows += [span for span in spans if span.startswith(starts) or "/launch.sh " in span.partition(" [")[0]]
    for row in rows:
        for part in split(row):
            env = {}
            while part and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", part[0]):
                name, _, env[name] = part.pop(0).partition("=")
            if part:
                yield Line(env, part[0], tuple(part[1:]), page)


def split(row: str) -> Iterator[list[str]]:
    """The words of each command of a shell line; redirections are left in."""
    lexer = shlex.shlex(row, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    part: list[str] = []
    for word in lexer:
        if word in ("&&", "||", ";", "|", "&"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


# What each program's words must be


def real(path: str) -> Path:
    """A path of the documentation; a recipe of the reader's own stands for a copy of qwen3_vl."""
    return REPO / re.sub(r"^recipes/mine\b", "recipes/qwen3_vl", path)


def check_file(path: str) -> None:
    assert real(path).is_file(), f"there is no {path}"


def check_launcher(path: str, env: dict[str, str], words: tuple[str, ...]) -> None:
    """A launcher, the variables that it reads, and overrides that the recipe's config takes."""
    match = re.fullmatch(r"(?:/app/)?(recipes/[\w-]+)/launch\.sh", path)
    assert match, f"{path} is no launcher"
    recipe = real(match[1])
    check_file(f"{recipe.relative_to(REPO)}/launch.sh")
    text = (recipe / "launch.sh").read_text()
    for name, value in env.items():
        assert re.search(rf"\b{name}\b", text), f"launch.sh reads no {name}"
        assert value in VALUES.get(name, (value,)), f"{name}={value}"
    load_job([recipe / "config.yaml"], overrides(words))


def overrides(words: tuple[str, ...]) -> list[str]:
    kept = [word for word in words if not word.startswith("[key=value")]
    assert all("=" in word for word in kept), f"no overrides: {words}"
    return kept


def launcher(line: Line) -> None:
    check_launcher(line.program, line.env, line.words)


def docker(line: Line) -> None:
    words = list(line.words)
    if words[0] == "compose":
        compose(words[1:])
    elif words[0] == "build":
        stages = re.findall(r"^FROM .* AS (\S+)$", (REPO / "Dockerfile").read_text(), flags=re.MULTILINE)
        if "--target" in words:
            assert words[words.index("--target") + 1] in stages, f"stages: {stages}"
    elif words[0] == "run":
        image = re.compile(r"([\w.-]+/.*)?lmms-engine:")
        inside(words[next(i for i, word in enumerate(words) if image.match(word)) + 1 :])
    else:
        assert words[0] in ("save", "load", "login", "system", "push", "tag"), words[0]


def compose(words: list[str]) -> None:
    services = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]
    verb, *rest = words
    if verb in COMPOSE_WITHOUT_SERVICE:
        return
    assert verb in ("run", "up"), f"docker compose {verb}"
    rest = [word for i, word in enumerate(rest) if not (word.startswith("-") and i < 3)]
    name, *command = rest
    assert name in services, f"no service {name} (there are: {', '.join(services)})"
    if command and name == "prep":
        click_command("data-prep", command)
    elif command:
        inside(command)


def inside(words: list[str]) -> None:
    """A command that the image runs."""
    if words and words[0] in PROGRAMS:
        click_command(words[0], words[1:])
    elif words and words[0] not in ("bash", "make", "python"):
        check_launcher(words[0], {}, tuple(words[1:]))


def sbatch(line: Line) -> None:
    options = [word for word in line.words if word.startswith("-")]
    assert all("=" in option for option in options), f"{options}: write --option=value"
    script, recipe, *rest = [word for word in line.words if not word.startswith("-")]
    check_file(script)
    text = real(script).read_text() + real("recipes/qwen3_vl/launch.sh").read_text()
    for name in line.env:
        assert re.search(rf"\b{name}\b", text), f"{script} reads no {name}"
    check_launcher(f"recipes/{recipe}/launch.sh", {}, tuple(rest))


def srun(line: Line) -> None:
    command = [word for word in line.words if not word.startswith("--")]
    check_launcher(command[0], {}, tuple(command[1:]))


def kubectl(line: Line) -> None:
    assert line.words[:2] == ("create", "-f"), line.words
    check_file(line.words[2])


def torchrun(line: Line) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(list(line.words))   # SystemExit on an option that it does not know
    assert line.words[line.words.index("-m") + 1] == "lmms_engine.launch.cli"
    training(line.words[line.words.index("-m") + 2 :])


def python(line: Line) -> None:
    if line.words[:2] == ("-m", "lmms_engine.launch.cli"):
        training(line.words[2:])
    elif line.words[0] == "-m":
        assert line.words[1] in ("lmms_engine", "data_prep", "pytest"), line.words[1]
    else:
        check_file(line.words[0])


def training(words: tuple[str, ...]) -> None:
    """The training command's own parser and configuration accept the words."""
    configs, given = cli.parse(list(words))
    load_job([real(str(path)) for path in configs], given)


def make(line: Line) -> None:
    """Only the values; targets and options: test_docs.py, and `make -n` below."""
    for word in line.words:
        name, _, value = word.partition("=")
        assert value in VALUES.get(name, (value,)), word
        if name in ("RECIPE", "FROM") and not value.startswith("<"):
            assert real(f"recipes/{value}").is_dir(), word


RULES: dict[str, Callable[[Line], None]] = {
    "docker": docker, "podman": docker, "sbatch": sbatch, "srun": srun, "kubectl": kubectl,
    "torchrun": torchrun, "python": python, ".venv/bin/python": python, "make": make,
}  # fmt: skip


def check(line: Line) -> None:
    """Raises AssertionError, UserError or SystemExit for a command that cannot work."""
    if line.program in RULES:
        RULES[line.program](line)
    elif line.program.endswith("/launch.sh"):
        launcher(line)
    elif line.program.startswith(("tools/", "benchmarks/")):
        check_file(line.program)
    else:
        assert line.program in (*OURS, *OTHERS), f"{line.program}: no rule here knows this program"


ALL = [line for page in PAGES for line in lines(page.read_text(), str(page.relative_to(REPO)))]


@pytest.mark.parametrize("page", sorted({line.page for line in ALL}))
def test_every_command_names_what_exists(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(os, "environ", {**os.environ, "DATA": "/data"})
    for line in ALL:
        if line.page == page:
            try:
                check(line)
            except (AssertionError, ValueError, SystemExit) as error:
                pytest.fail(f"{line}: {error}")


def test_the_readme_has_commands_for_container_cluster_and_gpus() -> None:
    programs = {line.program for line in ALL if line.page == "README.md"}
    assert {"docker", "sbatch", "kubectl", "torchrun", "make"} <= programs


def test_make_takes_every_make_command(tmp_path: Path) -> None:
    """`make -n`: it prints what it would run, so a missing target, recipe or legal value is an error."""
    for name in ("Makefile", "tools", "lmms_engine"):
        (tmp_path / name).symlink_to(REPO / name)
    shutil.copytree(REPO / "recipes", tmp_path / "recipes", ignore=shipped.not_shipped)
    shutil.copytree(REPO / "recipes/qwen3_vl", tmp_path / "recipes/mine")
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    wanted = {line.words for line in ALL if line.program == "make" and not re.search("[<…]", str(line))}
    assert len(wanted) > 15
    for words in wanted:
        options = [word for word in words if not word.startswith("RUNTIME=")] + ["RUNTIME=host"]
        done = subprocess.run(
            ["make", "-n", *options], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"make {' '.join(words)}: {done.stderr}"


@pytest.mark.parametrize(
    "text",
    [
        "docker compose run --rm trian recipes/qwen3_vl/launch.sh",
        "docker compose run --rm train recipes/qwen9/launch.sh",
        "docker compose run --rm train recipes/qwen3_vl/launch.sh trainer_args.max_step=2",
        "docker compose run --rm prep smaple --out x",
        "docker compose start train",
        "docker compose run --rm train lmms-engine docter",
        "docker build --target tset .",
        "docker run --rm lmms-engine:local recipes/qwen3_vl/lunch.sh",
        "sbatch --nodes=2 recipes/_launch/slurm.batch qwen3_vl",
        "sbatch --nodes=2 recipes/_launch/slurm.sbatch qwen9",
        "REQUEU=1 sbatch --nodes=2 recipes/_launch/slurm.sbatch qwen3_vl",
        "srun --ntasks-per-node=1 recipes/qwen9/launch.sh",
        "kubectl create -f recipes/_launch/job.yaml",
        "torchrun --processes 8 -m lmms_engine.launch.cli --config recipes/qwen3_vl/config.yaml",
        "torchrun --nproc-per-node 8 -m lmms_engine.launch.cli --config recipes/qwen3_vl/confg.yaml",
        "python -m lmms_engine.launch.cli config_yaml=recipes/qwen3_vl/config.yaml trainer_args.maxsteps=1",
        "python tools/lokked.py x",
        "NODES=2 recipes/qwen3_vl/launch.sh",
        "PRESET=large recipes/qwen3_vl/launch.sh",
        "make train RECIPE=qwen3_vl RUNTIME=dokcer",
        "make train RECIPE=qwen9",
        "dcoker compose up tensorboard",
    ],
)
def test_planted_faults_are_seen(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    good = "docker compose run --rm train-cpu recipes/qwen3_vl/launch.sh trainer_args.max_steps=2 # quick"
    first, second = lines(f"Text.\n```bash\n{good}\n{text}\n```\n")
    check(first)
    seen: Any = None
    try:
        check(second)
    except (AssertionError, ValueError, SystemExit) as error:
        seen = error
    assert seen is not None
