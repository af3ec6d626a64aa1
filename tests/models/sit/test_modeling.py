"""SiT against a plain dense model written from the paper, its initialisation, names and files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmms_engine.datasets.sample import Sample
from lmms_engine.kernels import attention
from lmms_engine.models.sit.modeling import SiT, SiTConfig, position_table
from lmms_engine.models.sit.tiny import tiny, tiny_config
from lmms_engine.segments import Segments

TIMES = (0.0, 0.3, 0.71, 1.0)


def velocity(model: SiT, samples: list[Sample], times: tuple[float, ...]) -> Tensor:
    segments = Segments.from_lengths([len(sample) for sample in samples], causal=False)
    return model(
        torch.cat([sample.media["pixel_values"] for sample in samples]),
        torch.tensor(times),
        torch.cat([sample.media["class_labels"] for sample in samples]),
        torch.cat([sample.position_ids for sample in samples], dim=1),
        segments,
    )


def dense(weights: dict[str, Tensor], config: SiTConfig, sample: Sample, time: float) -> Tensor:
    """One picture [C, H, W] by a convolution, dense attention and a loop over heads, to patches [T, P]."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()

    p, dim = config.patch_size, config.hidden_size
    h, w = (sample.position_ids.amax(1) + 1).tolist()
    patches = sample.media["pixel_values"].reshape(h, w, 3, p, p)
    picture = torch.zeros(3, h * p, w * p)
    for i in range(h):
        for j in range(w):
            picture[:, i * p : (i + 1) * p, j * p : (j + 1) * p] = patches[i, j]
    x = F.conv2d(picture[None], weights["x_embedder.proj.weight"], weights["x_embedder.proj.bias"], stride=p)
    x = x[0].flatten(1).T
    for i in range(h):
        for j in range(w):
            for k in range(dim // 4):
                angle = 10_000.0 ** (-k / (dim // 4))
                x[i * w + j, k] += math.sin(j * angle)
                x[i * w + j, dim // 4 + k] += math.cos(j * angle)
                x[i * w + j, dim // 2 + k] += math.sin(i * angle)
                x[i * w + j, 3 * dim // 4 + k] += math.cos(i * angle)
    angles = torch.tensor([time * math.exp(-math.log(10_000) * k / 128) for k in range(128)])
    features = torch.cat([angles.cos(), angles.sin()])
    condition = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", features)))
    condition = condition + weights["y_embedder.embedding_table.weight"][sample.media["class_labels"]][0]
    for n in range(config.depth):
        block = f"blocks.{n}"
        parts = linear(f"{block}.adaLN_modulation.1", F.silu(condition)).chunk(6)
        q, k, v = linear(f"{block}.attn.qkv", norm(x) * (1 + parts[1]) + parts[0]).chunk(3, dim=1)
        size = dim // config.num_heads
        heads = []
        for head in range(config.num_heads):
            own = slice(head * size, (head + 1) * size)
            heads.append((q[:, own] @ k[:, own].T / math.sqrt(size)).softmax(-1) @ v[:, own])
        x = x + parts[2] * linear(f"{block}.attn.proj", torch.cat(heads, dim=1))
        inner = linear(f"{block}.mlp.fc1", norm(x) * (1 + parts[4]) + parts[3])
        x = x + parts[5] * linear(f"{block}.mlp.fc2", F.gelu(inner, approximate="tanh"))
    shift, scale = linear("final_layer.adaLN_modulation.1", F.silu(condition)).chunk(2)
    out = linear("final_layer.linear", norm(x) * (1 + scale) + shift)
    return out.reshape(-1, p, p, 3).permute(0, 3, 1, 2).flatten(1)


@pytest.mark.parametrize("installed", [False, True])
def test_equals_a_plain_dense_model(installed: bool) -> None:
    """Pictures of unlike sizes, packed, through the library's default and through an installed backend."""
    model, samples = tiny()
    if installed:
        attention.use(model, {"": "decoder"}, attention.install("sdpa"))
    samples[1] = replace(
        samples[1], media={**samples[1].media, "class_labels": torch.tensor([model.config.num_classes])}
    )
    ours = velocity(model, samples, TIMES).split([len(sample) for sample in samples])
    weights = dict(model.state_dict())
    for sample, time, out in zip(samples, TIMES, ours, strict=True):
        theirs = dense(weights, model.config, sample, time)
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(out, theirs, atol=2e-5, rtol=0)


def test_output_is_zero_at_the_beginning() -> None:
    """Published initialisation: a block is the identity, the velocity is 0, and the rest is not."""
    torch.manual_seed(0)
    model = SiT(tiny_config())
    _, samples = tiny()
    assert velocity(model, samples, TIMES).eq(0).all()
    block = model.blocks[1]
    assert block.adaLN_modulation[1].weight.eq(0).all()
    fans = block.mlp.fc1.in_features + block.mlp.fc1.out_features
    assert block.mlp.fc1.weight.abs().max().item() == pytest.approx(math.sqrt(6 / fans), rel=0.01)
    assert model.t_embedder.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.y_embedder.embedding_table.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_published_names_and_shapes_of_s_2() -> None:
    with torch.device("meta"):
        model = SiT(SiTConfig(in_channels=4))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.11.")}
    assert blocks == {
        "blocks.11.attn.qkv.weight": (1152, 384),
        "blocks.11.attn.qkv.bias": (1152,),
        "blocks.11.attn.proj.weight": (384, 384),
        "blocks.11.attn.proj.bias": (384,),
        "blocks.11.mlp.fc1.weight": (1536, 384),
        "blocks.11.mlp.fc1.bias": (1536,),
        "blocks.11.mlp.fc2.weight": (384, 1536),
        "blocks.11.mlp.fc2.bias": (384,),
        "blocks.11.adaLN_modulation.1.weight": (2304, 384),
        "blocks.11.adaLN_modulation.1.bias": (2304,),
    }
    assert {name: shape for name, shape in shapes.items() if not name.startswith("blocks.")} == {
        "pos_embed": (1, 256, 384),
        "x_embedder.proj.weight": (384, 4, 2, 2),
        "x_embedder.proj.bias": (384,),
        "t_embedder.mlp.0.weight": (384, 256),
        "t_embedder.mlp.0.bias": (384,),
        "t_embedder.mlp.2.weight": (384, 384),
        "t_embedder.mlp.2.bias": (384,),
        "y_embedder.embedding_table.weight": (1001, 384),
        "final_layer.linear.weight": (16, 384),
        "final_layer.linear.bias": (16,),
        "final_layer.adaLN_modulation.1.weight": (768, 384),
        "final_layer.adaLN_modulation.1.bias": (768,),
    }


def test_positions_of_a_small_picture_are_those_of_a_larger_one() -> None:
    large, small = position_table(7, 16).unflatten(0, (7, 7)), position_table(3, 16).unflatten(0, (3, 3))
    torch.testing.assert_close(large[:3, :3], small, atol=0, rtol=0)
    assert not torch.equal(large[1, 2], large[2, 1])


def test_a_folder_opens_as_it_was(tmp_path: Path) -> None:
    model, samples = tiny()
    model.save_pretrained(tmp_path)
    again = SiT.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(velocity(again, samples, TIMES), velocity(model, samples, TIMES))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden_size": 30}, "hidden_size=30"),
        ({"num_heads": 5}, "num_heads=5"),
        ({"input_size": 9}, "input_size=9"),
        ({"class_dropout_prob": 1.0}, "class_dropout_prob=1.0"),
        ({"depth": 0}, "depth=0"),
    ],
)
def test_impossible_sizes(given: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SiTConfig(**given)
