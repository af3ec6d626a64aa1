"""Weights, sums and the padded index of next-token training; the equalities are in tests/invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lmms_engine.errors import UserError
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives import OBJECTIVES
from lmms_engine.objectives.next_token import NextToken, padded_index
from tests.tiny import CPU, FAMILIES, assert_same_gradients, build, logits, loss_and_gradients, pack


@pytest.mark.parametrize("family", FAMILIES)
def test_sum_is_plain_cross_entropy(family: str) -> None:
    objective, samples = build(family)
    batch = pack(samples)
    rows = F.cross_entropy(logits(objective, batch), batch.labels, reduction="none", ignore_index=-100)
    expected = (rows * batch.loss_weights).double().sum().item()
    assert objective(batch.to(CPU))["ce"].item() == pytest.approx(expected, rel=1e-6)
    assert objective.weights(batch) == {"ce": sum(s.supervised for s in samples)}
    assert objective.coefficients == {"ce": 1.0}


@pytest.mark.parametrize("accumulated", [False, True])
def test_sources_have_their_own_sums(accumulated: bool) -> None:
    """Each source's sum and weight are those of its rows alone; the stand-in belongs to none."""
    plain, samples = build("qwen3_vl")
    names = [f"s{i % 2}" for i in range(len(samples))]
    objective = NextToken(
        plain.model, MODELS.get("qwen3_vl"), plain.model.config, sources=["s0", "s1", "elsewhere"]
    )
    objective._head = plain._head
    told = [replace(s, row=s.row._replace(source=n)) for s, n in zip(samples, names, strict=True)]
    packs = [pack(told[:2]), pack(told[2:])] if accumulated else [pack(told)]
    batches = [objective.draw(batch, torch.Generator()) for batch in packs]
    parts = [objective(batch.to(CPU)) for batch in batches]
    weights = [objective.weights(batch) for batch in batches]
    sums = {term: sum(part[term].item() for part in parts) for term in objective.coefficients}
    totals = {term: sum(w[term] for w in weights) for term in objective.coefficients}
    for name in ("s0", "s1"):
        own = [s for s, n in zip(samples, names, strict=True) if n == name]
        alone = sum(plain(pack([sample]).to(CPU))["ce"].item() for sample in own)
        assert sums[f"source/{name}"] == pytest.approx(alone, rel=1e-5)
        assert totals[f"source/{name}"] == sum(sample.supervised for sample in own) > 0
    assert sums["source/s0"] / totals["source/s0"] != pytest.approx(sums["source/s1"] / totals["source/s1"])
    assert sums["source/elsewhere"] == totals["source/elsewhere"] == 0
    assert sums["ce"] == pytest.approx(sums["source/s0"] + sums["source/s1"], rel=1e-6)
    assert objective.coefficients == {"ce": 1.0} | dict.fromkeys(list(sums)[1:], 0.0)
    assert not parts[0]["source/s0"].requires_grad


def test_groups_of_a_stand_in_and_of_unnamed_sources() -> None:
    _, samples = build("qwen3_vl")
    batch = pack(samples, stand_ins=1).with_groups(["nobody's"])
    assert batch.groups.tolist() == [-1] * batch.input_ids.numel()
    source = samples[0].row.source
    batch = pack(samples, stand_ins=1).with_groups([source])
    assert (batch.groups == 0).sum() == batch.num_tokens
    assert (batch.groups[batch.num_tokens :] == -1).all()


def test_fractional_weights() -> None:
    objective, samples = build("qwen3_vl")
    batch = pack(samples)
    half = replace(batch, loss_weights=batch.loss_weights * 0.5)
    full, gradients = loss_and_gradients(objective, [batch])
    halved, halves = loss_and_gradients(objective, [half])
    assert objective.weights(half)["ce"] == objective.weights(batch)["ce"] / 2
    assert halved == pytest.approx(full / 2, rel=1e-6)
    assert_same_gradients(halves, {name: g / 2 for name, g in gradients.items()})


def test_host_side_listing_of_supervised_positions() -> None:
    objective, samples = build("qwen3_vl")
    batch = pack(samples)
    moved = batch.to(CPU)
    assert batch.supervised is None
    assert torch.equal(moved.supervised, batch.loss_weights.nonzero().flatten())
    assert moved.uniform_weights
    assert not replace(batch, loss_weights=batch.loss_weights * 2).to(CPU).uniform_weights
    # weights drawn anew on the host are listed anew
    later = replace(moved, loss_weights=moved.loss_weights * 0).to(CPU)
    assert later.supervised.numel() == 0
    assert objective(moved)["ce"] == objective(replace(moved, supervised=None))["ce"]


def test_targets_follow_their_tokens() -> None:
    """The label at t is the token at t + 1, and no row's last position has one."""
    _, samples = build("qwen2_5_vl")
    for sample in samples:
        on = sample.loss_weights > 0
        assert torch.equal(sample.labels[:-1][on[:-1]], sample.input_ids[1:][on[:-1]])
        assert not on[-1]
        assert (sample.labels[~on] == -100).all()


def test_padded_index_there_and_back() -> None:
    _, samples = build("qwen3_vl")
    batch = pack(samples)
    unfold, mask, refold = padded_index(batch)
    lengths = [len(sample) for sample in samples]
    assert mask.shape == (4, max(lengths))
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(unfold.flatten()[refold], torch.arange(sum(lengths)))
    for row, sample in enumerate(samples):
        assert torch.equal(batch.input_ids[unfold[row]][: len(sample)], sample.input_ids)


def test_registered_by_name() -> None:
    assert OBJECTIVES.get("next_token") is NextToken
    with pytest.raises(UserError, match="did you mean 'next_token'"):
        OBJECTIVES.get("next_tokens")
