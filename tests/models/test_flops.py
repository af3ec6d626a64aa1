"""FLOPs against torch's own counter on tiny models, matrix product for matrix product."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.flops import Flops, Tally, real_grids
from lmms_engine.models.spec import MODELS
from lmms_engine.objectives.next_token import NextToken
from tests.tiny import CPU, FAMILIES, build, pack


def counted(objective: NextToken, batch: PackedBatch) -> float:
    """What torch counts in a forward and backward, less the rotary tables, which we leave out."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(batch.to(CPU))["ce"].backward()
    text = objective.model.config.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotary = 2 * 3 * (head_dim // 2) * batch.input_ids.numel()   # three axes, an outer product
    return counter.get_total_flops() - rotary


def ours(objective: NextToken, batch: PackedBatch) -> Flops:
    """Our count with attention as full squares, which is what the plain kernels compute."""
    frozen = frozenset(n for n, p in objective.model.named_parameters() if not p.requires_grad)
    spec = next(MODELS.get(name) for name in FAMILIES if objective.model.config.model_type == name)
    square = replace(batch, segments=replace(batch.segments, causal=False))
    return spec.flops(objective.model.config, square, frozen)


FREEZES = {
    "nothing": (),
    "tower": ("model.visual.",),
    "tower but not its merger": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
    "language model": ("model.language_model.", "lm_head"),
    "tower, embedding and first layer": (
        "model.visual",
        "model.language_model.embed",
        "model.language_model.layers.0.",
    ),
}


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_torchs_counter(family: str, freeze: str) -> None:
    objective, samples = build(family)
    for name, parameter in objective.model.named_parameters():
        parameter.requires_grad_(not name.startswith(FREEZES[freeze] or ("-",)))
    batch = pack(samples)
    assert ours(objective, batch).strict == counted(objective, batch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("index", range(4))
def test_every_kind_of_row(family: str, index: int) -> None:
    objective, samples = build(family)
    batch = pack([samples[index]])
    assert ours(objective, batch).strict == counted(objective, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_attention_counts_half(family: str) -> None:
    objective, samples = build(family)
    batch = pack(samples)
    spec, text = MODELS.get(family), objective.model.config.text_config
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or 16)
    unseen = sum(n * (n - 1) // 2 for n in batch.row_lengths())
    strict = spec.flops(objective.model.config, batch, frozenset()).strict
    saved = 12 * unseen * width * text.num_hidden_layers
    assert strict == ours(objective, batch).strict - saved


@pytest.mark.parametrize("family", FAMILIES)
def test_stand_ins_count_nothing(family: str) -> None:
    _, samples = build(family)
    spec = MODELS.get(family)
    config = spec.tiny()[0].config
    nothing = replace(samples[0], loss_weights=samples[0].loss_weights * 0)
    alone = spec.flops(config, pack([samples[3]]), frozenset())
    assert spec.flops(config, pack([samples[3], nothing], stand_ins=1), frozenset()) == alone
    assert spec.flops(config, pack([nothing], stand_ins=1), frozenset()) == Flops()


def test_real_grids_leave_stand_ins_out() -> None:
    _, samples = build("qwen3_vl")
    batch = pack([samples[1], samples[0]], stand_ins=1)
    assert real_grids(batch, (302, 303), 2) == [(1, 4, 4), (1, 6, 8), (2, 4, 4)]
    assert real_grids(pack([samples[3]]), (302, 303), 2) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_conventional_is_six_per_weight_and_token(family: str) -> None:
    """Text only: 6 * (matrix weights) * tokens + 12 * layers * width * length^2, whatever is frozen."""
    objective, samples = build(family)
    model, batch = objective.model, pack([samples[3]])
    text, tokens = model.config.text_config, len(samples[3])
    layers = model.get_submodule("model.language_model.layers")
    weights = sum(p.numel() for n, p in layers.named_parameters() if p.dim() == 2)
    weights += text.vocab_size * text.hidden_size
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or 16)
    expected = 6 * weights * tokens + 12 * text.num_hidden_layers * width * tokens**2
    spec = MODELS.get(family)
    everything = frozenset(name for name, _ in model.named_parameters())
    assert spec.flops(model.config, batch, frozenset()).conventional == expected
    assert spec.flops(model.config, batch, everything).conventional == expected


def test_frozen_model_is_forward_only() -> None:
    tally = Tally(frozenset({"a.weight", "b.weight"}))
    tally.linear(10, ("a", 3, 5))
    tally.attention(7.0, 9.0, 2)
    tally.linear(10, ("b", 5, 3))
    assert tally.strict == 2 * 10 * 15 + 4 * 7 * 2 + 2 * 10 * 15
    assert not tally.differentiable
