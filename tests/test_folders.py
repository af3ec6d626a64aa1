"""A mistyped path of a model or processor is named as one, and not looked for on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmms_engine.config import ModelSection
from lmms_engine.datasets.processor.text import TextProcessor
from lmms_engine.errors import UserError
from lmms_engine.folders import missing_folder
from lmms_engine.launch.preset import weights_shortage
from lmms_engine.models.hf import read_config
from lmms_engine.models.qwen3_vl.processor import Qwen3VLProcessor
from lmms_engine.models.sit.processor import SiTProcessor


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `data/shapes/processor` and a file in it."""
    (tmp_path / "data/shapes/processor").mkdir(parents=True)
    (tmp_path / "data/shapes/train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("data/shapes/procesor", "data/shapes/processor"),
        ("data/shpaes/processor", "data/shapes/processor"),
        ("dta/shaps/procesor", "data/shapes/processor"),
        ("./data/shape", "data/shapes"),
        ("data/shape", "data/shapes"),   # two parts, but the first is a folder here
        ("data/zzz", None),
        ("some/where/else", None),
    ],
)
def test_a_path_that_is_not_there(here: Path, name: str, near: str | None) -> None:
    said = missing_folder(name)
    assert said is not None
    assert said.startswith(f"there is no such folder: {here / name}")
    assert said.partition("; ")[2] == (f"did you mean '{near}'?" if near else "")
    assert (missing_folder(here / name) or "").endswith(f"did you mean '{here / near}'?" if near else name)


def test_what_is_there_or_may_be_an_id(here: Path) -> None:
    for name in ("data/shapes", str(here), "owner/model", "model"):
        assert missing_folder(name) is None
    assert missing_folder("model", bare=False) == f"there is no such folder: {here / 'model'}"
    assert missing_folder("data/shapes/train.jsonl") == f"{here}/data/shapes/train.jsonl is no folder"


@pytest.mark.parametrize("kind", [TextProcessor, Qwen3VLProcessor, SiTProcessor])
def test_processors_say_so(kind: type) -> None:
    with pytest.raises(UserError, match=r"opened.*no such folder: .*; did you mean 'data/shapes/proc"):
        kind.from_pretrained("data/shapes/procesor")


def test_models_say_so() -> None:
    section = ModelSection(load_from_pretrained_path="data/shape")
    with pytest.raises(UserError, match=r"load_from_pretrained_path=data/shape: there .*'data/shapes'\?"):
        read_config(section)
    assert (weights_shortage("data/shape") or "").endswith("; did you mean 'data/shapes'?")
