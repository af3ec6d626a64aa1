"""Every family as data: paths that exist, special parts that are on, inputs as the library wants them."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from lmms_engine.errors import UserError
from lmms_engine.models.spec import MODELS, for_type
from tests.tiny import CPU, FAMILIES, build, logits, loss_and_gradients, pack


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_names_modules_that_exist(family: str) -> None:
    spec = MODELS.get(family)
    model, _ = spec.tiny()
    names = {name for name, _ in model.named_modules()}
    layout = spec.layout
    single = (layout.body, layout.decoder, layout.head, layout.norm, layout.embed, *layout.encoders)
    assert set(single) <= names
    for pattern in layout.blocks:
        matched = [n for n in fnmatch.filter(names, pattern) if n.count(".") == pattern.count(".")]
        assert len(matched) == 3
    assert model.get_submodule(layout.head) is model.get_output_embeddings()
    assert model.get_submodule(layout.embed) is model.get_input_embeddings()
    assert layout.attention.keys() == model.config.sub_configs.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_found_by_model_type(family: str) -> None:
    spec = MODELS.get(family)
    assert spec.name == family
    assert all(for_type(model_type) is spec for model_type in spec.model_types)
    assert spec.tiny()[0].config.model_type in spec.model_types


def test_unknown_type() -> None:
    with pytest.raises(UserError, match="unknown model 'qwen4_vl'"):
        for_type("qwen4_vl")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_is_the_same_every_time(family: str) -> None:
    before = torch.get_rng_state()
    (first, samples), (again, others) = (MODELS.get(family).tiny() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(samples, others, strict=True))
    assert first is not again


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_trained(family: str) -> None:
    objective, samples = build(family)
    _, gradients = loss_and_gradients(objective, [pack(samples)])
    assert [name for name, g in gradients.items() if g is None or g.abs().max() == 0] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_hold_pictures_clips_and_text(family: str) -> None:
    model, samples = MODELS.get(family).tiny()
    config = model.config
    ids = [set(sample.input_ids.tolist()) for sample in samples]
    assert [config.image_token_id in row for row in ids] == [True, True, False, False]
    assert [config.video_token_id in row for row in ids] == [False, True, True, False]
    assert [len(s.media.get("image_grid_thw", ())) for s in samples] == [1, 3, 1, 0]
    merged = config.vision_config.spatial_merge_size**2
    for sample in samples:
        slots = torch.isin(sample.input_ids, torch.tensor([config.image_token_id, config.video_token_id]))
        grids = sample.media.get("image_grid_thw", torch.zeros(0, 3))
        assert int(slots.sum()) * merged == int(grids.prod(1).sum())


def test_special_parts_of_qwen3_vl_are_on() -> None:
    config = MODELS.get("qwen3_vl").tiny()[0].config
    text = config.text_config
    assert len(config.vision_config.deepstack_visual_indexes) == 2
    assert sum(text.rope_parameters["mrope_section"]) == text.head_dim // 2
    assert text.num_attention_heads > text.num_key_value_heads > 1
    assert config.tie_word_embeddings


def test_special_parts_of_qwen2_5_vl_are_on() -> None:
    config = MODELS.get("qwen2_5_vl").tiny()[0].config
    text, vision = config.text_config, config.vision_config
    head_dim = text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == head_dim // 2
    assert text.num_attention_heads > text.num_key_value_heads > 1
    assert 0 < len(vision.fullatt_block_indexes) < vision.depth
    assert vision.intermediate_size % 8
    assert config.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_clips_go_the_way_of_pictures(family: str) -> None:
    """One call of the tower, one placeholder; the batch itself keeps the true token."""
    objective, samples = build(family)
    spec, config = MODELS.get(family), objective.model.config
    batch = pack(samples)
    kwargs = spec.extra_kwargs(batch, config)
    assert (batch.input_ids == config.video_token_id).any()
    assert not (kwargs["input_ids"] == config.video_token_id).any()
    assert kwargs.keys() == {"input_ids", "pixel_values", "image_grid_thw"}
    calls = []
    objective.model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    logits(objective, batch)
    assert len(calls) == 1
    text = pack([samples[3]]).to(CPU)
    assert spec.extra_kwargs(text, config).keys() == {"input_ids"}


def test_positions_of_a_clip_keep_fractions_of_a_second() -> None:
    """0.75 s a step at two positions a second: 0 and 1.5, cut to 1; text goes on at 1 + the largest."""
    _, samples = MODELS.get("qwen2_5_vl").tiny()
    several, clip = samples[1], samples[2]
    video = (several.input_ids == 303).nonzero().flatten()
    times = several.position_ids[0][video]
    assert (times - times[0]).unique().tolist() == [0, 1]
    slots = (clip.input_ids == 303).nonzero().flatten()
    times = clip.position_ids[0][slots]
    assert (times - times[0]).unique().tolist() == [0, 2, 4]
    assert clip.position_ids[:, slots[-1] + 1].tolist() == [int(times[-1]) + 1] * 3
