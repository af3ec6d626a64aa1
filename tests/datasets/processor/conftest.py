"""The sample data's processor folders, opened by our processors and by the library's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, Qwen2_5_VLConfig, Qwen3VLConfig

from data_prep.processors import write_processors
from lmms_engine.datasets.processor import PROCESSORS
from lmms_engine.datasets.processor.vision_language import VisionLanguageProcessor
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import parse_row
from lmms_engine.segments import RowRef

CONFIGS = {"qwen3_vl": Qwen3VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processors")
    write_processors(folder)
    return folder


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def build(folders: Path, family: str) -> Callable[..., VisionLanguageProcessor]:
    """build(**settings) -> our processor of the family."""

    def make(**settings: Any) -> VisionLanguageProcessor:
        settings = {"config": CONFIGS[family](), "fps": 2.0, **settings}
        return PROCESSORS.get(family).from_pretrained(folders / family, **settings)

    return make


@pytest.fixture
def library(folders: Path, family: str) -> Any:
    return AutoProcessor.from_pretrained(folders / family)


@pytest.fixture
def sample(tmp_path: Path) -> Callable[..., Sample]:
    """sample(processor, [parts and texts of the question], answer) -> its Sample."""

    def make(processor: VisionLanguageProcessor, content: list[Any], *turns: str) -> Sample:
        messages = [{"role": "user", "content": content}]
        messages += [
            {"role": ("assistant", "user")[i % 2], "content": turn} for i, turn in enumerate(turns)
        ]
        return processor(parse_row({"messages": messages}, tmp_path), RowRef("test", 0, 0, "row"))

    return make
