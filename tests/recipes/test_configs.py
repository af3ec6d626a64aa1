"""Every recipe's configuration is valid, alone and with its overlay, which keeps the architecture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lmms_engine.config import Job, load_job
from lmms_engine.models.hf import build_meta, read_config
from lmms_engine.models.spec import for_type
from tests.shipped import RECIPES

REPO = Path(__file__).resolve().parents[2]
FROM_SCRATCH = ("sit",)
MAX_SMOKE_PARAMETERS = 3_000_000


@pytest.fixture(params=RECIPES, ids=lambda path: path.name)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(REPO)  # data paths are relative to the repository's root
    return request.param


def smoke_job(recipe: Path) -> Job:
    return load_job([recipe / "config.yaml", recipe / "smoke.yaml"], [])


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_full_config(recipe: Path) -> None:
    job = load_job([recipe / "config.yaml"], [])
    assert job.model.load_from_pretrained_path or recipe.name in FROM_SCRATCH
    assert job.dataset.eval_datasets


def test_smoke_overlay(recipe: Path) -> None:
    job = smoke_job(recipe)
    assert job.model.load_from_pretrained_path is None
    assert job.model.load_from_config["model_type"]
    assert job.trainer.report_to == ()
    assert job.trainer.output_dir is None  # the launcher says where


def test_both_train_the_same_parts(recipe: Path) -> None:
    full, smoke = load_job([recipe / "config.yaml"], []), smoke_job(recipe)
    assert full.trainer.freeze_modules == smoke.trainer.freeze_modules
    assert full.dataset.processor_config.processor_type == smoke.dataset.processor_config.processor_type


def test_prepare_makes_the_data_that_the_config_names(recipe: Path) -> None:
    import inspect

    out = inspect.signature(load_module(recipe / "prepare.py").prepare).parameters["out"].default
    for job in (load_job([recipe / "config.yaml"], []), smoke_job(recipe)):
        for entry in (*job.dataset.datasets, *job.dataset.eval_datasets):
            assert Path(entry.path).parent == REPO / out
    # a folder that is there already has become absolute
    assert (REPO / smoke_job(recipe).dataset.processor_config.processor_name).is_relative_to(REPO / out)


def test_smoke_model_is_tiny(recipe: Path) -> None:
    config = read_config(smoke_job(recipe).model)
    model = build_meta(for_type(config.model_type), config)
    assert sum(p.numel() for p in model.parameters()) < MAX_SMOKE_PARAMETERS


def test_smoke_model_keeps_the_architecture_of_a_model_from_scratch(recipe: Path) -> None:
    full = load_job([recipe / "config.yaml"], []).model
    if recipe.name not in FROM_SCRATCH:
        pytest.skip("its real config lies with its weights")
    one, other = read_config(full), read_config(smoke_job(recipe).model)
    sizes = ("input_size", "hidden_size", "depth", "num_heads")
    assert {key for key, value in one.to_dict().items() if other.to_dict()[key] != value} == set(sizes)


def test_smoke_model_has_every_special_part(recipe: Path) -> None:
    """Grouped heads, tied head, M-RoPE sections that fill half a head, DeepStack or windows."""
    config = read_config(smoke_job(recipe).model)
    if "vision_config" not in config.sub_configs:
        pytest.skip("no vision-language model")
    text, vision = config.text_config, config.vision_config
    assert text.num_attention_heads > text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == head_dim // 2
    assert config.tie_word_embeddings
    assert vision.out_hidden_size == text.hidden_size
    if hasattr(vision, "deepstack_visual_indexes"):
        assert 0 < len(vision.deepstack_visual_indexes) < vision.depth
    if hasattr(vision, "fullatt_block_indexes"):
        assert 0 < len(vision.fullatt_block_indexes) < vision.depth
        assert vision.window_size // vision.patch_size // vision.spatial_merge_size >= 1


def test_token_ids_are_the_sample_tokenizers(recipe: Path) -> None:
    from data_prep.tokenizer import IDS, VOCAB_SIZE

    config = read_config(smoke_job(recipe).model)
    if "vision_config" not in config.sub_configs:
        pytest.skip("no vision-language model")
    assert config.text_config.vocab_size == VOCAB_SIZE
    assert config.image_token_id == IDS["<|image_pad|>"]
    assert config.video_token_id == IDS["<|video_pad|>"]
    assert config.vision_start_token_id == IDS["<|vision_start|>"]
    assert config.vision_end_token_id == IDS["<|vision_end|>"]
