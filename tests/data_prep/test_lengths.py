"""Which processor opens a folder, and what it makes of a row without a run's config."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from data_prep.lengths import Tokens, processor_type
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import BadRow, UserError

NAMES = ["qwen2_5_vl", "qwen3_moe", "qwen3_vl", "sit"]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_the_folder_says_its_family(sample: Path, family: str) -> None:
    assert processor_type(sample / "processor" / family, NAMES) == family


def test_a_models_config_goes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    assert processor_type(tmp_path, NAMES) == "qwen3_moe"


def test_a_folder_that_does_not_say_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "OtherProcessor"}')
    with pytest.raises(UserError, match=r"--processor-type \(legal: qwen2_5_vl, qwen3_moe"):
        processor_type(tmp_path, NAMES)
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(UserError, match=r"processor_config.json is damaged"):
        processor_type(tmp_path, NAMES)


def test_a_copy_for_another_process_opens_its_own(sample: Path) -> None:
    tokens = Tokens(sample / "processor" / "qwen3_vl")
    row = parse_row(json.loads((sample / "heldout.jsonl").read_text().splitlines()[0]), sample)
    length = len(tokens.sample(row))
    copy = pickle.loads(pickle.dumps(tokens))
    assert copy._opened is None
    assert len(copy.sample(row)) == length > len(row.messages)


def test_a_text_model_by_its_name_refuses_pictures(sample: Path) -> None:
    tokens = Tokens(sample / "processor" / "qwen3_vl", "qwen3_moe")
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]
    assert tokens.sample(parse_row({"messages": turns}, sample)).supervised == 2   # its text and its end
    with pytest.raises(BadRow, match="reads text alone"):
        tokens.sample(parse_row({"messages": turns, "image": "a.png"}, sample))
