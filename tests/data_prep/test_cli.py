"""The command line, in its three forms: module, typer app, and the recipes' prepare.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_prep.cli import VERBS, app
from data_prep.sample import MIN_ROWS, make_sample

RECIPES = ("qwen3_vl", "qwen2_5_vl")
runner = CliRunner()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_help_lists_the_verbs_that_exist_and_no_other() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert verbs == ["sample", *VERBS]
    planned = {"convert", "validate", "stats", "preview", "shard", "encode"}
    assert not [verb for verb in planned - set(verbs) if verb in result.output]
    for verb in verbs:
        assert verb in result.output
        shown = runner.invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
        assert (shown.exit_code, f"data-prep {verb} " in shown.output) == (0, True), shown.output


def test_help_of_sample_has_examples_and_every_option() -> None:
    result = runner.invoke(app, ["sample", "--help"], env={"COLUMNS": "200"})
    for text in ("data-prep sample --out data/shapes --if-missing", "--rows", "--seed", "--overwrite"):
        assert text in result.output


def test_module_in_another_process_gives_the_same_bytes(repo: Path, tmp_path: Path) -> None:
    # Another hash seed, so that an order taken from a set or from hash() would show.
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(repo)}
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "sample",
        "--out",
        str(tmp_path / "a"),
        "--rows",
        "24",
        "--seed",
        "3",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"wrote: {tmp_path / 'a'} (train 24, heldout 8, audio 4, audio_heldout 4, "
        "classes 12, classes_heldout 8, text 12, text_heldout 8 rows, "
    )
    assert "generating" in done.stderr  # plain lines, since this is no terminal
    assert "\x1b" not in done.stderr
    make_sample(tmp_path / "b", rows=24, seed=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_second_call_with_if_missing_says_present(tmp_path: Path) -> None:
    make_sample(tmp_path / "a", rows=MIN_ROWS)
    arguments = ["sample", "--out", str(tmp_path / "a"), "--rows", str(MIN_ROWS), "--if-missing"]
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.stdout.split(":")[0]) == (0, "present")


def test_errors_are_one_line_and_exit_code_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["sample", "--out", str(tmp_path / "file" / "a")]  # its parent is a file
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "file") in result.stderr
    assert result.stderr.count("\n") == 1
    assert isinstance(runner.invoke(app, ["--debug", *arguments]).exception, OSError)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    result = runner.invoke(app, ["sample", "--out", str(tmp_path / "a"), "--rows", "3"])
    assert result.exit_code == 2
    assert "--rows" in result.stderr


def test_recipes_prepare_in_the_same_way_under_any_folder_name(repo: Path, tmp_path: Path) -> None:
    texts = {(repo / "recipes" / recipe / "prepare.py").read_text() for recipe in RECIPES}
    assert len(texts) == 1
    text = texts.pop()
    assert not [recipe for recipe in RECIPES if recipe in text]
    copy = tmp_path / "mine" / "prepare.py"
    copy.parent.mkdir()
    copy.write_bytes((repo / "recipes" / RECIPES[0] / "prepare.py").read_bytes())
    make_sample(tmp_path / "a", rows=MIN_ROWS)
    command = [
        sys.executable,
        str(copy),
        "--if-missing",
        "--out",
        str(tmp_path / "a"),
        "--rows",
        str(MIN_ROWS),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("present: ")


@pytest.mark.parametrize("module", ["data_prep.cli", "data_prep.sample"])
def test_starting_imports_no_torch(module: str, repo: Path) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'pyarrow'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, timeout=60).returncode == 0
