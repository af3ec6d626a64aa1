"""The commands of docs/data.md run, on small data where it names the user's own."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from data_prep.cli import app
from tests.runs import MODEL

VERBS = ("validate", "preview", "stats", "shard", "encode")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def commands() -> Iterator[list[str]]:
    """The words of each `data-prep` line in a block, but for those that need a cluster or data to convert."""
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["data-prep"] and words[1] in VERBS and "slurm" not in words:
                yield words[1:]


@pytest.fixture
def here(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the sample, some rows of one's own, and a recipe whose model is at hand."""
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "shapes").symlink_to(sample)
    (tmp_path / "recipes" / "qwen3_vl").mkdir(parents=True)
    lines = (sample / "heldout.jsonl").read_text().splitlines()[:12]
    for name in ("images", "videos"):
        (tmp_path / "data" / "mine" / name).symlink_to(sample / name)
    (tmp_path / "data" / "mine" / "train.jsonl").write_text("\n".join(lines) + "\n")
    folder = str(sample / "processor" / "qwen3_vl")
    config = {
        "model_config": {"load_from_config": MODEL},
        "dataset_config": {"datasets": [{"path": "x"}], "processor_config": {"processor_name": folder}},
    }
    (tmp_path / "recipes" / "qwen3_vl" / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_run(here: Path, words: list[str]) -> None:
    processes = "2" if "local" in words else "1"
    few = [
        processes if before in ("--workers", "--tasks") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    result = CliRunner().invoke(app, few)
    assert result.exit_code == 0, result.output
    for before, word in pairwise(few):
        if before in ("--out", "--fix", "--report"):
            assert (here / word).exists(), f"{word} is not written"
    if "--fix" in few:
        rows = (here / few[few.index("--fix") + 1]).read_text().splitlines()
        assert [json.loads(row)["id"] for row in rows][:1] == ["heldout-00000"]


def test_each_verb_is_among_them() -> None:
    assert {words[0] for words in commands()} == set(VERBS)
