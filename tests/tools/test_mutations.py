"""The list of planted faults still fits the code: each line is there once, each check exists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from lmms_engine.train.verify import CASES

REPO = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mutations", REPO / "tools/mutations.py")
mutations = importlib.util.module_from_spec(spec)
sys.modules["mutations"] = mutations  # dataclasses look their module up
spec.loader.exec_module(mutations)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_is_there_once_and_the_broken_file_is_python(mutation) -> None:
    text = (REPO / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_check_exists(mutation) -> None:
    check = mutation.check
    if check.recipe is None:
        file, _, name = check.test.partition("::")
        assert f"def {name}(" in (REPO / file).read_text()
        return
    assert check.case in [case.name for case in CASES]
    assert (REPO / "recipes" / check.recipe / "smoke.yaml").is_file()


def test_the_docs_list_what_is_there() -> None:
    text = (REPO / "docs/training.md").read_text()
    table = text.partition("## Planted faults")[2].partition("\n## ")[0]
    listed = {line.split(" | ")[0].strip("| ") for line in table.splitlines() if line.startswith("| ")}
    assert listed - {"line", "---"} <= {m.name for m in mutations.MUTATIONS}
    assert listed - {"line", "---"}
    assert all(m.name in text for m in mutations.MUTATIONS)
