"""SiT: a transformer that maps noisy patches, a time and a class to a velocity, over flat sequences.

The model of "SiT: Exploring Flow and Diffusion-based Generative Models with Scalable Interpolant
Transformers" (Ma et al., 2024): DiT blocks with adaLN-zero. Module names and weight shapes are the published
ones, so that published weights fit. What differs is the form of the input: the patches of several pictures,
also of unlike sizes, lie behind one another in one sequence, and attention keeps them apart by `segments`.
There is no variance output (the published `learn_sigma`).

Legend: T patches, N pictures, P = channels * patch * patch values of a patch, D hidden size, H heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from lmms_engine.kernels.attention import attend
from lmms_engine.segments import Segments

FREQUENCIES = 256   # features of a time before its MLP
PERIOD = 10_000.0
# The library looks for this name in the source of a model whose attention can be chosen.
ALL_ATTENTION_FUNCTIONS = AttentionInterface()


@strict
class SiTConfig(PretrainedConfig):
    """The published names; the defaults are S/2 on small RGB pictures.

    input_size: side of the largest square picture, in pixels (or cells of a latent). num_classes: without the
    null class, which has the last row of the label table. class_dropout_prob: share of the pictures whose
    class is replaced by the null class in training.
    """

    model_type = "sit"

    input_size: int = 32
    patch_size: int = 2
    in_channels: int = 3
    hidden_size: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: float | int = 4.0
    class_dropout_prob: float | int = 0.1
    num_classes: int = 1000

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        sizes = "input_size patch_size in_channels hidden_size depth num_heads num_classes"
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.hidden_size % self.num_heads or self.hidden_size % 4:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by num_heads={self.num_heads} and by 4"
            )
        if self.input_size % self.patch_size:
            raise ValueError(
                f"input_size={self.input_size} must be divisible by patch_size={self.patch_size}"
            )
        if not 0 <= self.class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob={self.class_dropout_prob} must be at least 0 and below 1")

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def side(self) -> int:
        """Patches along one side of the largest square picture."""
        return self.input_size // self.patch_size

    @property
    def mlp_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)


class PatchEmbed(nn.Module):
    """Patches [T, P], values in the order (channel, row, column), to [T, D]."""

    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        p = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.hidden_size, kernel_size=p, stride=p)

    def forward(self, patches: Tensor) -> Tensor:
        weight = self.proj.weight.flatten(1)   # a convolution whose windows do not overlap
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class TimestepEmbedder(nn.Module):
    """Times [N] in 0..1 to [N, D]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, times: Tensor) -> Tensor:
        half = FREQUENCIES // 2
        steps = torch.arange(half, device=times.device, dtype=torch.float32)
        angles = times.float()[:, None] * torch.exp(-math.log(PERIOD) * steps / half)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    """Classes [N] to [N, D]; the last row is the null class."""

    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: Segments,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by segments where no backend was installed, as after `SiT.from_pretrained`."""
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(*flat, segments, scale=scaling, backend="sdpa")[None], None


class Attention(nn.Module):
    """Every patch sees all patches of its own picture."""

    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_TD: Tensor, segments: Segments) -> Tensor:
        heads = self.config.num_heads
        qkv = self.qkv(x_TD).unflatten(-1, (3, heads, -1))              # [T, 3, H, D/H]
        query, key, value = (x.transpose(0, 1)[None] for x in qkv.unbind(1))   # [1, H, T, D/H]
        name = self.config._attn_implementation
        if name == "sdpa":   # the library's own, which knows no segments
            name = "eager"
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, plain_attention)
        out, _ = function(
            self, query, key, value, None, scaling=query.shape[-1] ** -0.5, segments=segments
        )
        return self.proj(out[0].flatten(1))


class Mlp(nn.Module):
    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.mlp_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def modulation(config: SiTConfig, parts: int) -> nn.Sequential:
    """What turns a picture's condition [N, D] into `parts` vectors of shift, scale or gate."""
    return nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, parts * config.hidden_size))


def norm(config: SiTConfig) -> nn.LayerNorm:
    """Normalisation without weights of its own: shift and scale come from the condition."""
    return nn.LayerNorm(config.hidden_size, elementwise_affine=False, eps=1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-zero)."""

    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        self.norm1 = norm(config)
        self.attn = Attention(config)
        self.norm2 = norm(config)
        self.mlp = Mlp(config)
        self.adaLN_modulation = modulation(config, 6)

    def forward(self, x_TD: Tensor, condition_ND: Tensor, picture_T: Tensor, segments: Segments) -> Tensor:
        parts = self.adaLN_modulation(condition_ND).index_select(0, picture_T).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x_TD = x_TD + gate1 * self.attn(modulate(self.norm1(x_TD), shift1, scale1), segments)
        return x_TD + gate2 * self.mlp(modulate(self.norm2(x_TD), shift2, scale2))


class FinalLayer(nn.Module):
    """Hidden states [T, D] to patches [T, P]; the published order (row, column, channel) is put right."""

    def __init__(self, config: SiTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_final = norm(config)
        self.linear = nn.Linear(config.hidden_size, config.patch_dim)
        self.adaLN_modulation = modulation(config, 2)

    def forward(self, x_TD: Tensor, condition_ND: Tensor, picture_T: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition_ND).index_select(0, picture_T).chunk(2, dim=-1)
        out = self.linear(modulate(self.norm_final(x_TD), shift, scale))
        return out.unflatten(-1, (-1, self.config.in_channels)).transpose(-1, -2).flatten(-2)


class SiT(PreTrainedModel):
    """The whole model: `forward` gives the velocity of every patch."""

    config_class = SiTConfig
    config: SiTConfig
    base_model_prefix = "sit"
    main_input_name = "pixel_values"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: SiTConfig) -> None:
        super().__init__(config)
        self.x_embedder = PatchEmbed(config)
        self.t_embedder = TimestepEmbedder(config.hidden_size)
        self.y_embedder = LabelEmbedder(config)
        # Published weights hold this table; a picture smaller than the largest uses its upper left corner.
        self.register_buffer("pos_embed", position_table(config.side, config.hidden_size)[None])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, times: Tensor, labels: Tensor, position_ids: Tensor, segments: Segments
    ) -> Tensor:
        """Velocity [T, P] of patches [T, P] at times [N] in 0..1 (noise to picture) of classes [N].

        position_ids: int64 [2, T], row and column of each patch, both below `config.side`.
        """
        rows, columns = position_ids
        x_TD = self.x_embedder(pixel_values)
        places = self.pos_embed[0].index_select(0, rows * self.config.side + columns)
        x_TD = x_TD + places.to(x_TD.dtype)
        condition_ND = self.t_embedder(times) + self.y_embedder(labels)
        picture_T = torch.arange(len(times), device=times.device).repeat_interleave(
            segments.cu_seqlens.diff(), output_size=len(x_TD)
        )
        for block in self.blocks:
            x_TD = block(x_TD, condition_ND, picture_T, segments)
        return self.final_layer(x_TD, condition_ND, picture_T)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The published initialisation, in one go: the library calls it for containers only now and then."""
        if module is not self:
            return
        for part in self.modules():
            if isinstance(part, nn.Linear):
                init.xavier_uniform_(part.weight)
                init.zeros_(part.bias)
        # a linear layer over whole patches, whose fans are not those of a convolution
        patches = self.x_embedder.proj
        bound = math.sqrt(6 / (self.config.patch_dim + self.config.hidden_size))
        init.uniform_(patches.weight, -bound, bound)
        init.zeros_(patches.bias)
        for weight in (self.t_embedder.mlp[0].weight, self.t_embedder.mlp[2].weight):
            init.normal_(weight, std=0.02)
        init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        gates = [part.adaLN_modulation[1] for part in (*self.blocks, self.final_layer)]
        for linear in (self.final_layer.linear, *gates):   # blocks begin as identities, the model as 0
            init.zeros_(linear.weight)
            init.zeros_(linear.bias)
        init.copy_(self.pos_embed, position_table(self.config.side, self.config.hidden_size)[None])


def position_table(side: int, dim: int) -> Tensor:
    """Fixed positions [side * side, dim], float32: sines and cosines of the column, then of the row."""
    frequencies = PERIOD ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    line = torch.cat([angles.sin(), angles.cos()], dim=1)               # [side, dim / 2]
    columns = line[None].expand(side, -1, -1)
    rows = line[:, None].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()


AutoConfig.register("sit", SiTConfig)
AutoModel.register(SiTConfig, SiT)
