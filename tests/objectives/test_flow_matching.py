"""Flow matching: the formulas, what is drawn when, and one number however the pictures are shared out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.errors import UserError
from lmms_engine.objectives.flow_matching import euler
from lmms_engine.train.seed import generator
from tests.flow import PROCESSOR, batch_of, build, join, loss_and_gradients, with_noise
from tests.tiny import assert_same_gradients


def drawn(objective, batches: list[PackedBatch], seed: int = 0) -> PackedBatch:
    """All batches after `draw` with one generator, as one."""
    rng = torch.Generator().manual_seed(seed)
    return join([objective.draw(batch, rng) for batch in batches])


def same(one: PackedBatch, other: PackedBatch) -> bool:
    return all(torch.equal(one.media[key], other.media[key]) for key in ("times", "noise", "class_labels"))


def test_path_and_target() -> None:
    """The model sees t * data + (1 - t) * noise, and is asked for data - noise."""
    objective, _, samples = build()
    (batch,) = with_noise(samples[:1])
    clean, noise, t = batch.media["pixel_values"], batch.media["noise"], batch.media["times"].item()
    seen: dict[str, Tensor] = {}

    def model(patches: Tensor, times: Tensor, labels: Tensor, positions: Tensor, segments) -> Tensor:
        seen.update(patches=patches, times=times, labels=labels)
        assert not segments.causal
        return torch.full_like(patches, 0.25)

    objective.model.forward = model
    loss = objective(batch)["flow"]
    torch.testing.assert_close(seen["patches"], t * clean + (1 - t) * noise)
    assert seen["times"].tolist() == [t]
    assert torch.equal(seen["labels"], batch.media["class_labels"])
    torch.testing.assert_close(loss, (0.25 - (clean - noise)).square().sum())
    assert objective.weights(batch) == {"flow": clean.numel()}


def test_packed_equals_one_picture_at_a_time() -> None:
    objective, _, samples = build()
    apart = with_noise(samples, null=objective.model.config.num_classes)
    loss, gradients = loss_and_gradients(objective, [join(apart)])
    separate, alone = loss_and_gradients(objective, apart)
    assert loss == pytest.approx(separate, rel=1e-6)
    assert_same_gradients(gradients, alone)


def test_eight_in_one_batch_equal_four_micro_batches_of_two() -> None:
    """Same draws, loss and gradients: pictures draw one after another, and the mean is over all values."""
    objective, _, samples = build()
    eight = samples + [replace(s, row=s.row._replace(row=s.row.row + 4)) for s in samples[::-1]]
    whole = drawn(objective, [batch_of(eight)])
    pairs = [batch_of(eight[i : i + 2]) for i in range(0, 8, 2)]
    rng = torch.Generator().manual_seed(0)
    pairs = [objective.draw(pair, rng) for pair in pairs]
    assert same(whole, join(pairs))
    loss, gradients = loss_and_gradients(objective, [whole])
    loss_of_pairs, of_pairs = loss_and_gradients(objective, pairs)
    assert loss == pytest.approx(loss_of_pairs, rel=1e-6)
    assert_same_gradients(of_pairs, gradients)


def test_draws_differ_over_ranks_and_steps_and_repeat_for_a_seed() -> None:
    objective, _, samples = build()
    batch = batch_of(samples)

    def draw(seed: int, rank: int, step: int) -> PackedBatch:
        return objective.draw(batch, generator(seed, "draw", rank, step))

    first = draw(1, 0, 1)
    assert same(first, draw(1, 0, 1))
    for other in (draw(1, 1, 1), draw(1, 0, 2), draw(2, 0, 1)):
        assert not torch.equal(first.media["times"], other.media["times"])
        assert not torch.equal(first.media["noise"], other.media["noise"])
    assert len(set(first.media["times"].tolist())) == len(samples)
    assert torch.equal(batch.media["class_labels"], batch_of(samples).media["class_labels"])   # as before


def test_share_of_dropped_classes_and_spread_of_times() -> None:
    objective, _, samples = build()
    batch = batch_of([samples[3]] * 4000)
    after = objective.draw(batch, torch.Generator().manual_seed(3)).media
    null = objective.model.config.num_classes
    rate = (after["class_labels"] == null).float().mean().item()
    assert rate == pytest.approx(0.1, abs=3 * math.sqrt(0.1 * 0.9 / 4000))
    kept = after["class_labels"] != null
    assert torch.equal(after["class_labels"][kept], batch.media["class_labels"][kept])
    assert after["times"].mean().item() == pytest.approx(0.5, abs=0.02)
    assert after["times"].std().item() == pytest.approx(1 / math.sqrt(12), abs=0.01)
    assert 0 <= after["times"].min() < 0.01
    assert 0.99 < after["times"].max() < 1
    assert after["noise"].std().item() == pytest.approx(1, abs=0.02)


def test_validation_draws_belong_to_the_row() -> None:
    """Whatever the packing, the generator and the folder; no class is dropped."""
    objective, _, samples = build()
    objective.eval()
    elsewhere = [replace(s, row=s.row._replace(source="/other/place")) for s in samples]
    packed = drawn(objective, [batch_of(samples)], seed=1)
    apart = drawn(objective, [batch_of([sample]) for sample in elsewhere], seed=2)
    assert same(packed, apart)
    assert torch.equal(packed.media["class_labels"], batch_of(samples).media["class_labels"])
    assert len(set(packed.media["times"].tolist())) == len(samples)


def test_noise_that_is_there_stays() -> None:
    objective, _, samples = build()
    (batch,) = with_noise(samples[:1])
    assert objective.draw(batch, torch.Generator()) is batch


def test_stand_ins_count_nothing() -> None:
    objective, _, samples = build()
    batches = with_noise(samples[:2])
    want, gradients = loss_and_gradients(objective, [join(batches)])
    stand_in = objective.draw(batch_of([PROCESSOR.stand_in()], stand_ins=1), torch.Generator().manual_seed(0))
    got, with_stand_in = loss_and_gradients(objective, [*batches, stand_in])
    assert objective.weights(stand_in) == {"flow": 0.0}
    assert got == pytest.approx(want, rel=1e-6)
    assert_same_gradients(with_stand_in, gradients)


def test_parts_of_sources() -> None:
    objective, _, samples = build(sources=("a", "b"))
    named = [replace(s, row=s.row._replace(source="ab"[i % 2])) for i, s in enumerate(samples)]
    batch = objective.draw(join(with_noise(named)), torch.Generator())
    sums, weights = objective(batch), objective.weights(batch)
    assert objective.coefficients == {"flow": 1.0, "source/a": 0.0, "source/b": 0.0}
    for i, name in enumerate("ab"):
        own = objective.draw(join(with_noise(named[i::2])), torch.Generator())
        alone = objective(own)["flow"]
        torch.testing.assert_close(sums[f"source/{name}"], alone.detach())
        assert weights[f"source/{name}"] == objective.weights(own)["flow"]
    torch.testing.assert_close(sums["source/a"] + sums["source/b"], sums["flow"].detach())


def test_euler_follows_a_known_field() -> None:
    """For data that are one point the velocity is (point - x) / (1 - t): every step count ends there."""
    point = torch.tensor([0.5, -2.0, 3.0])
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    times = []

    def field(x: Tensor, t: float) -> Tensor:
        times.append(t)
        return (point - x) / (1 - t)

    torch.testing.assert_close(euler(field, noise, 7), point.expand(4, 3))
    assert times == [i / 7 for i in range(7)]
    # dx/dt = x: (1 + 1/n)^n, towards e
    grown = euler(lambda x, t: x, torch.ones(1), 1000)
    assert grown.item() == pytest.approx((1 + 1 / 1000) ** 1000, rel=1e-4)


def test_drawings_are_the_processors_pictures_from_fixed_noise() -> None:
    objective, _, _ = build()
    cpu = torch.device("cpu")
    first, again = (objective.drawings(PROCESSOR, cpu, generator(7, "drawings")) for _ in range(2))
    other = objective.drawings(PROCESSOR, cpu, generator(8, "drawings"))
    assert [drawing.caption for drawing in first] == ["a", "b", "c", "d", "e"]
    assert all(d.pixels.shape == (8, 8, 3) and d.pixels.dtype == torch.uint8 for d in first)
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].pixels, other[0].pixels)
    assert all(parameter.grad is None for parameter in objective.model.parameters())


def test_padded_path_is_refused() -> None:
    with pytest.raises(UserError, match="use_rmpad=false: sit has no padded path"):
        build(rmpad=False)
