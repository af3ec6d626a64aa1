"""One number, every layout: packed, separate and padded runs of every family agree, and rows do not mix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmms_engine.datasets.processor import PROCESSORS
from lmms_engine.datasets.sample import Sample
from lmms_engine.models.spec import MODELS
from tests.tiny import CPU, FAMILIES, assert_same_gradients, build, logits, loss_and_gradients, pack

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def test_packed_equals_separate_equals_padded(family: str) -> None:
    objective, samples = build(family)
    packed, gradients = loss_and_gradients(objective, [pack(samples)])
    separate, apart = loss_and_gradients(objective, [pack([sample]) for sample in samples])
    reference, _ = build(family, rmpad=False)
    padded, unfolded = loss_and_gradients(reference, [pack(samples)])
    assert packed == pytest.approx(separate, rel=1e-6)
    assert packed == pytest.approx(padded, rel=1e-6)
    assert_same_gradients(gradients, apart)
    assert_same_gradients(gradients, unfolded)


def test_accumulation_does_not_matter(family: str) -> None:
    objective, samples = build(family)
    one, gradients = loss_and_gradients(objective, [pack(samples)])
    two, halves = loss_and_gradients(objective, [pack(samples[:2]), pack(samples[2:])])
    assert one == pytest.approx(two, rel=1e-6)
    assert_same_gradients(halves, gradients)


def test_logits_equal_the_librarys(family: str) -> None:
    """Its own forward, one row at a time, clips by its own route for clips, its own loss head."""
    spec = MODELS.get(family)
    plain, samples = spec.tiny()
    plain.eval()
    objective, _ = build(family)
    ours = logits(objective, pack(samples)).split([len(sample) for sample in samples])
    for sample, packed in zip(samples, ours, strict=True):
        with torch.no_grad():
            theirs = plain(**library_inputs(sample, plain.config)).logits[0]
        torch.testing.assert_close(packed, theirs, atol=1e-5, rtol=0)


def library_inputs(sample: Sample, config) -> dict[str, Tensor]:
    """What a user of transformers passes: pictures and clips apart."""
    inputs = {
        "input_ids": sample.input_ids[None],
        "position_ids": sample.position_ids[:, None],
        "attention_mask": torch.ones(1, len(sample), dtype=torch.long),
    }
    merge = config.vision_config.spatial_merge_size
    slots = sample.input_ids[
        (sample.input_ids == config.image_token_id) | (sample.input_ids == config.video_token_id)
    ]
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {"image": [], "video": []}
    patch = slot = 0
    for grid in sample.media.get("image_grid_thw", []):
        patches = int(grid.prod())
        kind = "video" if slots[slot] == config.video_token_id else "image"
        kinds[kind].append((sample.media["pixel_values"][patch : patch + patches], grid))
        patch += patches
        slot += patches // merge**2
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if kinds[kind]:
            inputs[name] = torch.cat([pixels for pixels, _ in kinds[kind]])
            inputs[f"{kind}_grid_thw"] = torch.stack([grid for _, grid in kinds[kind]])
    return inputs


def test_no_row_sees_another(family: str) -> None:
    objective, samples = build(family)
    first, *rest = samples
    media = {**first.media, "pixel_values": first.media["pixel_values"] + 1}
    changed = replace(first, media=media, input_ids=torch.where(first.input_ids < 300, 7, first.input_ids))
    before = logits(objective, pack(samples))
    after = logits(objective, pack([changed, *rest]))
    length = len(first)
    assert (before[:length] - after[:length]).abs().max() > 0.01
    torch.testing.assert_close(before[length:], after[length:], atol=1e-6, rtol=0)


def test_pictures_matter(family: str) -> None:
    """Guards the tests above: a model that ignores its tower would pass them."""
    objective, samples = build(family)
    picture = samples[0]
    blank = replace(picture, media={**picture.media, "pixel_values": picture.media["pixel_values"] * 0})
    with_it, without = (logits(objective, pack([sample]))[-5:] for sample in (picture, blank))
    assert (with_it - without).abs().max() > 0.01


def test_stand_in_adds_exactly_nothing(family: str) -> None:
    objective, samples = build(family)
    text = samples[3]
    nothing = replace(
        samples[0], labels=samples[0].labels * 0 - 100, loss_weights=samples[0].loss_weights * 0
    )
    alone, gradients = loss_and_gradients(objective, [pack([text])])
    beside, with_stand_in = loss_and_gradients(objective, [pack([text, nothing], stand_ins=1)])
    assert beside == pytest.approx(alone, rel=1e-6)
    tower = [name for name in gradients if name.startswith("model.visual.")]
    assert all(gradients[name] is None for name in tower)
    assert all(with_stand_in[name].abs().max() == 0 for name in tower)
    rest = [name for name in gradients if name not in tower]
    assert_same_gradients({n: with_stand_in[n] for n in rest}, {n: gradients[n] for n in rest})


def test_nothing_to_learn_from(family: str) -> None:
    """A batch of masked rows alone: loss 0, gradients 0, nothing undefined."""
    objective, samples = build(family)
    masked = [replace(s, labels=s.labels * 0 - 100, loss_weights=s.loss_weights * 0) for s in samples]
    total, gradients = loss_and_gradients(objective, [pack(masked)])
    assert total == 0.0
    assert all(gradient is not None and gradient.abs().max() == 0 for gradient in gradients.values())
    beside, mixed = loss_and_gradients(objective, [pack([masked[0], *samples[1:]])])
    without, reference = loss_and_gradients(objective, [pack(samples[1:])])
    assert beside == pytest.approx(without, rel=1e-6)
    assert_same_gradients(mixed, reference)


def test_recomputation_changes_nothing(family: str) -> None:
    """Every block runs once with it off and twice with it on, and the gradients are equal."""
    objective, samples = build(family)
    calls: dict[str, int] = {}

    def count(name: str):
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1)

    model = objective.model
    blocks = {n: m for n, m in model.named_modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))}
    for name, block in blocks.items():
        block.register_forward_pre_hook(count(name))
    plain, gradients = loss_and_gradients(objective, [pack(samples)])
    assert calls == dict.fromkeys(blocks, 1)
    calls.clear()
    inner = {name: block.mlp for name, block in blocks.items()}
    for name, mlp in inner.items():
        mlp.register_forward_pre_hook(count(name + ".mlp"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed, again = loss_and_gradients(objective, [pack(samples)])
    assert {name: calls[f"{name}.mlp"] for name in blocks} == dict.fromkeys(blocks, 2)
    assert recomputed == plain
    assert_same_gradients(again, gradients, tolerance=1e-6)


def test_positions_stay_integers(family: str) -> None:
    """4,096 positions reach the rotary tables of a bf16 model unrounded."""
    objective, samples = build(family)
    objective.model.to(torch.bfloat16)
    seen: list[Tensor] = []
    rotary = objective.model.model.language_model.rotary_emb
    rotary.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    text = samples[3]
    times = -(-4096 // len(text))
    long = replace(
        text,
        input_ids=text.input_ids.repeat(times)[:4096],
        labels=torch.full((4096,), -100),
        loss_weights=torch.zeros(4096),
        position_ids=torch.arange(4096).expand(3, -1),
    )
    batch = pack([samples[0], long])
    with torch.no_grad():
        objective.hidden(batch.to(CPU))
    assert seen[0].dtype == torch.int64
    assert torch.equal(seen[0][:, 0], batch.position_ids)


def test_padding_is_known_by_length_not_by_id(family: str) -> None:
    """Rows made of token 0, which is also what the padded path fills with."""
    objective, samples = build(family)
    text = samples[3]
    zeros = replace(
        text,
        input_ids=text.input_ids * 0,
        labels=torch.where(text.labels >= 0, 0, text.labels),
    )
    batch = pack([samples[0], zeros])
    reference, _ = build(family, rmpad=False)
    assert batch.to(CPU).supervised.numel() == samples[0].supervised + zeros.supervised
    flat, gradients = loss_and_gradients(objective, [batch])
    padded, unfolded = loss_and_gradients(reference, [batch])
    assert flat == pytest.approx(padded, rel=1e-6)
    assert_same_gradients(gradients, unfolded)


def test_tower_inputs_from_the_worker_change_nothing(family: str) -> None:
    """The processor's boundaries and positions stand in for the tower's own, with no grid read any more."""
    objective, samples = build(family)
    config = objective.model.config
    processor_class = PROCESSORS.get(family)
    processor = processor_class.__new__(processor_class)   # no files: only what the grids are turned into
    processor.merge, processor._config = config.vision_config.spatial_merge_size, config
    batch = pack(samples)
    told = replace(batch, tower=processor.tower_inputs(batch.media))
    without, reference = loss_and_gradients(objective, [batch])
    with_them, gradients = loss_and_gradients(objective, [told])
    assert with_them == pytest.approx(without, rel=1e-6)
    assert_same_gradients(gradients, reference)
    turned = {**batch.media, "image_grid_thw": batch.media["image_grid_thw"][:, [0, 2, 1]]}
    unread = replace(told, media=turned)
    assert loss_and_gradients(objective, [unread])[0] == with_them
