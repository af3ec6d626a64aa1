"""Commands and links in the documentation exist: targets, verbs, options, keys and files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests import shipped

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    *sorted((REPO / "docs").glob("*.md")),
    *shipped.PAGES,
]
PROGRAMS = {"lmms-engine": "lmms_engine.cli", "data-prep": "data_prep.cli"}


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after `program` in each fenced line and inline code span that runs it."""
    spans = re.findall(r"`([^`\n]+)`", text)
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        spans += block.replace("\\\n", " ").splitlines()
    for span in spans:
        for part in re.split(r"&&|\|\||;", span):
            words = shlex.split(part.strip(), comments=True) if program in part else []
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]  # environment
            if words and words[0].removeprefix(".venv/bin/") == program:
                yield words[1:]


def click_command(program: str, words: list[str]) -> object:
    """The click command that the words name; fails if a verb is unknown."""
    import importlib

    command = typer.main.get_command(importlib.import_module(PROGRAMS[program]).app)
    verbs = getattr(command, "commands", None)
    if verbs is None:
        return command
    assert words, f"{program}: no verb"
    assert words[0] in verbs, f"{program} {words[0]}: no such verb (there are: {', '.join(sorted(verbs))})"
    context = command.context_class(command, info_name=program)
    return command.resolve_command(context, words)[1]  # loads a verb that is imported when it is used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
class TestPage:
    def test_make_commands(self, page: Path) -> None:
        makefile = (REPO / "Makefile").read_text()
        targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
        options = set(re.findall(r"^([A-Z_]+) \?=", makefile, flags=re.MULTILINE))
        for words in commands(page.read_text(), "make"):
            for word in words:
                name, equals, _ = word.partition("=")
                assert name in (options if equals else targets), (
                    f"{page.name}: make {' '.join(words)}: {name}"
                )

    @pytest.mark.parametrize("program", sorted(PROGRAMS))
    def test_verbs_and_options(self, page: Path, program: str) -> None:
        for words in commands(page.read_text(), program):
            if not words or words == ["--help"]:
                continue
            command = click_command(program, words)
            legal = {
                "--help",
                *(name for option in command.params for name in (*option.opts, *option.secondary_opts)),
            }
            for word in words[1:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in legal, (
                        f"{page.name}: {program} {' '.join(words)}: {word}"
                    )

    def test_config_keys(self, page: Path) -> None:
        """Every dotted key that a page names belongs to the config."""
        from lmms_engine.config import DatasetSection, ModelSection, TrainerSection

        sections = {
            "model_config": ModelSection,
            "dataset_config": DatasetSection,
            "trainer_args": TrainerSection,
        }
        for section, key in re.findall(
            r"\b(model_config|dataset_config|trainer_args)\.([a-z0-9_]+)", page.read_text()
        ):
            fields = sections[section].model_fields
            names = {*fields, *(field.alias for field in fields.values())}
            assert key in names, f"{page.name}: {section}.{key} is no key"

    def test_links(self, page: Path) -> None:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name}: no {target}"


def test_planted_faults_are_seen() -> None:
    fenced = "```bash\nPRESET=smoke make test   # all\nlmms-engine inspect \\\n  --config c\n```\n"
    text = f"Run `make trian X=1`.\n{fenced}"
    assert list(commands(text, "make")) == [["trian", "X=1"], ["test"]]
    assert list(commands(text, "lmms-engine")) == [["inspect", "--config", "c"]]
