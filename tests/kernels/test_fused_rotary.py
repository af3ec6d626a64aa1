"""Attention modules with fused rotary embedding equal the library's, and others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from lmms_engine.kernels import attention
from lmms_engine.kernels.fused_rotary import DecoderAttention, EncoderAttention, fuse_rotary
from lmms_engine.kernels.rotary import split_and_turn, turn_heads
from lmms_engine.models.spec import MODELS
from tests.tiny import DECODERS, FAMILIES, assert_same_gradients, build, loss_and_gradients, pack


def turned(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition, pair by pair, as complex numbers."""
    half = x_THD.shape[-1] // 2
    pairs = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.complex(cos, sin)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def tables(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 7, tokens * half, dtype=torch.float64).view(tokens, half)
    return angles.cos(), angles.sin()


def test_turning_is_the_definition() -> None:
    q, k = draw((7, 4, 10), (7, 2, 10))
    cos, sin = tables(7, 5)
    for ours, x in zip(turn_heads(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(ours, turned(x, cos, sin))
    assert torch.autograd.gradcheck(turn_heads, (q, k, cos, sin))


def test_splitting_is_the_definition() -> None:
    (qkv,) = draw((6, 3, 2, 8))
    cos, sin = tables(6, 4)
    q, k, v = split_and_turn(qkv, cos, sin)
    torch.testing.assert_close(q, turned(qkv[:, 0], cos, sin))
    torch.testing.assert_close(k, turned(qkv[:, 1], cos, sin))
    assert torch.equal(v, qkv[:, 2])
    # values are a view, which gradcheck does not take: a sum of all three is checked instead
    weights = [torch.randn_like(q) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda x: sum((part * w).sum() for part, w in zip(split_and_turn(x, cos, sin), weights, strict=True)),
        (qkv,),
    )


def test_half_precision_is_turned_in_float32() -> None:
    x = torch.randn(50, 4, 16).bfloat16()
    cos, sin = (table.float() for table in tables(50, 8))
    (ours, _) = turn_heads(x, x, cos, sin)
    assert torch.equal(ours, turned(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("family", DECODERS)
def test_whole_models(family: str) -> None:
    """Loss and every gradient as with the library's modules, and the same names."""
    objective, samples = build(family)
    plain, _ = MODELS.get(family).tiny()
    classes = {type(m).__name__ for m in plain.modules() if "Attention" in type(m).__name__}
    assert classes, "the library calls its attention otherwise now"
    left = [m for m in objective.model.modules() if type(m).__name__ in classes]
    assert not left
    reference, _ = build(family, rmpad=False)
    assert set(plain.state_dict()) == set(objective.model.state_dict())
    expected = loss_and_gradients(reference, [pack(samples)])
    ours = loss_and_gradients(objective, [pack(samples)])
    assert ours[0] == pytest.approx(expected[0], rel=1e-6)
    assert_same_gradients(ours[1], expected[1])


def test_kinds() -> None:
    objective, _ = build(FAMILIES[0])
    kinds = [type(m) for m in objective.model.modules()]
    config = objective.model.config
    assert kinds.count(DecoderAttention) == config.text_config.num_hidden_layers
    assert kinds.count(EncoderAttention) == config.vision_config.depth


def test_tables_stay_float32() -> None:
    """A model in bfloat16 turns by the angles of a model in float32."""
    objective, _ = build("qwen3_moe")
    rotary = objective.model.model.rotary_emb
    positions = torch.arange(1000)[None]
    exact = rotary(torch.zeros(1, dtype=torch.float32), positions)
    for ours, wanted in zip(rotary(torch.zeros(1, dtype=torch.bfloat16), positions), exact, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, wanted)


class Doubling(Qwen3MoeAttention):
    """Made of the same parts, and computes something else."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(2 * hidden_states, *args, **kwargs)


def test_look_alikes_stay() -> None:
    model, _ = MODELS.get("qwen3_moe").tiny()
    layers = model.model.layers
    layers[0].self_attn.__class__ = Doubling
    assert fuse_rotary(model) == len(layers) - 1
    assert type(layers[0].self_attn) is Doubling
    assert model.model.rotary_emb(torch.zeros(1).bfloat16(), torch.arange(3)[None])[0].dtype == torch.bfloat16


def test_a_cache_or_a_batch_is_refused() -> None:
    model, _ = MODELS.get("qwen3_moe").tiny()
    attention.use(model, {"": "decoder"}, attention.install("sdpa"))
    fuse_rotary(model)
    with pytest.raises(ValueError, match="one flat sequence"):
        model(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)
