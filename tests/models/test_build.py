"""The processor of a job: damaged files and a tokenizer that is not the model's stop it with their names."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.models.build import build_processor, check_tokens
from lmms_engine.models.hf import read_config
from tests.runs import MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processors")
    write_processors(made)
    return made / "qwen3_vl"


def job(folder: Path, part: str | None = None, **changes: Any) -> Job:
    model = copy.deepcopy(MODEL)
    (model["config"][part] if part else model["config"]).update(changes)
    processor = {"processor_name": str(folder)}
    return Job.from_dict(
        {
            "model_config": {"load_from_config": model},
            "dataset_config": {"datasets": [{"path": "rows.jsonl"}], "processor_config": processor},
        }
    )


def check(folder: Path, part: str | None = None, **changes: Any) -> None:
    made = job(folder, part, **changes)
    check_tokens(build_processor(made), read_config(made.model))


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    check(folder)
    with pytest.raises(UserError, match="has 541 tokens, and the model's vocab_size is 530; name the"):
        check(folder, "text_config", vocab_size=530)
    with pytest.raises(UserError, match=r"a place for images with token 524, .* image_token_id is 5; name"):
        check(folder, image_token_id=5)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("text", ["[]", "5"])
def test_files_of_another_kind_are_refused(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / name).write_text(text)
    with pytest.raises(UserError, match="copy: no processor can be opened"):
        build_processor(job(tmp_path / "copy"))
