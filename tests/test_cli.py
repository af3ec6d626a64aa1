"""The `lmms-engine` command itself: what it lists, and that listing is cheap. Its verbs: tests/commands."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lmms_engine.cli import VERBS, app, load_verb


def test_help_lists_the_verbs_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from lmms_engine.cli import app\n"
        "try:\n    app(['--help'])\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in VERBS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", VERBS)
def test_the_list_says_what_the_verb_says(name):
    assert load_verb(name).help.splitlines()[0] == VERBS[name]
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert VERBS[name].split()[0] in shown.output
    assert "Options" in shown.output


def test_a_misspelt_verb_names_the_nearest():
    done = CliRunner().invoke(app, ["exprt"])
    assert done.exit_code == 2
    assert "Did you mean 'export'" in done.output
